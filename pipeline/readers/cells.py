"""Where the cells of samples lie, and how they are read: through a cache of decoded chunks.

Axis names: S samples, P partitions.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from pipeline.readers.cache import ChunkCache, SlotFile
from pipeline.store.open import StoredVersion
from storage_schema.arrays import CHUNK_CELLS
from storage_schema.errors import StoreAccessError
from storage_schema.recipe import MapName

SHUFFLE_BLOCKS = 64
"""Blocks whose samples a loader mixes with one another: about 8 MiB of float16 a map, if samples are short."""
POOL_BLOCKS = 2 * SHUFFLE_BLOCKS
"""Blocks that a shuffled epoch reads from at a time: workers may be in two pools at once."""


class CellReader:
    """The stored cells of a version's samples, of some of its maps.

    Chunks are numbered partition after partition, in each of them map after map, so that a sample's cells of one map
    are one run of addresses (`chunk * CHUNK_CELLS + place`), and those of the next map stand a fixed step further. A
    *block* is the same chunk of all maps.
    """

    def __init__(
        self, opened: StoredVersion, maps: tuple[MapName, ...], cache_bytes: int, cache_path: Path | None
    ) -> None:
        self._opened, self._maps = opened, maps
        self.cache_bytes, self.cache_path = cache_bytes, cache_path
        self._dtype: np.dtype[np.generic] = np.dtype(opened.manifest.recipe.store_dtype)
        self.block_bytes = len(maps) * CHUNK_CELLS * self._dtype.itemsize
        """Bytes of one block, decoded."""

    def read(self, chosen: Sequence[int]) -> Float[ndarray, " cells"]:
        """The cells of these samples in the stored dtype, of each its maps one after the other.

        Raises:
            MissingObjectError, CorruptedObjectError: an object has gone, or is not the one that was written.
            StoreAccessError: the folder of the cache cannot be used.
        """
        sizes = self.sizes[chosen]
        cells = np.empty(len(self._maps) * int(sizes.sum()), self._dtype)
        filled, num_maps, read_run = 0, len(self._maps), self._cache.read_run
        places = zip(self._addresses[chosen].tolist(), self._steps[chosen].tolist(), sizes.tolist(), strict=True)
        for start, step, size in places:
            for address in range(start, start + num_maps * step, step):
                cells[filled : filled + size] = read_run(address, address + size)
                filled += size
        return cells

    @cached_property
    def sizes(self) -> Int[ndarray, " S"]:
        """Cells of each sample's map."""
        lengths = self._opened.index["length"].astype(np.int64)
        sizes: Int[ndarray, " S"] = lengths * lengths
        return sizes if self._opened.manifest.packing == "full" else (sizes + lengths) // 2

    @cached_property
    def blocks(self) -> Int[ndarray, " S"]:
        """Each sample's block: the one that it begins in."""
        firsts = np.cumsum(self._chunk_counts) - self._chunk_counts
        blocks: Int[ndarray, " S"] = firsts[self._partitions] + self._opened.index["start"] // CHUNK_CELLS
        return blocks

    @property
    def _partitions(self) -> Int[ndarray, " S"]:
        return self._opened.index["partition"]

    @cached_property
    def _chunk_counts(self) -> Int[ndarray, " P"]:
        """Chunks that each partition fills, of one map."""
        stops = np.zeros(int(self._partitions.max()) + 1, np.int64)
        np.maximum.at(stops, self._partitions, self._opened.index["start"] + self.sizes)
        counts: Int[ndarray, " P"] = -(-stops // CHUNK_CELLS)
        return counts

    @cached_property
    def _first_chunks(self) -> Int[ndarray, " P"]:
        """The number of each partition's first chunk."""
        counts = self._chunk_counts * len(self._maps)
        firsts: Int[ndarray, " P"] = np.cumsum(counts) - counts
        return firsts

    @cached_property
    def _addresses(self) -> Int[ndarray, " S"]:
        """Where each sample's cells of the first map begin."""
        firsts = self._first_chunks[self._partitions]
        addresses: Int[ndarray, " S"] = firsts * CHUNK_CELLS + self._opened.index["start"]
        return addresses

    @cached_property
    def _steps(self) -> Int[ndarray, " S"]:
        """From a sample's cells of one map to those of the next one."""
        steps: Int[ndarray, " S"] = self._chunk_counts[self._partitions] * CHUNK_CELLS
        return steps

    @cached_property
    def _cache(self) -> ChunkCache:
        file = None if self.cache_path is None else SlotFile(self.cache_path, self._describe_chunks())
        try:
            return ChunkCache(
                int(self._chunk_counts.sum()) * len(self._maps),
                self._dtype,
                self._decode,
                budget=self.cache_bytes,
                queued=POOL_BLOCKS * len(self._maps),
                file=file,
            )
        except OSError as error:
            raise StoreAccessError(
                f"decoded chunks of {self._opened.version.ref} cannot be kept in {self.cache_path}: {error.strerror}; "
                "name another folder as `cache_path`"
            ) from None

    def _describe_chunks(self) -> str:
        # Not by the fingerprint: one recipe gives other last bits on another device.
        objects = "".join(stored.sha256 for stored in self._opened.manifest.objects.values())
        return f"{objects} {self._maps} {CHUNK_CELLS} {self.cache_bytes}"

    def _decode(self, chunk: int, out: Float[ndarray, " cells"]) -> None:
        partition = int(np.searchsorted(self._first_chunks, chunk, side="right")) - 1
        column, place = divmod(chunk - int(self._first_chunks[partition]), int(self._chunk_counts[partition]))
        self._opened.read_chunk(self._maps[column], partition, place, out)
