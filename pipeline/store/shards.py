"""The bytes of a shard: one partition's row of cells, as Zarr's sharding codec lays them out.

Chunks of `CHUNK_CELLS` cells stand one after the other, each Blosc (zstd, level 5, bit shuffle) with its CRC32C behind
it. At the end stands the index: offset and size of each chunk of the row, and a CRC32C of its own. They are the bytes
that Zarr itself would write; they are made here so that a shard is one put of known bytes, and read here so that a
chunk costs one read and one decompression.
"""

import google_crc32c
import numpy as np
from jaxtyping import Float, Shaped, UInt64
from numcodecs import blosc
from numpy import ndarray

from storage_schema.arrays import CHUNK_CELLS

_ABSENT = 2**64 - 1
_CHECKSUM_BYTES = 4
_DECODED_SIZE = slice(4, 8)
"""Where Blosc's header has the number of bytes that its buffer decodes to."""


def encode_shard(cells: Float[ndarray, " cells"], row_cells: int) -> bytes:
    """A row's shard, of which only the first cells are filled; a chunk of zeros alone takes no bytes.

    Args:
        cells: little-endian, in the stored dtype.
        row_cells: cells of the whole row, a multiple of `CHUNK_CELLS`.
    """
    index = np.full((row_cells // CHUNK_CELLS, 2), _ABSENT, "<u8")
    parts, offset = [], 0
    for chunk, start in enumerate(range(0, len(cells), CHUNK_CELLS)):
        filled = np.zeros(CHUNK_CELLS, cells.dtype)
        part = cells[start : start + CHUNK_CELLS]
        filled[: len(part)] = part
        if not filled.any():
            continue
        parts.append(_add_checksum(blosc.compress(filled, b"zstd", 5, blosc.BITSHUFFLE)))
        index[chunk] = offset, len(parts[-1])
        offset += len(parts[-1])
    return b"".join([*parts, _add_checksum(index.tobytes())])


def count_index_bytes(row_cells: int) -> int:
    """Bytes of the index at the end of a shard."""
    return row_cells // CHUNK_CELLS * 16 + _CHECKSUM_BYTES


def decode_index(data: bytes | memoryview, shard_bytes: int) -> UInt64[ndarray, "chunks 2"]:
    """Offset and size of each chunk; both are 2^64 - 1 where a chunk is zeros alone.

    Args:
        data: the last `count_index_bytes` bytes of a shard.
        shard_bytes: bytes of the whole shard.

    Raises:
        ValueError: its checksum is not right, or a chunk lies outside the shard.
    """
    index = np.frombuffer(_strip_checksum(data, "the index"), "<u8").reshape(-1, 2)
    inside = shard_bytes - len(data)
    absent = (index == _ABSENT).all(axis=1)
    sizes, offsets = index[:, 1], index[:, 0]
    if ((~absent) & ((sizes > inside) | (offsets > inside - np.minimum(sizes, inside)))).any():
        raise ValueError("the index puts a chunk outside the shard")
    return index


def is_absent(entry: UInt64[ndarray, "2"]) -> bool:
    """Whether an index entry says that its chunk is zeros alone."""
    return bool((entry == _ABSENT).all())


def decode_chunk(data: bytes | memoryview, out: Shaped[ndarray, "..."]) -> None:
    """Fills `out`, in the stored dtype, with the values of a chunk: of a shard, or a whole object of an index array.

    Raises:
        ValueError: its checksum is not right, or it does not decode to a whole chunk.
    """
    compressed = _strip_checksum(data, "a chunk")
    num_bytes = int.from_bytes(compressed[_DECODED_SIZE], "little")
    if num_bytes != out.nbytes:
        raise ValueError(f"a chunk decodes to {num_bytes} bytes, expected {out.nbytes}")
    try:
        blosc.decompress(compressed, out)
    except RuntimeError as error:
        raise ValueError(f"a chunk does not decode: {error}") from None


def _add_checksum(data: bytes) -> bytes:
    checksum: int = google_crc32c.value(data)
    return data + checksum.to_bytes(_CHECKSUM_BYTES, "little")


def _strip_checksum(data: bytes | memoryview, what: str) -> bytes:
    content, checksum = bytes(data[:-_CHECKSUM_BYTES]), bytes(data[-_CHECKSUM_BYTES:])
    if len(data) < _CHECKSUM_BYTES or google_crc32c.value(content) != int.from_bytes(checksum, "little"):
        raise ValueError(f"the checksum of {what} is not right")
    return content
