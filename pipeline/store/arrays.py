"""The Zarr arrays of a version: their names, shapes and codecs, encoded in memory for the store to put in place."""

from collections.abc import Mapping, Sequence

import zarr
from jaxtyping import Shaped
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


def encode_group(
    dataset: Dataset,
    recipe: Recipe,
    partitions: Sequence[Partition],
    index: Mapping[str, Shaped[ndarray, "..."]],
    *,
    packing: Packing,
    num_layers: int,
) -> dict[str, bytes]:
    """What a version's group holds before its first shard: all metadata and the index, by key relative to the group.

    A chunk of zeros alone has no object: zarr leaves it out, and reads it as 0.

    Args:
        index: the arrays of `INDEX_ARRAYS` by name.
    """
    objects: dict[str, Buffer] = {}
    group = zarr.open_group(MemoryStore(objects), mode="w")
    group.attrs.update({"dataset": str(dataset), "fingerprint": recipe.fingerprint, "packing": packing})
    for array in INDEX_ARRAYS:
        values = index[array.name]
        group.create_array(
            array.name,
            shape=values.shape,
            dtype=array.dtype,
            chunks=(min(_INDEX_CHUNK, values.shape[0]), *values.shape[1:]),
            compressors=_codecs(),
            attributes={"meaning": array.meaning},
        )[...] = values
    cells = count_row_cells(partitions)
    for name in recipe.maps:
        group.create_array(
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
    return {name: objects[name].to_bytes() for name in sorted(objects)}
