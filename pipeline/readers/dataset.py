"""One version as a torch dataset: maps, tokens and annotation of each sample, and batches of them.

Axis names: B batch, M maps, T tokens (rows are queries, columns are keys), S samples, L tokens of a padded row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from pipeline.readers.batch import Batch, Item, SampleRows
from pipeline.readers.cells import CellReader
from pipeline.store.catalog import choose_store
from pipeline.store.layout import Store, open_store
from pipeline.store.open import StoredVersion
from pipeline.store.versions import Version, resolve_ref
from storage_schema.arrays import count_cells
from storage_schema.errors import CorruptedObjectError, InvalidRecipeError
from storage_schema.manifest import Manifest
from storage_schema.paths import expand_home
from storage_schema.recipe import MapName, Recipe
from storage_schema.samples import join_sample_id

if TYPE_CHECKING:
    from pipeline.readers.loader import Loader

CACHE_BYTES = 256 * 1024 * 1024
"""Decoded chunks that are kept, by default: 180,000 float16 maps of 27 tokens (the root mean square of sentences in
ud-ewt), so that most corpora fit whole; yet little of a laptop's memory, and only what is read takes room."""


class OlaDataset(torch.utils.data.Dataset[Item]):
    """A finished version, readable from any process: it pickles, and workers may start in any way."""

    def __init__(
        self,
        store: Store,
        version: Version,
        maps: tuple[MapName, ...],
        cache_bytes: int = CACHE_BYTES,
        cache_path: Path | None = None,
    ) -> None:
        self.maps = maps
        """The maps that are read, in the order they were asked for."""
        self._store, self._version = store, version
        self._opened = StoredVersion(store, version)
        self._cells = CellReader(self._opened, maps, cache_bytes, cache_path)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "store": self._store, "version": self._version, "maps": self.maps,
            "cache_bytes": self._cells.cache_bytes, "cache_path": self._cells.cache_path,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def with_cache(self, path: Path | None, least_blocks: int) -> "OlaDataset":
        """The same dataset with another cache.

        Args:
            path: the folder of a file of decoded chunks, for all processes that open the dataset there; None for
                what the dataset has.
            least_blocks: blocks that the cache has room for, whatever its budget.
        """
        budget = max(self.cache_bytes, least_blocks * self.block_bytes)
        return OlaDataset(self._store, self._version, self.maps, budget, path or self._cells.cache_path)

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

    @property
    def fingerprint(self) -> str:
        """What a loader's state belongs to: the recipe's fingerprint."""
        return self.recipe.fingerprint

    @property
    def cache_bytes(self) -> int:
        """Bytes of decoded chunks that are kept."""
        return self._cells.cache_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, decoded: the same chunk of every map."""
        return self._cells.block_bytes

    @property
    def shares_cache(self) -> bool:
        """Whether decoded chunks lie in a file, for all processes, instead of in the memory of each."""
        return self._cells.cache_path is not None

    @property
    def may_fork(self) -> bool:
        """Whether a forked process can go on reading."""
        return self._store.objects.is_local

    def __len__(self) -> int:
        return self.manifest.counts.samples

    def __getitem__(self, index: int) -> Item:
        """The sample at `index`; negative indexes count from the end.

        Raises:
            IndexError: out of range.
            MissingObjectError, CorruptedObjectError: an object has gone, or is not the one that was written.
            StoreAccessError: the folder `cache_path` cannot be used.
        """
        (index,) = self._resolve([index])
        stored, first, length = self._opened.index, int(self._first_tokens[index]), int(self._lengths[index])
        tokens = slice(first, first + length)
        return Item(
            join_sample_id(int(stored["sample_hash"][index]), int(stored["sample_repetition"][index])),
            torch.from_numpy(stored["input_ids"][tokens].astype(np.int64)),
            torch.from_numpy(stored["word_ids"][tokens].astype(np.int64)),
            torch.from_numpy(stored["offsets"][tokens].astype(np.int64)),
            self._unpack(self.read_cells([index]), [length], length)[0],
            SampleRows(self._take_rows, [index]),
        )

    def _resolve(self, indices: Sequence[int]) -> list[int]:
        size = len(self)
        for index in indices:
            if not -size <= index < size:
                raise IndexError(f"{self.ref} has {size} samples, asked for {index}")
        return [index % size for index in indices]

    def __getitems__(self, indices: Sequence[int]) -> "_Items":
        """The samples at `indices`, read when they are looked at; `collate` reads them in one go.

        torch's DataLoader asks for a batch in this way.
        """
        return _Items(self, self._resolve(indices))

    def read_batch(self, indices: Sequence[int], pad_to_multiple_of: int = 1) -> Batch:
        """The samples at `indices` as one batch, padded on the right to the longest, rounded up to a multiple.

        Raises:
            IndexError, MissingObjectError, CorruptedObjectError, StoreAccessError: as `ds[index]`.
        """
        return self.pad_cells(indices, self.read_cells(indices), pad_to_multiple_of)

    def read_cells(self, indices: Sequence[int]) -> Float[ndarray, " cells"]:
        """The cells of these samples in the stored dtype, of each its maps one after the other.

        Raises:
            IndexError, MissingObjectError, CorruptedObjectError, StoreAccessError: as `ds[index]`.
        """
        return self._cells.read(self._resolve(indices))

    def pad_cells(self, indices: Sequence[int], cells: Float[ndarray, " cells"], pad_to_multiple_of: int = 1) -> Batch:
        """What `read_cells` gave for these samples as a batch; nothing else is read but the index."""
        chosen = self._resolve(indices)
        lengths = self._lengths[chosen]
        longest = -(-int(lengths.max()) // pad_to_multiple_of) * pad_to_multiple_of
        places = np.arange(longest)
        inside = places < lengths[:, None]
        tokens = np.where(inside, self._first_tokens[chosen][:, None] + places, 0)

        def pick(name: str, padding: int) -> Tensor:
            values = self._opened.index[name][tokens].astype(np.int64)
            values[~inside] = padding
            return torch.from_numpy(values)

        return Batch(
            self._unpack(cells, lengths.tolist(), longest),
            torch.from_numpy(inside.astype(np.int64)),
            pick("input_ids", self.manifest.pad_token_id),
            pick("word_ids", -1),
            pick("offsets", 0),
            self._read_ids(chosen),
            SampleRows(self._take_rows, chosen),
        )

    def _unpack(self, cells: Float[ndarray, " cells"], lengths: list[int], longest: int) -> Float[Tensor, "B M L L"]:
        # All of them become float32 in one step, and by torch, which does it fifty times as fast as numpy.
        converted = torch.from_numpy(cells).float()
        num_maps = len(self.maps)
        if self.manifest.packing == "full" and min(lengths) == longest:  # single items, above all
            return converted.view(len(lengths), num_maps, longest, longest)
        wide = converted.numpy()
        maps = np.zeros((len(lengths), num_maps, longest, longest), np.float32)
        first = 0
        for row, length in zip(maps, lengths, strict=True):
            size = count_cells(length, self.manifest.packing)
            values = wide[first : first + num_maps * size]
            first += num_maps * size
            if self.manifest.packing == "full":
                row[:, :length, :length] = values.reshape(num_maps, length, length)
                continue
            queries, keys = self._lower_cells[:, :size]
            targets = queries * longest + keys
            # Map by map: numpy scatters into a flat array three times as fast as under a mask or into several rows.
            for matrix, triangle in zip(row.reshape(num_maps, -1), values.reshape(num_maps, -1), strict=True):
                matrix[targets] = triangle
        return torch.from_numpy(maps)

    def _read_ids(self, chosen: Sequence[int]) -> list[str]:
        index = self._opened.index
        pairs = zip(index["sample_hash"][chosen].tolist(), index["sample_repetition"][chosen].tolist(), strict=True)
        return [join_sample_id(digest, repetition) for digest, repetition in pairs]

    @cached_property
    def sample_ids(self) -> list[str]:
        """The ids of all samples, in order."""
        return self._read_ids(range(len(self)))

    def _take_rows(self, indices: list[int]) -> pa.Table:
        return self._samples_table.take(indices)

    @cached_property
    def _samples_table(self) -> pa.Table:
        table = self._opened.samples_table
        found: list[str | None] = table["sample_id"].to_pylist()[: len(self)]
        for row, (stored, expected) in enumerate(zip_longest(found, self.sample_ids)):
            if stored != expected:
                raise CorruptedObjectError(
                    f"{self.ref}: row {row} of {self.manifest.samples_path} is {stored}, the index says {expected}; "
                    "restore the sample table from a copy"
                )
        return table

    @cached_property
    def _lengths(self) -> Int[ndarray, " S"]:
        lengths: Int[ndarray, " S"] = self._opened.index["length"].astype(np.int64)
        return lengths

    @cached_property
    def _first_tokens(self) -> Int[ndarray, " S"]:
        firsts: Int[ndarray, " S"] = np.cumsum(self._lengths) - self._lengths
        return firsts

    @cached_property
    def _lower_cells(self) -> Int[ndarray, "2 cells"]:
        """Query and key of each stored cell of the longest sample; a shorter one has the first of them."""
        cells: Int[ndarray, "2 cells"] = np.stack(np.tril_indices(int(self._lengths.max())))
        return cells

    def collate(self, items: "_Items | Sequence[Item]", pad_to_multiple_of: int = 1) -> Batch:
        """The items as one batch, padded on the right to the longest, rounded up to a multiple."""
        if isinstance(items, _Items):
            return items.dataset.read_batch(items.indices, pad_to_multiple_of)
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
        rows = SampleRows(lambda _: pa.concat_tables([item.rows.table for item in items]), [])
        return Batch(maps, mask, input_ids, word_ids, offsets, [item.sample_id for item in items], rows)

    def loader(self, batch_size: int = 32, **options: Any) -> "Loader[Batch]":
        """A resumable loader over this dataset; see `Loader` for the options."""
        from pipeline.readers.loader import Loader

        return Loader(self, batch_size, **options)

    def locate_blocks(self) -> Int[ndarray, " S"]:
        """Each sample's block: samples that begin in the same chunk are read together."""
        return self._cells.blocks


@dataclass(frozen=True)
class _Items(Sequence[Item]):
    """Samples of a dataset, each read when it is looked at."""

    dataset: OlaDataset
    indices: list[int]

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, place: int) -> Item: ...
    @overload
    def __getitem__(self, place: slice) -> "_Items": ...
    def __getitem__(self, place: int | slice) -> "Item | _Items":
        if isinstance(place, slice):
            return _Items(self.dataset, self.indices[place])
        return self.dataset[self.indices[place]]


def open_dataset(
    ref: str,
    store: str | Path | None = None,
    maps: Sequence[MapName] | None = None,
    cache_bytes: int = CACHE_BYTES,
    cache_path: str | Path | None = None,
) -> OlaDataset:
    """The dataset that a ref names, for reading.

    Args:
        ref: `<model>/<corpus>/<split>[@<version>]`; without a version, the latest.
        store: a folder, or `s3://bucket/prefix`; default `OLA_STORE`, else `data/store`.
        maps: which maps to read, in this order; default all stored, orders ascending, then names.
        cache_bytes: decoded chunks that are kept: by each process, or in `cache_path` by all.
        cache_path: a folder for a file of decoded chunks that processes share, from one run to the next as well.

    Raises:
        InvalidNameError: `ref` is no ref.
        StoreAccessError: there is no store there, or `cache_path` cannot be used.
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
    return OlaDataset(
        folder, version, requested, cache_bytes, expand_home(cache_path).absolute() if cache_path else None
    )
