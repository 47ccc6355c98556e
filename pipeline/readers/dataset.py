"""One version as a torch dataset: maps, tokens and annotation of each sample, and batches of them.

Axis names: B batch, M maps, T tokens (rows are queries, columns are keys), S samples, P partitions.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor

from pipeline.readers.batch import Batch, Item, SampleRows
from pipeline.readers.cache import ChunkCache, SlotFile
from pipeline.store.catalog import choose_store
from pipeline.store.layout import Store, open_store
from pipeline.store.open import StoredVersion
from pipeline.store.versions import Version, resolve_ref
from storage_schema.arrays import CHUNK_CELLS, count_cells
from storage_schema.errors import CorruptedObjectError, InvalidRecipeError
from storage_schema.manifest import Manifest
from storage_schema.paths import expand_home
from storage_schema.recipe import MapName, Recipe
from storage_schema.samples import join_sample_id

if TYPE_CHECKING:
    from pipeline.readers.loader import Loader

CACHE_BYTES = 256 * 1024 * 1024
"""Decoded chunks that are kept, by default: the maps of some 100,000 short sentences."""
SHUFFLE_BLOCKS = 64
"""Blocks whose samples a loader mixes with one another: about 8 MiB of float16 a map, if samples are short."""


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
        self._cache_bytes, self._cache_path = cache_bytes, cache_path
        self._opened = StoredVersion(store, version)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "store": self._store, "version": self._version, "maps": self.maps,
            "cache_bytes": self._cache_bytes, "cache_path": self._cache_path,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def with_cache(self, path: Path) -> "OlaDataset":
        """The same dataset, with its decoded chunks in a file in a folder; processes that open it there share them."""
        return OlaDataset(self._store, self._version, self.maps, self._cache_bytes, path)

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
    def cache_path(self) -> Path | None:
        """The folder of the file that holds decoded chunks; None where each process keeps its own in memory."""
        return self._cache_path

    @property
    def cache_bytes(self) -> int:
        """Bytes of decoded chunks that are kept."""
        return self._cache_bytes

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
        """
        index = self._resolve(index)
        stored, first, length = self._opened.index, int(self._first_tokens[index]), int(self._lengths[index])
        tokens = slice(first, first + length)
        maps = np.zeros((len(self.maps), length, length), np.float32)
        self._unpack(self._read_cells([index], [count_cells(length, self.manifest.packing)]), maps)
        return Item(
            join_sample_id(int(stored["sample_hash"][index]), int(stored["sample_repetition"][index])),
            torch.from_numpy(stored["input_ids"][tokens].astype(np.int64)),
            torch.from_numpy(stored["word_ids"][tokens].astype(np.int64)),
            torch.from_numpy(stored["offsets"][tokens].astype(np.int64)),
            torch.from_numpy(maps),
            SampleRows(self._take_rows, [index]),
        )

    def _resolve(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.ref} has {len(self)} samples, asked for {index}")
        return index % len(self)

    def read_batch(self, indices: Sequence[int], pad_to_multiple_of: int = 1) -> Batch:
        """The samples at `indices` as one batch, padded on the right to the longest, rounded up to a multiple.

        Raises:
            IndexError, MissingObjectError, CorruptedObjectError: as `ds[index]`.
        """
        chosen = [self._resolve(index) for index in indices]
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
            self._read_maps(chosen, lengths.tolist(), longest),
            torch.from_numpy(inside.astype(np.int64)),
            pick("input_ids", self.manifest.pad_token_id),
            pick("word_ids", -1),
            pick("offsets", 0),
            self._read_ids(chosen),
            SampleRows(self._take_rows, chosen),
        )

    def _read_maps(self, chosen: list[int], lengths: list[int], longest: int) -> Float[Tensor, "B M T T"]:
        sizes = [count_cells(length, self.manifest.packing) for length in lengths]
        cells = self._read_cells(chosen, sizes)
        maps = np.zeros((len(chosen), len(self.maps), longest, longest), np.float32)
        first = 0
        for row, length, size in zip(maps, lengths, sizes, strict=True):
            self._unpack(cells[first : first + len(self.maps) * size], row[:, :length, :length])
            first += len(self.maps) * size
        return torch.from_numpy(maps)

    def _read_cells(self, chosen: list[int], sizes: list[int]) -> Float[ndarray, " cells"]:
        """The cells of these samples, of each its maps one after the other, as float32."""
        # One buffer in the stored dtype, so that float16 becomes float32 at once: map by map it is most of the work.
        cells = np.empty(len(self.maps) * sum(sizes), self._dtype)
        filled = 0
        for index, size in zip(chosen, sizes, strict=True):
            start, step = int(self._addresses[index]), int(self._steps[index])
            for address in range(start, start + len(self.maps) * step, step):
                cells[filled : filled + size] = self._cache.read_run(address, address + size)
                filled += size
        wide: Float[ndarray, " cells"] = torch.from_numpy(cells).float().numpy()
        return wide

    def _unpack(self, cells: Float[ndarray, " cells"], out: Float[ndarray, "M T T"]) -> None:
        """Puts a sample's cells into its maps; what `lower` leaves out stays as it is."""
        if self.manifest.packing == "full":
            out[:] = cells.reshape(out.shape)
        else:
            out[:, _lower_triangle(out.shape[-1])] = cells.reshape(len(out), -1)

    def _read_ids(self, chosen: Sequence[int]) -> list[str]:
        index = self._opened.index
        pairs = zip(index["sample_hash"][chosen].tolist(), index["sample_repetition"][chosen].tolist(), strict=True)
        return [join_sample_id(digest, repetition) for digest, repetition in pairs]

    @cached_property
    def sample_ids(self) -> list[str]:
        """The ids of all samples, in order."""
        return self._read_ids(range(len(self)))

    def strip_rows(self, batch: Batch) -> Batch:
        """The batch without its rows of the sample table, for the way to a process that has the table."""
        return replace(batch, rows=None)

    def attach_rows(self, batch: Batch, indices: Sequence[int]) -> Batch:
        """The batch with its rows again."""
        return replace(batch, rows=SampleRows(self._take_rows, list(indices)))

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
    def _dtype(self) -> np.dtype[np.generic]:
        return np.dtype(self.recipe.store_dtype)

    @cached_property
    def _chunk_counts(self) -> Int[ndarray, " P"]:
        """Chunks that each partition fills, of one map."""
        index = self._opened.index
        lengths = self._lengths
        sizes = lengths * lengths if self.manifest.packing == "full" else lengths * (lengths + 1) // 2
        stops = np.zeros(int(index["partition"].max()) + 1, np.int64)
        np.maximum.at(stops, index["partition"], index["start"] + sizes)
        counts: Int[ndarray, " P"] = -(-stops // CHUNK_CELLS)
        return counts

    @cached_property
    def _first_chunks(self) -> Int[ndarray, " P"]:
        """The number of each partition's first chunk: partition after partition, in each of them map after map."""
        counts = self._chunk_counts * len(self.maps)
        firsts: Int[ndarray, " P"] = np.cumsum(counts) - counts
        return firsts

    @cached_property
    def _addresses(self) -> Int[ndarray, " S"]:
        """Where each sample's cells of the first map begin, in the numbering of `ChunkCache`."""
        index = self._opened.index
        addresses: Int[ndarray, " S"] = self._first_chunks[index["partition"]] * CHUNK_CELLS + index["start"]
        return addresses

    @cached_property
    def _steps(self) -> Int[ndarray, " S"]:
        """From a sample's cells of one map to those of the next one."""
        steps: Int[ndarray, " S"] = self._chunk_counts[self._opened.index["partition"]] * CHUNK_CELLS
        return steps

    @cached_property
    def _cache(self) -> ChunkCache:
        file = None
        if self._cache_path is not None:
            purpose = f"{self.fingerprint} {self.maps}"
            self._cache_path.mkdir(parents=True, exist_ok=True)
            name = f"{self.fingerprint[:16]}-{'-'.join(map(str, self.maps))}-{self._cache_bytes}.chunks"
            file = SlotFile(self._cache_path / name, purpose)
        return ChunkCache(
            int(self._chunk_counts.sum()) * len(self.maps),
            self._dtype,
            self._decode,
            budget=self._cache_bytes,
            queued=2 * SHUFFLE_BLOCKS * len(self.maps),
            file=file,
        )

    def _decode(self, chunk: int, out: Float[ndarray, " cells"]) -> None:
        partition = int(np.searchsorted(self._first_chunks, chunk, side="right")) - 1
        column, place = divmod(chunk - int(self._first_chunks[partition]), int(self._chunk_counts[partition]))
        self._opened.read_chunk(self.maps[column], partition, place, out)

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
        rows = SampleRows(lambda _: pa.concat_tables([item.rows.table for item in items]), [])
        return Batch(maps, mask, input_ids, word_ids, offsets, [item.sample_id for item in items], rows)

    def loader(self, batch_size: int = 32, **options: Any) -> "Loader[Batch]":
        """A resumable loader over this dataset; see `Loader` for the options."""
        from pipeline.readers.loader import Loader

        return Loader(self, batch_size, **options)

    def locate_blocks(self) -> Int[ndarray, " S"]:
        """Each sample's block: samples that begin in the same chunk are read together."""
        index = self._opened.index
        firsts = np.cumsum(self._chunk_counts) - self._chunk_counts
        blocks: Int[ndarray, " S"] = firsts[index["partition"]] + index["start"] // CHUNK_CELLS
        return blocks


@lru_cache(maxsize=512)
def _lower_triangle(length: int) -> Bool[ndarray, "T T"]:
    return np.tri(length, dtype=bool)


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
