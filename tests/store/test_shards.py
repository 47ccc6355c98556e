"""Shards are the bytes that Zarr writes, read back without Zarr; damage to any of them raises."""

import google_crc32c
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, Crc32cCodec
from zarr.storage import MemoryStore

from pipeline.store.shards import DamagedShardError, count_index_bytes, decode_chunk, decode_index, encode_shard
from storage_schema.arrays import CHUNK_CELLS

ROW_CELLS = 8 * CHUNK_CELLS
ABSENT = 2**64 - 1


def create_array(dtype: str, row_cells: int) -> tuple[MemoryStore, zarr.Array]:
    store = MemoryStore()
    array = zarr.create_array(
        store,
        shape=(1, row_cells),
        dtype=dtype,
        chunks=(1, CHUNK_CELLS),
        shards=(1, row_cells),
        compressors=[BloscCodec(cname="zstd", clevel=5, shuffle="bitshuffle"), Crc32cCodec()],
        fill_value=0,
    )
    return store, array


def write_with_zarr(cells: np.ndarray, row_cells: int) -> bytes:
    store, array = create_array(str(cells.dtype), row_cells)
    filled = np.zeros(row_cells, cells.dtype)
    filled[: len(cells)] = cells
    array[0] = filled
    return store._store_dict["c/0/0"].to_bytes()


def read_with_zarr(data: bytes, dtype: str, row_cells: int) -> np.ndarray:
    store, array = create_array(dtype, row_cells)
    store._store_dict["c/0/0"] = zarr.core.buffer.default_buffer_prototype().buffer.from_bytes(data)
    return np.asarray(array[0])


def read_shard(data: bytes, dtype: str, row_cells: int) -> np.ndarray:
    cells = np.zeros(row_cells, dtype)
    index = decode_index(data[-count_index_bytes(row_cells) :], len(data))
    for chunk, (offset, length) in enumerate(index.tolist()):
        if offset != ABSENT:
            part = cells[chunk * CHUNK_CELLS : (chunk + 1) * CHUNK_CELLS]
            part[:] = 7  # what a decoder leaves is not taken for zeros
            decode_chunk(data[offset : offset + length], part)
    return cells


def make_cells(num_cells: int, dtype: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet([0.1] * 64, -(-num_cells // 64)).ravel()[:num_cells].astype(dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("num_cells", [1, CHUNK_CELLS - 1, CHUNK_CELLS, CHUNK_CELLS + 1, ROW_CELLS - 7, ROW_CELLS])
def test_a_shard_is_byte_for_byte_what_zarr_writes(num_cells, dtype):
    cells = make_cells(num_cells, dtype)
    data = encode_shard(cells, ROW_CELLS)
    assert data == write_with_zarr(cells, ROW_CELLS)
    assert np.array_equal(read_shard(data, dtype, ROW_CELLS)[:num_cells], cells)


def test_a_row_of_one_long_sample_is_what_zarr_writes():
    row_cells = 70 * CHUNK_CELLS
    cells = make_cells(row_cells - 5, "float16")
    assert encode_shard(cells, row_cells) == write_with_zarr(cells, row_cells)


@given(
    filled=st.lists(st.booleans(), min_size=1, max_size=8).filter(any),
    short=st.integers(0, CHUNK_CELLS - 1),
    dtype=st.sampled_from(["float16", "float32"]),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=25)
def test_zarr_reads_our_shards_and_we_read_its(filled, short, dtype, seed):
    cells = make_cells(len(filled) * CHUNK_CELLS, dtype, seed)
    for chunk, is_filled in enumerate(filled):
        cells[chunk * CHUNK_CELLS : (chunk + 1) * CHUNK_CELLS] *= is_filled
    cells[len(cells) - short :] = 0
    expected = np.concatenate([cells, np.zeros(ROW_CELLS - len(cells), dtype)])
    ours = encode_shard(cells[: len(cells) - short], ROW_CELLS)
    assert np.array_equal(read_with_zarr(ours, dtype, ROW_CELLS), expected)
    if cells.any():
        zarrs = write_with_zarr(cells, ROW_CELLS)
        assert zarrs == ours
        assert np.array_equal(read_shard(zarrs, dtype, ROW_CELLS), expected)


def test_a_shard_of_zeros_alone_is_its_index_which_zarr_reads_as_zeros():
    data = encode_shard(np.zeros(3 * CHUNK_CELLS, np.float16), ROW_CELLS)
    assert len(data) == count_index_bytes(ROW_CELLS)
    assert (decode_index(data, len(data)) == ABSENT).all()
    assert not read_with_zarr(data, "float16", ROW_CELLS).any()


@pytest.mark.parametrize(("num_cells", "row_cells"), [(CHUNK_CELLS + 1, CHUNK_CELLS), (1, CHUNK_CELLS + 1), (1, 0)])
def test_cells_that_do_not_fit_the_row_are_refused(num_cells, row_cells):
    with pytest.raises(ValueError, match=f"{num_cells} cells do not fit into a row of {row_cells}"):
        encode_shard(np.ones(num_cells, np.float16), row_cells)


def test_no_flipped_bit_of_a_shard_is_read_as_data():
    data = encode_shard(make_cells(2 * CHUNK_CELLS, "float16"), ROW_CELLS)
    positions = [*range(0, len(data), 997), *range(len(data) - count_index_bytes(ROW_CELLS), len(data))]
    for position in positions:
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        with pytest.raises(DamagedShardError, match="CRC32C"):
            read_shard(bytes(changed), "float16", ROW_CELLS)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 19, 1000])
def test_a_cut_chunk_raises(size):
    data = encode_shard(make_cells(CHUNK_CELLS, "float16"), CHUNK_CELLS)
    with pytest.raises(DamagedShardError):
        decode_chunk(data[:size], np.empty(CHUNK_CELLS, np.float16))


@pytest.mark.parametrize("size", [0, 3, 20, count_index_bytes(ROW_CELLS) - 1])
def test_a_cut_index_raises(size):
    with pytest.raises(DamagedShardError, match="index"):
        decode_index(encode_shard(make_cells(1, "float16"), ROW_CELLS)[-size:] if size else b"", 10**6)


def seal(body: bytes) -> bytes:
    return body + google_crc32c.value(body).to_bytes(4, "little")


@pytest.mark.parametrize(
    "pair", [(ABSENT, 5), (5, ABSENT), (90, 11), (0, 101), (101, 0), (2**63, 2**63), (ABSENT - 1, 3)], ids=str
)
def test_an_index_that_leads_out_of_the_shard_raises_though_its_checksum_is_right(pair):
    tail = seal(np.array([pair, (0, 100)], "<u8").tobytes())
    with pytest.raises(DamagedShardError, match="beyond the 100 bytes"):
        decode_index(tail, 100 + len(tail))


def test_an_index_within_the_shard_is_read():
    pairs = np.array([(0, 60), (ABSENT, ABSENT), (60, 40)], np.uint64)
    tail = seal(pairs.astype("<u8").tobytes())
    assert np.array_equal(decode_index(tail, 100 + len(tail)), pairs)


def test_a_chunk_of_another_type_or_size_raises_though_its_checksum_is_right():
    data = encode_shard(make_cells(CHUNK_CELLS, "float16"), CHUNK_CELLS)[: -count_index_bytes(CHUNK_CELLS)]
    for wrong in (np.empty(CHUNK_CELLS, np.float32), np.empty(CHUNK_CELLS // 2, np.float32)):
        with pytest.raises(DamagedShardError, match="2-byte cells; expected"):
            decode_chunk(data, wrong)
    with pytest.raises(DamagedShardError):
        decode_chunk(seal(data[:-9]), np.empty(CHUNK_CELLS, np.float16))
    with pytest.raises(DamagedShardError):
        decode_chunk(seal(data[:16] + b"\0" * (len(data) - 20)), np.empty(CHUNK_CELLS, np.float16))
