"""Decoded chunks are kept within a budget, in memory or in a shared file, and are what was stored."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.readers import open_dataset
from pipeline.readers.cache import ChunkCache, SharedFolder, SlotFile
from storage_schema.arrays import CHUNK_CELLS
from storage_schema.errors import StoreAccessError
from tests.conftest import PROJECT

NUM_CHUNKS = 6
CHUNK_BYTES = CHUNK_CELLS * 2
CELLS = np.random.default_rng(0).random(NUM_CHUNKS * CHUNK_CELLS).astype(np.float16)


class Decoder:
    """Chunks of `CELLS`, and which of them were decoded."""

    def __init__(self) -> None:
        self.decoded: list[int] = []

    def __call__(self, chunk: int, out: np.ndarray) -> None:
        self.decoded.append(chunk)
        out[:] = CELLS[chunk * CHUNK_CELLS : (chunk + 1) * CHUNK_CELLS]


def make_cache(decode, budget: int, queued: int = 2, file: SlotFile | None = None) -> ChunkCache:
    return ChunkCache(NUM_CHUNKS, CELLS.dtype, decode, budget=budget * CHUNK_BYTES, queued=queued, file=file)


def read_all(cache: ChunkCache, step: int = CHUNK_CELLS // 3) -> None:
    for start in range(0, len(CELLS), step):
        stop = min(len(CELLS), start + step)
        assert np.array_equal(cache.read_run(start, stop), CELLS[start:stop]), (start, stop)


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 2, 3, 5, 6, 100])
@pytest.mark.parametrize("step", [1000, CHUNK_CELLS // 3, CHUNK_CELLS, 2 * CHUNK_CELLS + 5, len(CELLS)])
def test_any_run_of_cells_is_read_under_any_budget(budget, in_file, step, tmp_path):
    cache = make_cache(Decoder(), budget, file=SlotFile(tmp_path, "ours") if in_file else None)
    for _ in range(2):
        read_all(cache, step)


def test_what_fits_into_the_budget_is_decoded_once():
    decoder = Decoder()
    cache = make_cache(decoder, budget=NUM_CHUNKS)
    for _ in range(3):
        read_all(cache)
    assert decoder.decoded == list(range(NUM_CHUNKS))


def test_beyond_the_budget_the_first_chunks_stay_and_the_others_pass_through():
    decoder = Decoder()
    cache = make_cache(decoder, budget=NUM_CHUNKS - 1, queued=2)
    for _ in range(3):
        read_all(cache)
    assert [decoder.decoded.count(chunk) for chunk in range(NUM_CHUNKS)] == [1, 1, 1, 3, 3, 3]
    assert len(cache._queue) == 2


@pytest.mark.parametrize("budget", [3, NUM_CHUNKS])
def test_a_second_cache_over_the_same_file_decodes_only_what_is_not_in_it(budget, tmp_path):
    read_all(make_cache(Decoder(), budget, queued=1, file=SlotFile(tmp_path, "ours")))
    decoder = Decoder()
    read_all(make_cache(decoder, budget, queued=1, file=SlotFile(tmp_path, "ours")))
    assert decoder.decoded == [chunk for chunk in range(NUM_CHUNKS) if chunk >= budget - 1 and budget < NUM_CHUNKS]


def damage_data(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-CHUNK_BYTES // 2] ^= 1
    path.write_bytes(data)


def damage_table(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8 * (NUM_CHUNKS - 1)] ^= 1
    path.write_bytes(data)


def swap_slots(path: Path) -> None:
    data = path.read_bytes()
    head, slots = data[:4096], [data[4096 + CHUNK_BYTES * slot :][:CHUNK_BYTES] for slot in range(NUM_CHUNKS)]
    sums = [head[8 * slot :][:8] for slot in range(NUM_CHUNKS)]
    path.write_bytes(
        b"".join([*sums[:-2], sums[-1], sums[-2], head[8 * NUM_CHUNKS :], *slots[:-2], slots[-1], slots[-2]])
    )


def cut(path: Path) -> None:
    os.truncate(path, 4096 + CHUNK_BYTES * (NUM_CHUNKS - 1) + 100)


def fill_with_garbage(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [(damage_data, [5]), (damage_table, [5]), (swap_slots, [4, 5]), (cut, [5]), (fill_with_garbage, [*range(6)])],
)
def test_a_damaged_slot_is_decoded_again_and_mended(damage, expected, tmp_path):
    read_all(make_cache(Decoder(), NUM_CHUNKS, file=SlotFile(tmp_path, "ours")))
    (path,) = tmp_path.iterdir()
    damage(path)
    for decoded in (expected, []):
        decoder = Decoder()
        read_all(make_cache(decoder, NUM_CHUNKS, file=SlotFile(tmp_path, "ours")))
        assert decoder.decoded == decoded


def test_the_file_of_another_purpose_does_not_count(tmp_path):
    read_all(make_cache(Decoder(), NUM_CHUNKS, file=SlotFile(tmp_path, "ours")))
    (path,) = tmp_path.iterdir()
    other = SlotFile(tmp_path, "another's")
    path.rename(other._path)
    decoder = Decoder()
    read_all(make_cache(decoder, NUM_CHUNKS, file=other))
    assert decoder.decoded == list(range(NUM_CHUNKS))


def fill_together(folder: Path, seed: int) -> None:
    cache = make_cache(Decoder(), NUM_CHUNKS, file=SlotFile(folder, "ours"))
    for chunk in np.random.default_rng(seed).permutation(NUM_CHUNKS).tolist():
        window = slice(chunk * CHUNK_CELLS, (chunk + 1) * CHUNK_CELLS)
        assert np.array_equal(cache.read_run(window.start, window.stop), CELLS[window])


@pytest.mark.timeout(120)
def test_processes_that_fill_a_file_at_once_do_no_harm(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=fill_together, args=(tmp_path, seed)) for seed in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 6
    decoder = Decoder()
    read_all(make_cache(decoder, NUM_CHUNKS, file=SlotFile(tmp_path, "ours")))
    assert decoder.decoded == []


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, {project!r})
from tests.readers.test_chunk_cache import *
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = SlotFile(Path({folder!r}), "ours")
cache = make_cache(Decoder(), NUM_CHUNKS, file=file)
# The third slot is cut in the middle: the system takes a part of it and reports no error.
limit = 4096 + 2 * CHUNK_BYTES + CHUNK_BYTES // 2
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
for _ in range(2):
    read_all(cache)
"""


@pytest.mark.timeout(120)
def test_a_disk_that_fills_up_while_caching_changes_nothing_that_is_read(tmp_path):
    code = FULL_DISK.format(project=str(PROJECT), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    decoder = Decoder()
    read_all(make_cache(decoder, NUM_CHUNKS, file=SlotFile(tmp_path, "ours")))
    assert decoder.decoded == [2, 3, 4, 5]


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_shared_folder_goes_with_its_owner(temporary):
    folder = SharedFolder()
    assert folder.path.parent == temporary
    assert folder.path.is_dir()
    del folder
    assert list(temporary.iterdir()) == []


@pytest.mark.timeout(120)
def test_the_folder_of_a_killed_process_is_swept_and_a_live_ones_stays(temporary):
    code = textwrap.dedent(f"""
        import os, signal, sys, tempfile
        sys.path.insert(0, {str(PROJECT)!r})
        tempfile.tempdir = {str(temporary)!r}
        from pipeline.readers.cache import SharedFolder
        folder = SharedFolder()
        (folder.path / "chunks").write_bytes(b"much")
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    (stale,) = temporary.iterdir()
    mine = SharedFolder()
    other = SharedFolder()
    assert not stale.exists()
    assert mine.path.is_dir()
    assert other.path.is_dir()


TEXTS = [f"Text {number} {'and ' * (number % 4)}more." for number in range(12)]


@pytest.fixture(scope="module")
def stored(tiny_llama, materialize_text):
    return materialize_text(tiny_llama, TEXTS, maps=(1, 2), partition_samples=3)


def test_a_dataset_reads_the_same_through_a_file_which_is_damaged_or_not(stored, tmp_path):
    store, ref = stored
    expected = [item.maps for item in open_dataset(ref, store)]
    before = {path: path.read_bytes() for path in Path(store).rglob("*") if path.is_file()}
    for _ in range(3):
        dataset = open_dataset(ref, store, cache_path=tmp_path / "cache")
        assert all(torch.equal(item.maps, maps) for item, maps in zip(dataset, expected, strict=True))
        (file,) = (tmp_path / "cache").iterdir()
        fill_with_garbage(file)
    assert {path: path.read_bytes() for path in Path(store).rglob("*") if path.is_file()} == before


def test_other_maps_budgets_and_versions_have_files_of_their_own(stored, tiny_llama, materialize_text, tmp_path):
    store, ref = stored
    other_store, other_ref = materialize_text(tiny_llama, TEXTS[::-1], maps=(1, 2), partition_samples=3)
    for one, where, options in (
        (ref, store, {}), (ref, store, {"maps": (2, 1)}), (ref, store, {"maps": (2,)}),
        (ref, store, {"cache_bytes": 10**6}), (other_ref, other_store, {}),
    ):  # fmt: skip
        expected = open_dataset(one, where, maps=options.get("maps"))
        dataset = open_dataset(one, where, cache_path=tmp_path, **options)
        assert all(torch.equal(dataset[index].maps, expected[index].maps) for index in range(len(TEXTS)))
    assert len(list(tmp_path.iterdir())) == 5


def test_a_folder_that_cannot_hold_the_file_is_named(stored, tmp_path):
    store, ref = stored
    (tmp_path / "file").write_bytes(b"")
    dataset = open_dataset(ref, store, cache_path=tmp_path / "file" / "cache")
    with pytest.raises(StoreAccessError, match=r"file/cache: Not a directory; name another folder"):
        _ = dataset[0]
