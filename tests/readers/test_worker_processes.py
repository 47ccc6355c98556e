"""Workers of every kind read the same bytes, also when their parent has read before."""

import contextlib
import gc
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from pipeline.readers import OlaDataset, open_dataset
from storage_schema.errors import CorruptedObjectError
from tests.conftest import PROJECT

multiprocessing.set_forkserver_preload(["pipeline.readers", "pipeline.extraction", "pipeline.store.writer"])
TEXTS = [f"Text {number} {'and ' * (number % 4)}more." for number in range(10)]
TENSORS = ("maps", "attention_mask", "input_ids", "word_ids", "offsets")


@pytest.fixture(scope="module")
def stored(tiny_llama, materialize_text):
    return materialize_text(tiny_llama, TEXTS, partition_samples=3)


@pytest.fixture(scope="module")
def expected(stored):
    dataset = open_dataset(stored[1], stored[0])
    return [dataset.collate([dataset[index] for index in range(first, min(first + 4, 10))]) for first in (0, 4, 8)]


def assert_same(batches, expected) -> None:
    assert [batch.sample_ids for batch in batches] == [batch.sample_ids for batch in expected]
    for batch, other in zip(batches, expected, strict=True):
        assert all(torch.equal(getattr(batch, name), getattr(other, name)) for name in TENSORS)
        assert batch.samples == other.samples


@pytest.mark.timeout(120)
@pytest.mark.parametrize("parent_has_read", [False, True])
@pytest.mark.parametrize("start_method", ["fork", "forkserver", None])
def test_a_plain_torch_loader_reads_the_same(start_method, parent_has_read, stored, expected):
    dataset = open_dataset(stored[1], stored[0])
    if parent_has_read:
        assert dataset[9].maps.any()
    loader = DataLoader(
        dataset,
        batch_size=4,
        collate_fn=dataset.collate,
        num_workers=0 if start_method is None else 2,
        multiprocessing_context=start_method,
    )
    for _ in range(2):
        assert_same(list(loader), expected)
    assert torch.equal(
        dataset[9].maps, expected[2].maps[1, :, : len(dataset[9].input_ids), : len(dataset[9].input_ids)]
    )


@pytest.mark.timeout(180)
@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_our_loader_reads_the_same_with_workers_of_every_kind(start_method, stored, expected):
    dataset = open_dataset(stored[1], stored[0])
    assert dataset[0].maps.any()
    loader = dataset.loader(batch_size=4, num_workers=2, start_method=start_method)
    assert_same(list(loader), expected)
    assert loader.state_dict()["epoch"] == 1


@pytest.mark.timeout(120)
def test_workers_that_stay_read_epoch_after_epoch(stored, expected):
    dataset = open_dataset(stored[1], stored[0])
    loader = DataLoader(
        dataset, batch_size=4, collate_fn=dataset.collate, num_workers=2, persistent_workers=True,
        multiprocessing_context="fork",
    )  # fmt: skip
    for _ in range(3):
        assert_same(list(loader), expected)


@pytest.mark.timeout(120)
def test_damage_that_a_worker_meets_is_raised_by_name_in_the_parent(tiny_llama, materialize_text):
    store, ref = materialize_text(tiny_llama, TEXTS, partition_samples=3)
    dataset = open_dataset(ref, store)
    group = store / str(dataset.manifest.dataset) / dataset.manifest.folder
    shard = group / "order_1" / "c" / "2" / "0"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    loader = dataset.loader(batch_size=4, num_workers=1, start_method="fork")
    with pytest.raises(CorruptedObjectError, match="order_1/c/2/0"):
        list(loader)


def wait_until(holds) -> None:
    deadline = time.monotonic() + 30
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert holds()


def list_children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("leave", ["break", "error"])
def test_a_loop_that_is_left_leaves_no_worker_and_goes_on(leave, stored, expected):
    before = list_children()
    loader = open_dataset(stored[1], stored[0]).loader(batch_size=4, num_workers=2, start_method="fork")
    with contextlib.suppress(KeyError):
        for batch in loader:
            assert_same([batch], expected[:1])
            assert len(list_children() - before) >= 2
            if leave == "break":
                break
            raise KeyError
    wait_until(lambda: list_children() <= before)
    assert_same(list(loader), expected[1:])
    assert_same(list(loader), expected)
    del loader
    gc.collect()
    wait_until(lambda: list_children() <= before)


@pytest.mark.timeout(120)
def test_workers_stay_from_epoch_to_epoch_and_share_decoded_chunks(stored, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    loader = open_dataset(stored[1], stored[0]).loader(batch_size=4, num_workers=2, start_method="fork")
    before = list_children()
    assert_same(list(loader), expected)
    workers = list_children() - before
    assert len(workers) == 2
    (folder,) = tmp_path.glob("ola-cache-*")
    (file,) = folder.glob("*.chunks")
    written = file.stat().st_mtime_ns
    for _ in range(2):
        assert_same(list(loader), expected)
    assert list_children() - before == workers
    assert file.stat().st_mtime_ns == written
    del loader
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(120)
def test_a_worker_that_raises_can_be_asked_again(tiny_llama, materialize_text, expected):
    store, ref = materialize_text(tiny_llama, TEXTS, partition_samples=3)
    dataset = open_dataset(ref, store)
    group = store / str(dataset.manifest.dataset) / dataset.manifest.folder
    shard = group / "order_1" / "c" / "2" / "0"
    data = shard.read_bytes()
    loader = dataset.loader(batch_size=4, num_workers=2, start_method="fork")
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for _ in range(2):
        with pytest.raises(CorruptedObjectError, match="order_1/c/2/0 is not the one that was written"):
            list(loader)
    shard.write_bytes(data)
    assert_same([*loader], expected[1:])


MEMORY = """
import sys
import psutil
from pipeline.readers import OlaDataset, open_dataset

def measure(processes):
    return sum(process.memory_info().rss for process in processes)

if __name__ == "__main__":
    loader = open_dataset(sys.argv[2], sys.argv[1], cache_bytes=10**6).loader(
        batch_size=8, shuffle=True, num_workers=int(sys.argv[3])
    )
    def run(epochs):
        for _ in range(epochs):
            for batch in loader:
                assert batch.samples
        return measure([psutil.Process(), *psutil.Process().children()])
    before = run(3)
    print(before, run(5))
"""


@pytest.mark.timeout(280)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_memory_is_flat_over_five_epochs(num_workers, tiny_bert, materialize_text, tmp_path):
    texts = [f"Text {number} {'and ' * 25}more." for number in range(200)]
    store, ref = materialize_text(tiny_bert, texts, maps=(1, 2, 3), partition_samples=20)
    script = tmp_path / "epochs.py"
    script.write_text(MEMORY)
    done = subprocess.run(
        [sys.executable, str(script), str(store), ref, str(num_workers)], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert after < before * 1.05


def test_a_remote_store_is_read_by_spawned_workers_and_says_so(stored, expected, monkeypatch):
    monkeypatch.setattr(OlaDataset, "may_fork", False)
    with pytest.warns(UserWarning, match="tiny-llama/lines/all@v1 is read from a bucket.*start by `spawn`"):
        loader = open_dataset(stored[1], stored[0]).loader(batch_size=4, num_workers=1, start_method="fork")
    assert_same(list(loader), expected)


def test_threads_share_a_dataset(stored, expected):
    dataset = open_dataset(stored[1], stored[0], cache_bytes=1)
    results: dict[int, bool] = {}

    def read(number: int) -> None:
        results[number] = all(torch.equal(dataset[index].maps, items[index].maps) for index in range(10))

    items = [open_dataset(stored[1], stored[0])[index] for index in range(10)]
    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), True)
