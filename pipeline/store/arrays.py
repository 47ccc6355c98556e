"""The Zarr arrays of a version: how they are created, with which codecs."""

from collections.abc import Sequence

import zarr
from zarr.codecs import BloscCodec, Crc32cCodec
from zarr.storage import LocalStore

from pipeline.store.folder import StoreFolder
from storage_schema.arrays import CHUNK_CELLS, INDEX_ARRAYS, Packing, Partition, count_row_cells, name_array
from storage_schema.recipe import Recipe
from storage_schema.refs import Dataset

_INDEX_CHUNK = 1024 * 1024


def _codecs() -> list[BloscCodec | Crc32cCodec]:
    # The checksum comes last, so that it covers what is stored: without it a flipped bit reads as data.
    return [BloscCodec(cname="zstd", clevel=5, shuffle="bitshuffle"), Crc32cCodec()]


def create_group(
    store: StoreFolder,
    dataset: Dataset,
    recipe: Recipe,
    *,
    packing: Packing,
    num_layers: int,
    num_samples: int,
    num_tokens: int,
    partitions: Sequence[Partition],
) -> zarr.Group:
    """A new group with every array of the version, empty."""
    group = zarr.open_group(LocalStore(store.group_path(dataset, recipe.fingerprint)), mode="w")
    group.attrs.update({"dataset": str(dataset), "fingerprint": recipe.fingerprint, "packing": packing})
    axes = {"S": num_samples, "N": num_tokens}
    for index in INDEX_ARRAYS:
        shape = (axes[index.axis],) if index.width == 1 else (axes[index.axis], index.width)
        group.create_array(
            index.name,
            shape=shape,
            dtype=index.dtype,
            chunks=(min(_INDEX_CHUNK, shape[0]), *shape[1:]),
            compressors=_codecs(),
            attributes={"meaning": index.meaning},
            config={"write_empty_chunks": True},  # so that every index object exists, also one of zeros alone
        )
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
    return group
