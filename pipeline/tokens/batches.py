"""The batches of a partition: a pure function of its token lengths and a token budget."""

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from pipeline.tokens.encode import TokenTable

BATCH_COST = 1 / 16
"""What one more batch costs, as a part of the token budget: small passes are slower by the token."""


def plan_batches(
    lengths: Sequence[int] | Int[ndarray, " S"], batch_tokens: int, short_length: int | None = None
) -> list[list[int]]:
    """Positions of the samples of each batch, longest first, each within `batch_tokens` padded tokens.

    Samples are sorted by length and cut where the sum of padded tokens and of `BATCH_COST` a batch is least, so that
    a few long texts do not make padding of many short ones. A sample over the budget is a batch of its own.

    Args:
        short_length: samples up to it never share a batch with longer ones.
    """
    order = sorted(range(len(lengths)), key=lambda position: (-int(lengths[position]), position))
    cost = np.zeros(len(order) + 1)
    sizes = np.ones(len(order), np.int64)
    num_long = sum(int(length) > short_length for length in lengths) if short_length else 0
    for first in reversed(range(len(order))):
        longest = int(lengths[order[first]])
        stop = num_long if first < num_long else len(order)
        most = min(max(1, batch_tokens // longest), stop - first)
        costs = longest * np.arange(1, most + 1) + cost[first + 1 : first + most + 1]
        sizes[first] = 1 + int(np.argmin(costs))
        cost[first] = costs[sizes[first] - 1] + BATCH_COST * batch_tokens
    batches, first = [], 0
    while first < len(order):
        batches.append(order[first : first + int(sizes[first])])
        first += int(sizes[first])
    return batches


def iter_batches(
    tokens: TokenTable, start: int, stop: int, batch_tokens: int, short_length: int | None = None
) -> Iterator[tuple[list[int], Int[ndarray, "B T"], Int[ndarray, "B T"]]]:
    """The batches of samples `[start, stop)`: sample indexes, input ids and attention mask, padded on the right.

    Args:
        short_length: as in `plan_batches`.
    """
    firsts = tokens.starts
    for batch in plan_batches(tokens.lengths[start:stop], batch_tokens, short_length):
        indexes = [start + position for position in batch]
        longest = int(tokens.lengths[indexes[0]])
        input_ids = np.full((len(indexes), longest), tokens.pad_token_id, np.int64)
        mask = np.zeros_like(input_ids)
        for row, index in enumerate(indexes):
            length = int(tokens.lengths[index])
            input_ids[row, :length] = tokens.input_ids[firsts[index] : firsts[index] + length]
            mask[row, :length] = 1
        yield indexes, input_ids, mask
