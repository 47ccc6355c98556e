"""The arrays of a version, how a map is packed into cells, and how samples are planned into partitions.

Axis names: P partitions, C cells of a partition, S samples, N tokens of all samples, T tokens of one sample.
Everything here takes arrays and returns arrays; FORMAT.md says the same in words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from storage_schema.recipe import MapName

CHUNK_CELLS = 64 * 1024
"""Cells in a chunk, the unit of reading: 128 KiB of float16."""
PARTITION_CELLS = 4 * 1024 * 1024
"""Cells at which a partition closes: 8 MiB of float16 a map."""

Packing: TypeAlias = Literal["full", "lower"]
"""Which cells of a map are stored, row by row: all, or the lower triangle with the diagonal (causal models)."""


@dataclass(frozen=True)
class IndexArray:
    """An array of the index: one value a sample (`S`) or a token (`N`)."""

    name: str
    dtype: str
    axis: Literal["S", "N"]
    width: int
    meaning: str


INDEX_ARRAYS = (
    IndexArray("partition", "int32", "S", 1, "the partition that holds the sample: row of every map array"),
    IndexArray("start", "int64", "S", 1, "its first cell in that row"),
    IndexArray("length", "int32", "S", 1, "its number of tokens T, special tokens included"),
    IndexArray("sample_hash", "uint64", "S", 1, "the 16 hex digits of its sample_id as a number"),
    IndexArray("sample_repetition", "int32", "S", 1, "k of the `-k` of its sample_id, else 0"),
    IndexArray("input_ids", "int32", "N", 1, "token ids, sample after sample"),
    IndexArray("word_ids", "int32", "N", 1, "each token's word, or -1 for none"),
    IndexArray("offsets", "int32", "N", 2, "each token's [start, stop) characters in the text, (0, 0) for none"),
)


def name_array(name: MapName) -> str:
    """The array that holds a map: `order_K`, or the baseline's own name."""
    return f"order_{name}" if isinstance(name, int) else name


def count_cells(length: int, packing: Packing) -> int:
    """Cells stored for a map of `length` tokens."""
    return length * length if packing == "full" else length * (length + 1) // 2


@lru_cache(maxsize=512)
def _lower_triangle(length: int) -> Bool[ndarray, "T T"]:
    return np.tri(length, dtype=bool)


def pack_map(values: Float[ndarray, "T T"], packing: Packing) -> Float[ndarray, " cells"]:
    """The stored cells of a map, row-major."""
    return values.reshape(-1) if packing == "full" else values[_lower_triangle(len(values))]


def unpack_map(cells: Float[ndarray, " cells"], length: int, packing: Packing) -> Float[ndarray, "T T"]:
    """The map back from its cells, in their dtype; what `lower` leaves out is 0."""
    if packing == "full":
        return cells.reshape(length, length)
    values = np.zeros((length, length), cells.dtype)
    values[_lower_triangle(length)] = cells
    return values


@dataclass(frozen=True)
class Partition:
    """One writer's samples `[start, stop)`, and the cells that they fill."""

    number: int
    start: int
    stop: int
    num_cells: int


def plan_partitions(
    lengths: Sequence[int] | Int[ndarray, " S"],
    *,
    packing: Packing,
    partition_samples: int,
    partition_cells: int = PARTITION_CELLS,
) -> list[Partition]:
    """The partitions of a split, in corpus order, from token lengths alone.

    A partition closes when the next sample would not fit into `partition_cells`, or at `partition_samples`. So a corpus
    that grows at its end keeps every partition but its last. Sample order inside a row of cells is corpus order.
    """
    partitions: list[Partition] = []
    start = filled = 0
    for index, length in enumerate(lengths):
        cells = count_cells(int(length), packing)
        if index > start and (filled + cells > partition_cells or index - start == partition_samples):
            partitions.append(Partition(len(partitions), start, index, filled))
            start, filled = index, 0
        filled += cells
    if len(lengths):
        partitions.append(Partition(len(partitions), start, len(lengths), filled))
    return partitions


def count_row_cells(partitions: Sequence[Partition]) -> int:
    """C: the cells in every row of a map array: `PARTITION_CELLS`, or whole chunks enough for a longer sample alone."""
    longest = max(partition.num_cells for partition in partitions)
    return max(PARTITION_CELLS, -(-longest // CHUNK_CELLS) * CHUNK_CELLS)


def place_samples(
    lengths: Int[ndarray, " S"], partitions: Sequence[Partition], packing: Packing
) -> tuple[Int[ndarray, " S"], Int[ndarray, " S"]]:
    """Each sample's partition (int32) and first cell (int64)."""
    cells = np.array([count_cells(int(length), packing) for length in lengths], np.int64)
    owner = np.zeros(len(lengths), np.int32)
    first = np.zeros(len(lengths), np.int64)
    for partition in partitions:
        window = slice(partition.start, partition.stop)
        owner[window] = partition.number
        first[window] = np.cumsum(cells[window]) - cells[window]
    return owner, first
