"""A shard's bytes, as Zarr v3 lays them out: cells to bytes, and chunks back, without Zarr.

A shard holds one partition's row of cells of one map: its chunks one after another, then an index of (offset, length)
pairs, one for each chunk of the row, then the CRC32C of that index. A chunk is its cells, little endian, through Blosc
(zstd, level 5, bit shuffle), then the CRC32C of that. A chunk of zeros alone is absent: its pair is all ones.

Decoding raises `DamagedShardError`, which names the fault; callers, which know the object, name the shard. Nothing here
knows files: whoever has the bytes may decode them.

Axis names: K chunks of a row.
"""

import struct

import google_crc32c
import numpy as np
from jaxtyping import Float, UInt64
from numcodecs import blosc
from numpy import ndarray

from storage_schema.arrays import CHUNK_CELLS

# A chunk is too small for several threads, and Blosc's pool of them does not survive a fork. Zarr sets the same.
blosc.use_threads = False

_ABSENT = 2**64 - 1
_CRC_BYTES = 4
_BLOSC_HEADER = struct.Struct("<BBBBIII")


class DamagedShardError(ValueError):
    """Bytes of a shard are not what an encoder writes."""


def encode_shard(cells: Float[ndarray, " cells"], row_cells: int) -> bytes:
    """The shard of a partition, byte for byte what Zarr writes.

    Args:
        cells: the partition's cells, in the stored dtype; what follows them up to the row's end is 0.
        row_cells: C, cells of every row of the array, a multiple of `CHUNK_CELLS` and at least `len(cells)`.
    """
    if row_cells % CHUNK_CELLS or len(cells) > row_cells:
        raise ValueError(f"{len(cells)} cells do not fit into a row of {row_cells}, which is whole chunks")
    index = np.full((row_cells // CHUNK_CELLS, 2), _ABSENT, "<u8")
    parts, end = [], 0
    for chunk, start in enumerate(range(0, len(cells), CHUNK_CELLS)):
        values = cells[start : start + CHUNK_CELLS]
        if not values.any():
            continue
        if len(values) < CHUNK_CELLS:
            values = np.concatenate([values, np.zeros(CHUNK_CELLS - len(values), cells.dtype)])
        parts.append(_append_crc(_compress(values)))
        index[chunk] = end, len(parts[-1])
        end += len(parts[-1])
    return b"".join([*parts, _append_crc(index.tobytes())])


def _compress(values: Float[ndarray, " chunk"]) -> bytes:
    little = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    compressed: bytes = blosc.compress(little, b"zstd", 5, blosc.BITSHUFFLE, typesize=little.itemsize)
    return compressed


def count_index_bytes(row_cells: int) -> int:
    """Bytes of the index at the end of each shard of an array with rows of so many cells."""
    return row_cells // CHUNK_CELLS * 16 + _CRC_BYTES


def decode_index(tail: bytes, num_bytes: int) -> UInt64[ndarray, "K 2"]:
    """Where each chunk of a shard lies: its (offset, length) in the shard, or all ones where it is absent (zeros).

    Args:
        tail: the last `count_index_bytes` bytes of the shard.
        num_bytes: of the whole shard.

    Raises:
        DamagedShardError: the index fails its checksum, or puts a chunk outside the shard's chunks.
    """
    index = np.frombuffer(_strip_crc(tail, "the shard's index"), "<u8").reshape(-1, 2)
    present = (index != _ABSENT).any(axis=1)
    end, (offsets, lengths) = np.uint64(max(0, num_bytes - len(tail))), index[present].T
    if ((offsets > end) | (lengths > end) | (end - np.minimum(offsets, end) < lengths)).any():
        raise DamagedShardError(f"the shard's index puts a chunk beyond the {end} bytes before it")
    return index


def decode_chunk(data: bytes, cells: Float[ndarray, " chunk"]) -> None:
    """Fills `cells`, an array of `CHUNK_CELLS` cells of the stored dtype, with those of a chunk.

    Args:
        data: exactly the bytes that the index names.

    Raises:
        DamagedShardError: the chunk fails its checksum, does not decode, or holds another number of cells.
    """
    body = _strip_crc(data, "a chunk")
    if len(body) < _BLOSC_HEADER.size:
        raise DamagedShardError(f"a chunk of {len(body)} bytes has no header")
    *_, item_bytes, decoded_bytes, _, encoded_bytes = _BLOSC_HEADER.unpack_from(body)
    if (item_bytes, decoded_bytes, encoded_bytes) != (cells.itemsize, cells.nbytes, len(body)):
        raise DamagedShardError(
            f"a chunk says that {encoded_bytes} bytes hold {decoded_bytes} of {item_bytes}-byte cells; "
            f"expected {len(body)}, {cells.nbytes} and {cells.itemsize}"
        )
    try:
        blosc.decompress(body, cells)
    except (RuntimeError, ValueError) as error:
        raise DamagedShardError(f"a chunk does not decode: {error}") from None


def _append_crc(data: bytes) -> bytes:
    return data + struct.pack("<I", google_crc32c.value(data))


def _strip_crc(data: bytes, what: str) -> bytes:
    body, stored = data[:-_CRC_BYTES], int.from_bytes(data[-_CRC_BYTES:], "little")
    if len(data) < _CRC_BYTES or (found := google_crc32c.value(body)) != stored:
        problem = f"has {len(data)} bytes" if len(data) < _CRC_BYTES else f"has CRC32C {found:08x}, not {stored:08x}"
        raise DamagedShardError(f"{what} {problem}")
    return body
