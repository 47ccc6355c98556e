"""A finished version, opened for reading: its index, its cells, its samples.

Axis names: S samples, N tokens of all samples, T tokens of one sample.
Whatever is not as the manifest says raises by name. Nothing is written.
"""

from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import zarr
from jaxtyping import Float, Shaped
from numpy import ndarray
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.storage import LocalStore, MemoryStore

from pipeline.store.layout import Store
from pipeline.store.objects import describe_bytes
from pipeline.store.presence import check_presence, check_size, describe_remedy
from pipeline.store.samples import read_samples_table
from pipeline.store.versions import Version
from storage_schema.arrays import CHUNK_CELLS, INDEX_ARRAYS, name_array
from storage_schema.errors import CorruptedObjectError
from storage_schema.recipe import MapName


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
        self._checked: set[str] = set()
        self._copies: dict[str, Buffer] = {}
        check_presence(store, version)

    def _check_object(self, name: str) -> None:
        # Presence and size at every reading, since Zarr takes a missing object for zeros; the digest at the first one,
        # since a checksum inside an object does not tell that it stands in another's place.
        key, stored = f"{self._prefix}/{name}", self.manifest.objects[name]
        if not self.store.objects.is_local:
            if name not in self._copies:
                data = self.store.objects.localize(key, stored).read_bytes()
                self._copies[name] = default_buffer_prototype().buffer.from_bytes(data)
            return
        check_size(self.store, self.version, key, stored.num_bytes)
        if name not in self._checked:
            if describe_bytes(self.store.objects.localize(key, stored).read_bytes()) != stored:
                raise CorruptedObjectError(
                    f"{self.version.ref}: object {self.store.describe(key)} is not the one that was written "
                    f"(its SHA-256 differs); {describe_remedy(self.version)}"
                )
            self._checked.add(name)

    @cached_property
    def _group(self) -> zarr.Group:
        if not self.store.objects.is_local:
            return zarr.open_group(MemoryStore(self._copies, read_only=True), mode="r")
        return zarr.open_group(LocalStore(self.store.describe(self._prefix), read_only=True), mode="r")

    @cached_property
    def index(self) -> dict[str, Shaped[ndarray, "..."]]:
        """The index arrays by name, in memory."""
        return {index.name: self._read(index.name, ...) for index in INDEX_ARRAYS}

    @cached_property
    def samples_table(self) -> pa.Table:
        """The corpus's samples and annotation; row i is sample i."""
        return read_samples_table(self.store, self.manifest.samples_path, self.manifest.samples)

    def read_chunk(self, name: MapName, partition: int, chunk: int) -> Float[ndarray, " cells"]:
        """One chunk of a map's row of cells, in the stored dtype: cells `[chunk * CHUNK_CELLS, ...)`.

        Raises:
            MissingObjectError: the shard has gone since the version was opened; names it.
            CorruptedObjectError: the shard is not the one that was written, or does not decode; names it.
        """
        start = chunk * CHUNK_CELLS
        cells: Float[ndarray, " cells"] = self._read(name_array(name), (partition, slice(start, start + CHUNK_CELLS)))
        return cells

    def read_partition(self, name: MapName, partition: int) -> Float[ndarray, " cells"]:
        """A map's whole row of cells, in the stored dtype; errors as `read_chunk`."""
        cells: Float[ndarray, " cells"] = self._read(name_array(name), (partition, slice(None)))
        return cells

    def _read(self, name: str, selection: Any) -> Any:
        chunks = f"{name}/c/" if selection is ... else f"{name}/c/{selection[0]}/0"
        keys = (
            [chunks] if chunks in self.manifest.objects else [k for k in self.manifest.objects if k.startswith(chunks)]
        )
        for key in ("zarr.json", f"{name}/zarr.json", *keys):
            self._check_object(key)
        try:
            array = self._group[name]
            assert isinstance(array, zarr.Array)
            return np.asarray(array[selection])
        except Exception as error:
            raise CorruptedObjectError(
                f"{self.version.ref}: {self.store.describe(self._prefix)}/{chunks} cannot be read "
                f"({type(error).__name__}: {error}); {describe_remedy(self.version)}"
            ) from error
