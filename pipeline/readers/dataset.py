"""One version as a torch dataset: maps, tokens and annotation of each sample, and batches of them.

Axis names: B batch, M maps, T tokens (rows are queries, columns are keys).
"""

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from pipeline.store.catalog import choose_store
from pipeline.store.layout import Store, open_store
from pipeline.store.open import StoredVersion
from pipeline.store.versions import Version, resolve_ref
from storage_schema.arrays import CHUNK_CELLS, Packing, count_cells, unpack_map
from storage_schema.errors import CorruptedObjectError, InvalidRecipeError
from storage_schema.manifest import Manifest
from storage_schema.recipe import MapName, Recipe
from storage_schema.samples import Sample, from_table, join_sample_id

if TYPE_CHECKING:
    from pipeline.readers.loader import Loader

_TENSORS = ("maps", "attention_mask", "input_ids", "word_ids", "offsets")
CACHE_BYTES = 256 * 1024 * 1024
"""Decoded chunks kept by each process, by default."""


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
    row: pa.Table = field(repr=False)
    """The sample's row of the sample table."""

    @cached_property
    def sample(self) -> Sample:
        """The text with its annotation."""
        return from_table(self.row)[0]


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
    rows: pa.Table = field(repr=False)

    @cached_property
    def samples(self) -> list[Sample]:
        """The texts with their annotation."""
        return from_table(self.rows)

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


class OlaDataset(torch.utils.data.Dataset[Item]):
    """A finished version, readable from any process: it pickles, and each process opens the store for itself."""

    def __init__(
        self, store: Store, version: Version, maps: tuple[MapName, ...], cache_bytes: int = CACHE_BYTES
    ) -> None:
        self.maps = maps
        """The maps that are read, in the order they were asked for."""
        self._store, self._version, self._cache_bytes = store, version, cache_bytes
        self._reopen()

    def _reopen(self) -> None:
        self._process = os.getpid()
        self._opened = StoredVersion(self._store, self._version)
        self._chunks: OrderedDict[tuple[MapName, int, int], Float[ndarray, " cells"]] = OrderedDict()
        self._cached_bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"store": self._store, "version": self._version, "maps": self.maps, "cache_bytes": self._cache_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def ref(self) -> str:
        """The ref that names this version for good: `...@vN`."""
        return str(self._version.ref)

    @property
    def manifest(self) -> Manifest:
        return self._version.manifest

    @property
    def recipe(self) -> Recipe:
        return self._version.manifest.recipe

    def __len__(self) -> int:
        return self.manifest.counts.samples

    def __getitem__(self, index: int) -> Item:
        """The sample at `index`; negative indexes count from the end.

        Raises:
            IndexError: out of range.
            CorruptedObjectError: a shard does not decode, or fails its checksum.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.ref} has {len(self)} samples, asked for {index}")
        index %= len(self)
        if self._process != os.getpid():
            self._reopen()
        stored = self._opened.index
        length = int(stored["length"][index])
        first = int(self._first_tokens[index])
        tokens = slice(first, first + length)
        return Item(
            sample_id=join_sample_id(int(stored["sample_hash"][index]), int(stored["sample_repetition"][index])),
            input_ids=_to_tensor(stored["input_ids"][tokens]),
            word_ids=_to_tensor(stored["word_ids"][tokens]),
            offsets=_to_tensor(stored["offsets"][tokens]),
            maps=torch.from_numpy(self._read_maps(index, length)),
            row=self._read_row(index),
        )

    @cached_property
    def _first_tokens(self) -> Int[ndarray, " S"]:
        lengths = self._opened.index["length"]
        firsts: Int[ndarray, " S"] = np.cumsum(lengths, dtype=np.int64) - lengths
        return firsts

    def _read_maps(self, index: int, length: int) -> Float[ndarray, "M T T"]:
        packing: Packing = self.manifest.packing
        partition = int(self._opened.index["partition"][index])
        start = int(self._opened.index["start"][index])
        stop = start + count_cells(length, packing)
        maps = np.empty((len(self.maps), length, length), np.float32)
        for row, name in enumerate(self.maps):
            cells = np.concatenate(
                [
                    self._read_chunk(name, partition, chunk)[
                        max(0, start - chunk * CHUNK_CELLS) : stop - chunk * CHUNK_CELLS
                    ]
                    for chunk in range(start // CHUNK_CELLS, (stop - 1) // CHUNK_CELLS + 1)
                ]
            )
            maps[row] = unpack_map(cells, length, packing)
        return maps

    def _read_chunk(self, name: MapName, partition: int, chunk: int) -> Float[ndarray, " cells"]:
        key = (name, partition, chunk)
        if key in self._chunks:
            self._chunks.move_to_end(key)
            return self._chunks[key]
        cells = self._opened.read_chunk(name, partition, chunk)
        self._chunks[key] = cells
        self._cached_bytes += cells.nbytes
        while self._cached_bytes > self._cache_bytes and len(self._chunks) > 1:
            self._cached_bytes -= self._chunks.popitem(last=False)[1].nbytes
        return cells

    def _read_row(self, index: int) -> pa.Table:
        row = self._opened.samples_table.slice(index, 1)
        stored = self._opened.index
        expected = join_sample_id(int(stored["sample_hash"][index]), int(stored["sample_repetition"][index]))
        found = row["sample_id"][0].as_py() if row.num_rows else None
        if found != expected:
            raise CorruptedObjectError(
                f"{self.ref}: row {index} of {self.manifest.samples_path} is {found}, the index says {expected}; "
                "restore the sample table from a copy"
            )
        return row

    def collate(self, items: Sequence[Item], pad_to_multiple_of: int = 1) -> Batch:
        """The items as one batch, padded on the right to the longest, rounded up to a multiple."""
        longest = max(len(item.input_ids) for item in items)
        length = -(-longest // pad_to_multiple_of) * pad_to_multiple_of
        size = len(items)
        maps = torch.zeros(size, len(self.maps), length, length)
        mask = torch.zeros(size, length, dtype=torch.int64)
        input_ids = torch.full((size, length), self.manifest.pad_token_id, dtype=torch.int64)
        word_ids = torch.full((size, length), -1, dtype=torch.int64)
        offsets = torch.zeros(size, length, 2, dtype=torch.int64)
        for row, item in enumerate(items):
            stop = len(item.input_ids)
            maps[row, :, :stop, :stop] = item.maps
            mask[row, :stop] = 1
            input_ids[row, :stop] = item.input_ids
            word_ids[row, :stop] = item.word_ids
            offsets[row, :stop] = item.offsets
        # `take` copies: a slice would carry the whole table with it from process to process.
        rows = pa.concat_tables([item.row for item in items]).take(list(range(size)))
        return Batch(maps, mask, input_ids, word_ids, offsets, [item.sample_id for item in items], rows)

    def loader(self, batch_size: int = 32, **options: Any) -> "Loader":
        """A resumable loader over this dataset; see `Loader` for the options."""
        from pipeline.readers.loader import Loader

        return Loader(self, batch_size, **options)

    def locate_blocks(self) -> Int[ndarray, " S"]:
        """Each sample's block: samples that begin in the same chunk are read together."""
        partition, start = self._opened.index["partition"].astype(np.int64), self._opened.index["start"]
        chunks_a_partition = int(start.max()) // CHUNK_CELLS + 1
        blocks: Int[ndarray, " S"] = partition * chunks_a_partition + start // CHUNK_CELLS
        return blocks


def _to_tensor(values: Int[ndarray, "..."]) -> Int[Tensor, "..."]:
    return torch.from_numpy(values.astype(np.int64))


def open_dataset(
    ref: str,
    store: str | Path | None = None,
    maps: Sequence[MapName] | None = None,
    cache_bytes: int = CACHE_BYTES,
) -> OlaDataset:
    """The dataset that a ref names, for reading.

    Args:
        ref: `<model>/<corpus>/<split>[@<version>]`; without a version, the latest.
        store: the store's folder; default `OLA_STORE`, else `data/store`.
        maps: which maps to read, in this order; default all stored, orders ascending, then names.
        cache_bytes: decoded chunks that each process keeps.

    Raises:
        InvalidNameError: `ref` is no ref.
        StoreAccessError: there is no store there.
        DatasetNotFoundError: the store has no such dataset or version.
        InvalidRecipeError: a map is not stored in it, or none is asked for.
        MissingObjectError, CorruptedObjectError: an object is missing or has another size than recorded.
        NewerFormatError: a later release wrote it.
    """
    folder = open_store(choose_store(store))
    version = resolve_ref(folder, ref)
    stored = version.manifest.recipe.maps
    requested = stored if maps is None else tuple(maps)
    if not requested or (absent := [name for name in requested if name not in stored]):
        asked = ", ".join(map(str, absent)) if requested else "none at all"
        raise InvalidRecipeError(f"{version.ref} stores the maps {stored}; asked for {asked}")
    return OlaDataset(folder, version, requested, cache_bytes)
