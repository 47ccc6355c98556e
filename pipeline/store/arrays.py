"""The Zarr arrays of a version: with which codecs they are encoded, and under which names.

Everything is encoded in memory by zarr; the store puts the objects where they belong, in its own way.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import zarr
from jaxtyping import Float, Shaped
from numpy import ndarray
from zarr.codecs import BloscCodec, Crc32cCodec
from zarr.core.buffer import Buffer
from zarr.storage import MemoryStore

from storage_schema.arrays import CHUNK_CELLS, INDEX_ARRAYS, Packing, Partition, count_row_cells, name_array
from storage_schema.recipe import Recipe
from storage_schema.refs import Dataset

_INDEX_CHUNK = 1024 * 1024


def _codecs() -> list[BloscCodec | Crc32cCodec]:
    # The checksum comes last, so that it covers what is stored: without it a flipped bit reads as data.
    return [BloscCodec(cname="zstd", clevel=5, shuffle="bitshuffle"), Crc32cCodec()]


class GroupEncoder:
    """The objects of one version's group: bytes by key relative to the group."""

    def __init__(
        self,
        dataset: Dataset,
        recipe: Recipe,
        partitions: Sequence[Partition],
        index: Mapping[str, Shaped[ndarray, "..."]],
        *,
        packing: Packing,
        num_layers: int,
    ) -> None:
        """Encodes what the group holds before its first partition: all metadata, and the index.

        Args:
            index: the arrays of `INDEX_ARRAYS` by name.
        """
        self._objects: dict[str, Buffer] = {}
        self._group = zarr.open_group(MemoryStore(self._objects), mode="w")
        self._group.attrs.update({"dataset": str(dataset), "fingerprint": recipe.fingerprint, "packing": packing})
        for array in INDEX_ARRAYS:
            values = index[array.name]
            self._group.create_array(
                array.name,
                shape=values.shape,
                dtype=array.dtype,
                chunks=(min(_INDEX_CHUNK, values.shape[0]), *values.shape[1:]),
                compressors=_codecs(),
                attributes={"meaning": array.meaning},
            )[...] = values
        cells = count_row_cells(partitions)
        for name in recipe.maps:
            self._group.create_array(
                name_array(name),
                shape=(len(partitions), cells),
                dtype=recipe.store_dtype,
                chunks=(1, CHUNK_CELLS),
                shards=(1, cells),
                compressors=_codecs(),
                fill_value=0,
                dimension_names=("partition", "cell"),
                attributes={"scale": 2.0**-num_layers} if name == "rollout" else {},
            )
        self.index = {name: self._objects[name].to_bytes() for name in sorted(self._objects)}
        """Metadata and index. A chunk of zeros alone has no object: zarr leaves it out, and reads it as 0."""

    def encode_shard(self, name: str, partition: int, cells: Float[ndarray, " cells"]) -> tuple[str, bytes]:
        """The key and the bytes of one shard: a partition's cells in one map array, in the stored dtype."""
        array: zarr.Array[Any] = self._group[name]  # type: ignore[assignment]
        filled = np.zeros(-(-len(cells) // CHUNK_CELLS) * CHUNK_CELLS, array.dtype)
        filled[: len(cells)] = cells
        array[partition, : len(filled)] = filled
        key = f"{name}/c/{partition}/0"
        return key, self._objects.pop(key).to_bytes()
