"""Shards are the bytes that Zarr writes, each reads the other's, and damage to any byte raises."""

import tempfile

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, Crc32cCodec
from zarr.storage import LocalStore

from pipeline.store.shards import count_index_bytes, decode_chunk, decode_index, encode_shard, is_absent
from storage_schema.arrays import CHUNK_CELLS

ROW_CHUNKS = 5
ROW = ROW_CHUNKS * CHUNK_CELLS


def draw_cells(count, dtype, seed=0):
    return np.random.default_rng(seed).random(count).astype(dtype)


def write_with_zarr(folder, cells):
    array = zarr.create_array(
        LocalStore(folder), shape=(1, ROW), dtype=cells.dtype, chunks=(1, CHUNK_CELLS), shards=(1, ROW), fill_value=0,
        compressors=[BloscCodec(cname="zstd", clevel=5, shuffle="bitshuffle"), Crc32cCodec()],
    )  # fmt: skip
    array[0, : len(cells)] = cells
    return array, folder / "c" / "0" / "0"


def decode_row(shard, dtype):
    row = np.zeros(ROW, dtype)
    for place, entry in enumerate(decode_index(shard[-count_index_bytes(ROW) :], len(shard))):
        if not is_absent(entry):
            offset, size = entry.tolist()
            decode_chunk(shard[offset : offset + size], row[place * CHUNK_CELLS : (place + 1) * CHUNK_CELLS])
    return row


@pytest.mark.parametrize("dtype", ["<f2", "<f4"])
@pytest.mark.parametrize(
    "count", [1, CHUNK_CELLS - 1, CHUNK_CELLS, CHUNK_CELLS + 1, 3 * CHUNK_CELLS, ROW - 1, ROW], ids=str
)
def test_the_bytes_are_those_of_zarr(tmp_path, dtype, count):
    cells = draw_cells(count, dtype)
    _, path = write_with_zarr(tmp_path, cells)
    assert encode_shard(cells, ROW) == path.read_bytes()
    np.testing.assert_array_equal(decode_row(path.read_bytes(), dtype)[:count], cells)


def test_chunks_of_zeros_take_no_bytes_as_in_zarr(tmp_path):
    cells = draw_cells(4 * CHUNK_CELLS, "<f2")
    cells[CHUNK_CELLS : 3 * CHUNK_CELLS] = 0
    _, path = write_with_zarr(tmp_path, cells)
    shard = encode_shard(cells, ROW)
    assert shard == path.read_bytes()
    index = decode_index(shard[-count_index_bytes(ROW) :], len(shard))
    assert [is_absent(entry) for entry in index] == [False, True, True, False, True]
    np.testing.assert_array_equal(decode_row(shard, "<f2")[: len(cells)], cells)


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(1, ROW), seed=st.integers(0, 9), levels=st.sampled_from([2, 50, 10**6]))
def test_zarr_reads_what_is_encoded_here(tmp_path, count, seed, levels):
    cells = (draw_cells(count, "<f4", seed) * levels).astype(np.int64).astype("<f4")
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        array, path = write_with_zarr(tmp_path / folder, draw_cells(1, "<f4"))
        path.write_bytes(encode_shard(cells, ROW))
        np.testing.assert_array_equal(array[0, :count], cells)
        assert not array[0, count:].any()


@pytest.mark.parametrize("seed", range(40))
def test_any_flipped_byte_raises(seed):
    cells = draw_cells(3 * CHUNK_CELLS, "<f2")
    shard = bytearray(encode_shard(cells, ROW))
    generator = np.random.default_rng(seed)
    place = int(generator.integers(len(shard))) if seed % 2 else len(shard) - 1 - int(generator.integers(84))
    shard[place] ^= 1 << int(generator.integers(8))
    with pytest.raises(ValueError, match=r"checksum of (a chunk|the index)"):
        decode_row(bytes(shard), "<f2")


@pytest.mark.parametrize("size", [0, 3, 4, 83, 84, 1000])
def test_a_truncated_shard_raises(size):
    shard = encode_shard(draw_cells(3 * CHUNK_CELLS, "<f2"), ROW)
    with pytest.raises(ValueError, match="checksum"):
        decode_row(shard[:size], "<f2")


def test_an_index_that_leads_out_of_the_shard_raises():
    shard = encode_shard(draw_cells(3 * CHUNK_CELLS, "<f2"), ROW)
    tail = shard[-count_index_bytes(ROW) :]
    with pytest.raises(ValueError, match="outside the shard"):
        decode_index(tail, len(tail) + 1000)


def test_a_chunk_of_another_size_raises():
    shard = encode_shard(draw_cells(CHUNK_CELLS, "<f4"), ROW)
    ((offset, size), *_) = decode_index(shard[-count_index_bytes(ROW) :], len(shard)).tolist()
    with pytest.raises(ValueError, match="expected 131072"):
        decode_chunk(shard[offset : offset + size], np.empty(CHUNK_CELLS, "<f2"))
