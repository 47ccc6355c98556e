"""What a dataset hands out: one sample, or a padded batch of them.

Axis names: B batch, M maps, T tokens (rows are queries, columns are keys).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pyarrow as pa
import torch
from jaxtyping import Float, Int
from torch import Tensor

from storage_schema.samples import Sample, from_table

_TENSORS = ("maps", "attention_mask", "input_ids", "word_ids", "offsets")


class SampleRows:
    """Rows of the sample table, taken when they are first looked at, or when they go to another process."""

    def __init__(self, take: Callable[[list[int]], pa.Table], indices: list[int]) -> None:
        self._take, self._indices = take, indices

    @cached_property
    def table(self) -> pa.Table:
        """These rows alone, in order."""
        return self._take(self._indices)

    @cached_property
    def samples(self) -> list[Sample]:
        """The texts with their annotation."""
        return from_table(self.table)

    def __getstate__(self) -> dict[str, Any]:
        return {"table": self.table}


@dataclass(frozen=True)
class Item:
    """One sample of a dataset."""

    sample_id: str
    input_ids: Int[Tensor, " T"]
    word_ids: Int[Tensor, " T"]
    """Each token's word, or -1 for none."""
    offsets: Int[Tensor, "T 2"]
    """Each token's [start, stop) in the text, (0, 0) for none."""
    maps: Float[Tensor, "M T T"]
    """float32, in the order of the dataset's `maps`."""
    rows: SampleRows = field(repr=False, compare=False)

    @property
    def sample(self) -> Sample:
        """The text with its annotation."""
        return self.rows.samples[0]


@dataclass(frozen=True)
class Batch:
    """Samples padded on the right to one length: maps 0, word ids -1, offsets 0, ids the tokenizer's pad id."""

    maps: Float[Tensor, "B M T T"]
    attention_mask: Int[Tensor, "B T"]
    """1 for tokens, 0 for padding; made from lengths."""
    input_ids: Int[Tensor, "B T"]
    word_ids: Int[Tensor, "B T"]
    offsets: Int[Tensor, "B T 2"]
    sample_ids: list[str]
    rows: SampleRows | None = field(repr=False, compare=False)
    """None on the way from a loader's worker to the loader."""

    @property
    def samples(self) -> list[Sample]:
        """The texts with their annotation."""
        assert self.rows is not None
        return self.rows.samples

    def __len__(self) -> int:
        return len(self.sample_ids)

    def pin_memory(self) -> "Batch":
        """The batch in page-locked memory, as torch's DataLoader asks for under `pin_memory=True`."""
        return self._map_tensors(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        """The batch with its tensors on a device."""
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def _map_tensors(self, function: Any) -> "Batch":
        return replace(self, **{name: function(getattr(self, name)) for name in _TENSORS})
