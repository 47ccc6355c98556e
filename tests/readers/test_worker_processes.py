"""Workers of every kind read the same bytes, also when their parent has read before."""

import multiprocessing
import threading

import pytest
import torch
from torch.utils.data import DataLoader

from pipeline.readers import open_dataset
from storage_schema.errors import CorruptedObjectError

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
