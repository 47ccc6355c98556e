"""The batches of a partition: a pure function of its token lengths and a token budget."""

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from pipeline.tokens.encode import TokenTable


def plan_batches(lengths: Sequence[int] | Int[ndarray, " S"], batch_tokens: int) -> list[list[int]]:
    """Positions of the samples of each batch, longest first, each within `batch_tokens` padded tokens.

    Samples are sorted by length, so that little is padding; a sample over the budget is a batch of its own.
    """
    batches: list[list[int]] = []
    for position in sorted(range(len(lengths)), key=lambda position: (-int(lengths[position]), position)):
        if batches and (len(batches[-1]) + 1) * int(lengths[batches[-1][0]]) <= batch_tokens:
            batches[-1].append(position)
        else:
            batches.append([position])
    return batches


def iter_batches(
    tokens: TokenTable, start: int, stop: int, batch_tokens: int
) -> Iterator[tuple[list[int], Int[ndarray, "B T"], Int[ndarray, "B T"]]]:
    """The batches of samples `[start, stop)`: sample indexes, input ids and attention mask, padded on the right."""
    firsts = tokens.starts
    for batch in plan_batches(tokens.lengths[start:stop], batch_tokens):
        indexes = [start + position for position in batch]
        longest = int(tokens.lengths[indexes[0]])
        input_ids = np.full((len(indexes), longest), tokens.pad_token_id, np.int64)
        mask = np.zeros_like(input_ids)
        for row, index in enumerate(indexes):
            length = int(tokens.lengths[index])
            input_ids[row, :length] = tokens.input_ids[firsts[index] : firsts[index] + length]
            mask[row, :length] = 1
        yield indexes, input_ids, mask
