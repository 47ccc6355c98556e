"""Samples to tokens, each aligned to its word.

Axis names: S samples, N tokens of all samples, one sample after the other.
Texts are tokenized as texts, never word by word: byte-level tokenizers lose their spaces otherwise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int
from numpy import ndarray
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pipeline.tokens.alignment import NO_WORD, align_tokens
from storage_schema.errors import InvalidRecipeError, UnsupportedModelError
from storage_schema.samples import Sample

_TEXTS_AT_ONCE = 1000


@dataclass(frozen=True)
class TokenTable:
    """The tokens of a split."""

    input_ids: Int[ndarray, " N"]
    word_ids: Int[ndarray, " N"]
    """Each token's word in its sample, or -1 for none."""
    offsets: Int[ndarray, "N 2"]
    """Each token's [start, stop) in the sample's text, (0, 0) for none."""
    lengths: Int[ndarray, " S"]
    pad_token_id: int
    """The tokenizer's pad id, else 0."""
    num_truncated: int
    """Samples that were longer than the maximum length."""
    num_words_without_token: int
    """Words that no token belongs to, by truncation or because they normalize to nothing."""

    @property
    def starts(self) -> Int[ndarray, " S"]:
        """Each sample's first token."""
        starts: Int[ndarray, " S"] = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        return starts


def load_tokenizer(path: Path, name: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerFast:
    """The fast tokenizer of a model directory.

    Special tokens that stand in a text are encoded as the text they are.

    Raises:
        UnsupportedModelError: it does not load, or is not a fast one (those alone know character offsets).
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # a damaged tokenizer.json raises a bare one
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnsupportedModelError(f"{name}: its tokenizer does not load: {reason}") from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UnsupportedModelError(
            f"{name}: {type(tokenizer).__name__} is not a fast tokenizer, so it knows no character offsets; "
            "convert it to tokenizer.json"
        )
    tokenizer.truncation_side = "right"
    return tokenizer


def encode_samples(
    tokenizer: PreTrainedTokenizerFast,
    samples: Sequence[Sample],
    max_length: int,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> TokenTable:
    """The tokens of the samples, with the tokenizer's own special tokens, truncated on the right to `max_length`.

    Args:
        max_length: in tokens; special tokens count.
        report: called with the number of samples done and in all.

    Raises:
        InvalidRecipeError: `max_length` leaves no room for a token beside the special ones.
        UnsupportedModelError: the tokenizer fails, or makes no token of some sample (named).
    """
    num_special = tokenizer.num_special_tokens_to_add()
    if max_length <= num_special:
        raise InvalidRecipeError(
            f"maximum length {max_length} leaves no room: the tokenizer adds {num_special} special tokens; "
            f"give at least {num_special + 1}"
        )
    input_ids: list[int] = []
    word_ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    lengths: list[int] = []
    num_truncated = num_words_without_token = 0
    for first in range(0, len(samples), _TEXTS_AT_ONCE):
        window = samples[first : first + _TEXTS_AT_ONCE]
        # Some tokenizer files carry padding and truncation of their own; both are said here, so theirs are off.
        try:
            encodings = tokenizer(
                [sample.text for sample in window],
                padding=False,
                truncation=True,
                max_length=max_length,
                split_special_tokens=True,
            ).encodings
        except Exception as error:  # tokenizers raise bare ones, such as for a vocabulary without its unknown token
            raise UnsupportedModelError(f"the tokenizer cannot encode the texts: {error}") from None
        assert encodings is not None
        for sample, encoding in zip(window, encodings, strict=True):
            if not encoding.ids:
                raise UnsupportedModelError(
                    f"the tokenizer makes no token of sample {sample.sample_id} ({sample.text[:40]!r}); leave it out"
                )
            spans = [
                (0, 0) if special else span
                for special, span in zip(encoding.special_tokens_mask, encoding.offsets, strict=True)
            ]
            words = align_tokens(spans, sample.word_spans)
            input_ids += encoding.ids
            word_ids += words
            offsets += spans
            lengths.append(len(encoding.ids))
            num_truncated += bool(encoding.overflowing)
            num_words_without_token += len(sample.words) - len(set(words) - {NO_WORD})
        report(first + len(window), len(samples))
    return TokenTable(
        input_ids=np.array(input_ids, np.int32),
        word_ids=np.array(word_ids, np.int32),
        offsets=np.array(offsets, np.int32).reshape(-1, 2),
        lengths=np.array(lengths, np.int32),
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
        num_truncated=num_truncated,
        num_words_without_token=num_words_without_token,
    )


def check_vocabulary(tokenizer: PreTrainedTokenizerFast, tokens: TokenTable, name: str) -> None:
    """Nothing, where at least one word of the corpus is a token that the tokenizer knows.

    Files of another kind of tokenizer load without an error and then know no word at all.

    Raises:
        UnsupportedModelError: every word became the unknown token, or none.
    """
    known = set(tokens.input_ids[tokens.word_ids != NO_WORD].tolist())
    if not known - {tokenizer.unk_token_id}:
        raise UnsupportedModelError(
            f"{name}: its tokenizer knows none of the corpus's words; are its files those of the model?"
        )
