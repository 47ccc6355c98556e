"""IRNL and ALTI: the baselines that look at what attention moves, and not only at its probabilities.

Axis names: T tokens of one text (rows are queries i, columns are keys j), J keys of a tile, H heads, D hidden size.
Both score how much key j contributes to the output of an attention block at query i, scale each row to sum 1, and
multiply the layers' scores, later layers on the left. With `t_ij` and `y_i` of `blocks`:

    IRNL (Kobayashi et al. 2021, arXiv 2109.07152):  c_ij = ||t_ij||_2
    ALTI (Ferrando et al. 2022, arXiv 2203.04212):  c_ij = max(0, ||y_i||_1 - ||y_i - t_ij||_1)

IRNL's norms come from Gram products: `||sum_h a_ij^h v_j^h||^2 = a_ij^T (V_j V_j^T) a_ij`, an H x H matrix a key
instead of a T x T x D tensor a layer. ALTI's L1 distances have no such form and are computed a few keys at a time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.ola.attention import CallReader
from pipeline.ola.blocks import Decomposition, reading_blocks


def compute_irnl(block: Decomposition) -> Float[Tensor, "T T"]:
    """The norms of the transformed vectors, rows scaled to sum 1."""
    squares = []
    diagonal = torch.empty_like(block.residual)
    for keys, attention, vectors in block.iter_tiles():
        gram = vectors @ vectors.transpose(1, 2)
        squares.append(((attention @ gram) * attention).sum(dim=-1))
        diagonal[keys] = _mix_own(keys, attention, vectors) + block.residual[keys]
    norms = torch.cat(squares).T.clamp_min(0).sqrt()
    norms.diagonal().copy_(diagonal.norm(dim=-1))
    return norms / norms.sum(dim=-1, keepdim=True)


def compute_alti(block: Decomposition) -> Float[Tensor, "T T"]:
    """How near each transformed vector comes to the output, by L1 distance, rows scaled to sum 1.

    Where no vector brings an output nearer than none at all (the paper's 0 / 0), the token counts as its own: `c_ii =
    1`.
    """
    columns = []
    size = block.output.abs().sum(dim=-1)
    for _, transformed in iter_transformed(block):
        nearness = size - (block.output - transformed).abs().sum(dim=-1)
        # Exactly 0 where nothing is attended to, whatever the order of two sums.
        columns.append(nearness.masked_fill_(~transformed.any(dim=-1), 0.0))
    contributions = torch.cat(columns).T.clamp_min(0)
    nowhere = contributions.sum(dim=-1) == 0
    contributions.diagonal().masked_fill_(nowhere, 1.0)
    return contributions / contributions.sum(dim=-1, keepdim=True)


def reconstruct_output(block: Decomposition) -> Float[Tensor, "T D"]:
    """The block's output as the sum of its parts, `sum_j t_ij + b_i`; the model's own is `block.output`."""
    total = block.bias.clone()
    for _, transformed in iter_transformed(block):
        total += transformed.sum(dim=0)
    return total


def iter_transformed(block: Decomposition) -> Iterator[tuple[slice, Float[Tensor, "J T D"]]]:
    """The transformed vectors `t_ij` of a few keys at a time."""
    for keys, attention, vectors in block.iter_tiles():
        transformed = attention @ vectors
        for place, token in enumerate(range(keys.start, keys.stop)):
            transformed[place, token] += block.residual[token]
        yield keys, transformed


def _mix_own(keys: slice, attention: Float[Tensor, "J T H"], vectors: Float[Tensor, "J H D"]) -> Float[Tensor, "J D"]:
    own = torch.stack([attention[place, token] for place, token in enumerate(range(keys.start, keys.stop))])
    return torch.bmm(own[:, None], vectors)[:, 0]


CONTRIBUTIONS: dict[str, Callable[[Decomposition], Float[Tensor, "T T"]]] = {
    "irnl": compute_irnl,
    "alti": compute_alti,
}


@contextmanager
def reading_contributions(
    model: PreTrainedModel,
    names: tuple[str, ...],
    attention_mask: Int[Tensor, "B T"],
    add_contributions: Callable[[str, Float[Tensor, "B T T"]], None],
) -> Iterator[CallReader]:
    """A reader of attention calls; with it, each block's contributions go to `add_contributions`, by baseline.

    Args:
        attention_mask: 1 for tokens, 0 for padding on the right, which contributes 0.
    """
    lengths, width = attention_mask.sum(dim=1).tolist(), attention_mask.shape[1]
    gathered: dict[str, Tensor] = {}

    def read(row: int, block: Decomposition) -> None:
        for name in names:
            if row == 0:
                gathered[name] = block.residual.new_zeros(len(lengths), width, width)
            gathered[name][row, : lengths[row], : lengths[row]] = CONTRIBUTIONS[name](block)
        if row == len(lengths) - 1:
            for name in names:
                add_contributions(name, gathered.pop(name))

    with reading_blocks(model, lengths, read) as read_call:
        yield read_call
