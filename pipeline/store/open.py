"""A finished version, opened for reading: its index, its cells, its samples.

Axis names: S samples, N tokens of all samples, T tokens of one sample.
Whatever is not as the manifest says raises by name. Nothing is written, and nothing stays open, so that any process or
thread may go on reading.
"""

import json
import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Shaped, UInt64
from numpy import ndarray

from pipeline.store.layout import Store
from pipeline.store.objects import describe_bytes, raise_unless_damage
from pipeline.store.presence import check_presence, check_size, describe_remedy
from pipeline.store.samples import read_samples_table
from pipeline.store.shards import count_index_bytes, decode_chunk, decode_index, is_absent
from pipeline.store.versions import Version
from storage_schema.arrays import CHUNK_CELLS, INDEX_ARRAYS, IndexArray, name_array
from storage_schema.errors import CorruptedObjectError
from storage_schema.recipe import MapName

_T = TypeVar("_T")
_File: TypeAlias = tuple[int, int, int]
"""What tells a file from one that took its place, or was written to: inode, time of its last change, size."""


class StoredVersion:
    """The arrays of a finished version.

    Opening it compares presence and size of every object with the manifest; an object's digest is compared when it is
    first read.
    """

    def __init__(self, store: Store, version: Version) -> None:
        """Opens the version.

        Raises:
            MissingObjectError: an object is not there.
            CorruptedObjectError: an object has another size than recorded. (Zarr would read either as fill values.)
        """
        self.store, self.version, self.manifest = store, version, version.manifest
        self._prefix = store.group_key(self.manifest.dataset, self.manifest.recipe.fingerprint)
        self._dtype = np.dtype(self.manifest.recipe.store_dtype).newbyteorder("<")
        self._checked: dict[str, _File] = {}
        self._described: dict[str, dict[str, Any]] = {}
        self._shard_indexes: dict[str, UInt64[ndarray, "chunks 2"]] = {}
        check_presence(store, version)

    @cached_property
    def index(self) -> dict[str, Shaped[ndarray, "..."]]:
        """The index arrays by name, in memory."""
        return {index.name: self._read_index_array(index) for index in INDEX_ARRAYS}

    @cached_property
    def samples_table(self) -> pa.Table:
        """The corpus's samples and annotation; row i is sample i."""
        return read_samples_table(self.store, self.manifest.samples_path, self.manifest.samples)

    def read_chunk(self, name: MapName, partition: int, chunk: int, out: Float[ndarray, " cells"]) -> None:
        """Fills `out`, in the stored dtype, with one chunk of a map's row: cells `[chunk * CHUNK_CELLS, ...)`.

        Raises:
            MissingObjectError: the shard has gone since the version was opened; names it.
            CorruptedObjectError: the shard is not the one that was written, or does not decode; names it.
        """
        key = _name_shard(name, partition)
        index = self._shard_indexes.get(key)
        data = None if index is None else self._read_entry(key, index[chunk])
        if data is None:
            whole = self._read_whole(key)
            data = _cut_entry(whole, self._index_shard(name, key, whole)[chunk])
        self._decode_entry(key, data, out)

    def read_partition(self, name: MapName, partition: int) -> Float[ndarray, " cells"]:
        """A map's whole row of cells, in the stored dtype; errors as `read_chunk`."""
        key = _name_shard(name, partition)
        whole = self._read_whole(key)
        cells = np.empty(self._count_row_cells(name), self._dtype)
        for entry, out in zip(self._index_shard(name, key, whole), cells.reshape(-1, CHUNK_CELLS), strict=True):
            self._decode_entry(key, _cut_entry(whole, entry), out)
        return cells

    def _index_shard(self, name: MapName, key: str, whole: bytes) -> UInt64[ndarray, "chunks 2"]:
        tail = whole[-count_index_bytes(self._count_row_cells(name)) :]
        self._shard_indexes[key] = self._decode(key, decode_index, tail, len(whole))
        return self._shard_indexes[key]

    def _read_entry(self, key: str, entry: UInt64[ndarray, "2"]) -> bytes | None:
        """A chunk's bytes, none where it is absent; None if the shard is not the file whose digest was compared."""
        if is_absent(entry):
            return b""
        offset, size = entry.tolist()
        data, file = self._read_part(key, offset, size)
        return data if file == self._checked[key] else None

    def _decode_entry(self, key: str, data: bytes, out: Float[ndarray, " cells"]) -> None:
        if data:
            self._decode(key, decode_chunk, data, out)
        else:
            out[:] = 0

    def _count_row_cells(self, name: MapName) -> int:
        cells: int = self._describe_array(name_array(name))["shape"][1]
        return cells

    def _read_index_array(self, index: IndexArray) -> Shaped[ndarray, "..."]:
        described = self._describe_array(index.name)
        shape, chunk_shape = described["shape"], described["chunk_grid"]["configuration"]["chunk_shape"]
        dtype = np.dtype(index.dtype).newbyteorder("<")
        chunks = []
        for place in range(-(-shape[0] // chunk_shape[0])):
            key = f"{index.name}/c/{place}" + "/0" * (len(shape) - 1)
            values = np.zeros(chunk_shape, dtype)
            if key in self.manifest.objects:  # Zarr leaves out a chunk of zeros
                self._decode(key, decode_chunk, self._read_whole(key), values)
            chunks.append(values)
        return np.concatenate(chunks)[: shape[0]].astype(index.dtype, copy=False)

    def _describe_array(self, name: str) -> dict[str, Any]:
        if name not in self._described:
            self._check_once("zarr.json")
            described = json.loads(self._read_whole(f"{name}/zarr.json"))
            self._described[name] = described
        return self._described[name]

    def _check_once(self, key: str) -> None:
        if key not in self._checked:
            self._read_whole(key)

    def _read_whole(self, key: str) -> bytes:
        """The object's bytes, if their digest is right.

        Presence and size say nothing of an object in another's place, and neither do checksums inside it.
        """
        stored = self.manifest.objects[key]
        data, file = self._read_part(key, 0, stored.num_bytes + 1)
        if describe_bytes(data) != stored:
            self._check_size(key)
            raise CorruptedObjectError(
                f"{self.version.ref}: object {self._describe(key)} is not the one that was written "
                f"(its SHA-256 differs); {describe_remedy(self.version)}"
            )
        self._checked[key] = file
        return data

    def _read_part(self, key: str, start: int, num_bytes: int) -> tuple[bytes, _File]:
        path = self._locate(key)
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                status = os.fstat(descriptor)
                data = os.pread(descriptor, num_bytes, start)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise_unless_damage(error)
            self._check_size(key)
            raise CorruptedObjectError(
                f"{self.version.ref}: object {self._describe(key)} cannot be read: {error.strerror}; "
                f"{describe_remedy(self.version)}"
            ) from None
        return data, (status.st_ino, status.st_mtime_ns, status.st_size)

    def _locate(self, key: str) -> Path:
        return self.store.objects.localize(f"{self._prefix}/{key}", self.manifest.objects[key])

    def _describe(self, key: str) -> str:
        return self.store.describe(f"{self._prefix}/{key}")

    def _check_size(self, key: str) -> None:
        check_size(self.store, self.version, f"{self._prefix}/{key}", self.manifest.objects[key].num_bytes)

    def _decode(self, key: str, decode: Callable[..., _T], *arguments: Any) -> _T:
        try:
            return decode(*arguments)
        except ValueError as error:
            self._check_size(key)
            raise CorruptedObjectError(
                f"{self.version.ref}: {self._describe(key)} cannot be read ({error}); {describe_remedy(self.version)}"
            ) from error


def _cut_entry(whole: bytes, entry: UInt64[ndarray, "2"]) -> bytes:
    """A chunk's bytes of a shard, none where it is absent."""
    if is_absent(entry):
        return b""
    offset, size = entry.tolist()
    return whole[offset : offset + size]


def _name_shard(name: MapName, partition: int) -> str:
    return f"{name_array(name)}/c/{partition}/0"
