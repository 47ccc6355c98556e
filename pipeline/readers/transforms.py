"""What is done to a batch of maps before they are compared or learned from, as pure functions of tensors.

Axis names: B batch, M maps, T tokens (rows are queries, columns are keys), W words, S new size.
Maps are non-negative and padded on the right; `lengths` gives each sample's real tokens, and what lies beyond them
stays exactly 0. Maps come in and go out as float32, on their own device, and an input is never modified. Nothing here
reads a store, and nothing is fitted.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import interpolate

from storage_schema.errors import InvalidRecipeError

NUM_SIGMAS = 3.0
"""An entry this many standard deviations above its row's mean is an outlier."""


def remove_outliers(
    maps: Float[Tensor, "B M T T"], lengths: Int[Tensor, " B"], *, causal: bool, renormalized: bool = True
) -> Float[Tensor, "B M T T"]:
    """The maps without the outliers of each row: 0 where an entry is far above the row's mean, or the row's maximum.

        a_j <- 0   where   a_j > mean + 3 sigma   or   a_j = max,   then   a <- a / sum(a)

    mean, sigma (unbiased: divided by n - 1) and max are taken over the n real entries of the row, before any of them is
    removed.

    Args:
        lengths: real tokens of each sample, in [1, T].
        causal: the real entries of a row are the keys up to its query; else the sample's `length` keys. What a causal
            map has above its diagonal comes back 0.
        renormalized: whether rows are scaled to sum 1 afterwards; if not, an entry that stays keeps its exact value.

    Returns:
        Maps whose rows sum to 1, or to 0 where nothing is left: a row of one real entry (the first of every causal
        map), or of equal entries. Never NaN for finite maps.

    Raises:
        InvalidRecipeError: `lengths` has another shape than [B], or a length lies outside [1, T].

    Numerics: mean, sigma and sums in float64, so that padding and batch do not decide what is an outlier. Under 11
    entries no entry can be 3 sigma above the mean, so that short rows lose their maximum only.

    Source: arXiv 2511.05064, as in its published code. A maximum that occurs several times is removed everywhere, as
    there. For causal models that code's retrieval and visual model count the structural zeros above the diagonal as
    entries, which lowers the mean: pass `causal=False` for those figures. It divides by the sum + 1e-10, we by the sum.
    """
    _check_lengths(maps, lengths)
    real = _mark_real(lengths.to(maps.device), maps.shape[-1], causal)[:, None]
    values = maps.double().masked_fill(~real, 0)
    num_entries = real.sum(-1, keepdim=True)
    mean = values.sum(-1, keepdim=True) / num_entries.clamp(min=1)
    deviations = (values - mean).masked_fill(~real, 0)
    sigma = (deviations.square().sum(-1, keepdim=True) / (num_entries - 1).clamp(min=1)).sqrt()
    removed = (deviations > NUM_SIGMAS * sigma) | (values == values.amax(-1, keepdim=True)) | ~real
    kept = maps.float().masked_fill(removed, 0)
    return renormalize(kept) if renormalized else kept


def renormalize(maps: Float[Tensor, "B M T T"]) -> Float[Tensor, "B M T T"]:
    """The maps with every row divided by its sum. Rows sum to 1; a row of zeros stays one.

    Numerics: sums and quotients in float64.
    """
    sums = maps.sum(-1, keepdim=True, dtype=torch.float64)
    return (maps / sums.masked_fill(sums == 0, 1)).float()


def symmetrize(maps: Float[Tensor, "B M T T"]) -> Float[Tensor, "B M T T"]:
    """The maps of a causal model made symmetric: above the diagonal stands the transposed lower triangle.

    What a map had above its diagonal is dropped. Rows no longer sum to 1.

    Source: arXiv 2511.05064, the adapter's input, after outliers are removed and rows renormalized.
    """
    lower = maps.float().tril()
    return lower + lower.tril(-1).mT


def resize(maps: Float[Tensor, "B M T T"], lengths: Int[Tensor, " B"], size: int) -> Float[Tensor, "B M S S"]:
    """Each sample's own [length, length] square, scaled to [size, size]: bilinear, antialiased, corners not aligned.

    Args:
        lengths: real tokens of each sample, in [1, T]; padding has no part in the result.
        size: S, rows and columns of the result, at least 1.

    Returns:
        Maps without padding. Entries keep their scale, so that a row's sum is about S / length of what it was.

    Raises:
        InvalidRecipeError: `size` is under 1, `lengths` has another shape than [B], or a length lies outside [1, T].

    Source: arXiv 2511.05064, similarity by retrieval, S = 50.
    """
    if size < 1:
        raise InvalidRecipeError(f"maps are resized to a size of at least 1, got {size}")
    _check_lengths(maps, lengths)
    lengths = lengths.to(maps.device)
    resized = torch.empty(*maps.shape[:2], size, size, device=maps.device)
    for length in sorted(set(lengths.tolist())):
        rows = lengths == length
        squares = maps[:, :, :length, :length][rows].float()
        resized[rows] = interpolate(squares, (size, size), mode="bilinear", align_corners=False, antialias=True)
    return resized


def pool_words(
    maps: Float[Tensor, "B M T T"], word_ids: Int[Tensor, "B T"], num_words: Int[Tensor, " B"]
) -> Float[Tensor, "B M W W"]:
    """The maps between words: what a word's tokens give, on average, to all tokens of another.

        P[v, w] = mean over tokens i of v of ( sum over tokens j of w of A[i, j] )

    Args:
        word_ids: each token's word, in [0, num_words), in any order, or -1 for a token outside words (special tokens,
            padding), which is left out as query and as key.
        num_words: words of each sample; W is the largest of them.

    Returns:
        Maps padded with 0 up to W. A row sums to 1 minus what the word's tokens gave, on average, to tokens outside
        words. A word without a token has a row and a column of zeros.

    Raises:
        InvalidRecipeError: `word_ids` or `num_words` has another shape, or a word id is neither -1 nor in
            [0, num_words).

    Numerics: two float32 matrix products; 1e-6 absolute for rows that sum to 1.
    """
    _check_words(maps, word_ids, num_words)
    words = torch.arange(max(num_words.tolist(), default=0), device=maps.device)
    members = (word_ids.to(maps.device)[..., None] == words).float()
    averages = members / members.sum(1, keepdim=True).clamp(min=1)
    return averages.mT[:, None] @ (maps.float() @ members[:, None])


def _mark_real(lengths: Int[Tensor, " B"], num_tokens: int, causal: bool) -> Bool[Tensor, "B T T"]:
    """True where query and key are real, and for causal maps the key is not after the query."""
    inside = torch.arange(num_tokens, device=lengths.device) < lengths[:, None]
    real = inside[:, :, None] & inside[:, None, :]
    return real.tril() if causal else real


def _check_lengths(maps: Float[Tensor, "B M T T"], lengths: Int[Tensor, "..."]) -> None:
    batch, num_tokens = maps.shape[0], maps.shape[-1]
    if lengths.shape != (batch,):
        raise InvalidRecipeError(
            f"lengths are one number a sample, shape ({batch},) for this batch; got shape {tuple(lengths.shape)}"
        )
    outside = (lengths < 1) | (lengths > num_tokens)
    if outside.any():
        sample = int(outside.nonzero()[0])
        raise InvalidRecipeError(
            f"lengths lie in [1, {num_tokens}], the tokens of the maps; sample {sample} of the batch has "
            f"{int(lengths[sample])}"
        )


def _check_words(maps: Float[Tensor, "B M T T"], word_ids: Int[Tensor, "..."], num_words: Int[Tensor, "..."]) -> None:
    batch, num_tokens = maps.shape[0], maps.shape[-1]
    if word_ids.shape != (batch, num_tokens) or num_words.shape != (batch,):
        raise InvalidRecipeError(
            f"word_ids have shape ({batch}, {num_tokens}) and num_words ({batch},) for this batch; got shapes "
            f"{tuple(word_ids.shape)} and {tuple(num_words.shape)}"
        )
    outside = (word_ids < -1) | (word_ids >= num_words.to(word_ids.device)[:, None])
    if outside.any():
        sample, token = outside.nonzero()[0].tolist()
        raise InvalidRecipeError(
            f"word ids are -1 or lie in [0, {int(num_words[sample])}), the sample's num_words; token {token} of sample "
            f"{sample} of the batch has {int(word_ids[sample, token])}"
        )
