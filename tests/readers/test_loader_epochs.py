"""A loader gives every sample once an epoch, on one rank or many, and resumes exactly where it stood."""

import json
import os
import subprocess
import sys
from itertools import islice, product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.readers import open_dataset
from pipeline.readers.loader import shuffle_blocks
from pipeline.store.open import StoredVersion
from storage_schema.errors import InvalidRecipeError
from tests.conftest import PROJECT

SIZE = 11
TEXTS = [f"Text {number} {'and ' * (number % 4)}more." for number in range(SIZE)]


@pytest.fixture(scope="module")
def stored(tiny_bert, materialize_text):
    return materialize_text(tiny_bert, TEXTS, maps=(1,), partition_samples=3)


@pytest.fixture(scope="module")
def dataset(stored):
    return open_dataset(stored[1], stored[0])


@pytest.fixture(scope="module")
def all_ids(dataset) -> list[str]:
    return [item.sample_id for item in dataset]


def ids_of(loader) -> list[list[str]]:
    return [batch.sample_ids for batch in loader]


def flatten(batches: list[list[str]]) -> list[str]:
    return [sample_id for batch in batches for sample_id in batch]


@given(st.lists(st.integers(0, 400), min_size=1, max_size=500), st.integers(0, 2**40), st.integers(0, 1000))
@settings(deadline=None, max_examples=60)
def test_a_shuffle_is_a_permutation_and_a_function_of_seed_and_epoch(blocks, seed, epoch):
    values = np.array(blocks, np.int64)
    order = shuffle_blocks(values, seed, epoch)
    assert sorted(order.tolist()) == list(range(len(blocks)))
    assert np.array_equal(order, shuffle_blocks(values, seed, epoch))


def test_a_shuffle_of_many_blocks_reads_few_of_them_at_a_time():
    blocks = np.repeat(np.arange(640), 5)
    order = shuffle_blocks(blocks, 0, 0)
    windows = [set(blocks[order[first : first + 320]].tolist()) for first in range(0, len(order), 320)]
    assert all(len(window) == 64 for window in windows)
    assert len(set.union(*windows)) == 640
    assert not np.array_equal(np.sort(order[:320]), np.arange(320))


def test_a_last_pool_is_as_large_as_the_others():
    blocks = np.repeat(np.arange(65), 5)
    order = shuffle_blocks(blocks, 0, 0)
    assert len(set(blocks[order[:165]].tolist())) == 33
    assert len(set(blocks[order[165:]].tolist())) == 32


def test_a_shuffle_of_many_blocks_mixes_as_documented():
    blocks = np.repeat(np.arange(233), 86)
    order = shuffle_blocks(blocks, 0, 0)
    size = len(order)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03
    assert abs(np.abs(np.argsort(order) - np.arange(size)).mean() / size - 1 / 3) < 0.03
    batches = blocks[order[: size // 32 * 32]].reshape(-1, 32).tolist()
    assert 23 < np.mean([len(set(batch)) for batch in batches]) < 26


def test_a_shuffle_of_few_blocks_is_uniform_enough_to_leave_every_place():
    blocks = np.repeat(np.arange(4), 5)
    places = np.array([np.argsort(shuffle_blocks(blocks, seed, 0)) for seed in range(400)])
    means = places.mean(axis=0)
    assert (np.abs(means - 9.5) < 1.5).all()


@pytest.mark.parametrize("batch_size", [1, 3, 4, 11, 50])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_sample_comes_once_an_epoch(batch_size, shuffle, dataset, all_ids):
    loader = dataset.loader(batch_size=batch_size, shuffle=shuffle)
    for _ in range(2):
        assert len(loader) == -(-SIZE // batch_size)
        batches = ids_of(loader)
        assert sorted(flatten(batches)) == sorted(all_ids)
        assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
        assert shuffle or flatten(batches) == all_ids


@pytest.mark.parametrize(("batch_size", "batches"), [(3, 3), (4, 2), (11, 1), (12, 0)])
def test_drop_last_leaves_out_what_fills_no_batch(batch_size, batches, dataset, all_ids):
    loader = dataset.loader(batch_size=batch_size, drop_last=True)
    assert len(loader) == batches
    assert flatten(ids_of(loader)) == all_ids[: batches * batch_size]
    assert loader.state_dict()["epoch"] == 1


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 2, 4, 20])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_share_an_epoch_exactly(world_size, batch_size, drop_last, dataset, all_ids):
    single = flatten(ids_of(dataset.loader(batch_size=SIZE, shuffle=True, seed=5)))
    ranks = [
        ids_of(dataset.loader(batch_size, shuffle=True, seed=5, drop_last=drop_last, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    together = [sample_id for batches in ranks for sample_id in flatten(batches)]
    full_steps = SIZE // (batch_size * world_size)
    expected = single[: full_steps * batch_size * world_size] if drop_last else single
    assert sorted(together) == sorted(expected)
    assert all(len(batch) == batch_size for batches in ranks for batch in batches[:full_steps])
    sizes = {len(flatten(batches)) for batches in ranks}
    assert max(sizes) - min(sizes) <= 1


def test_the_order_changes_with_epoch_and_seed_and_with_nothing_else(dataset):
    first = dataset.loader(batch_size=4, shuffle=True, seed=1)
    epochs = [flatten(ids_of(first)) for _ in range(3)]
    assert len(set(map(tuple, epochs))) == 3
    again = dataset.loader(batch_size=2, shuffle=True, seed=1, pad_to_multiple_of=8)
    assert [flatten(ids_of(again)) for _ in range(3)] == epochs
    assert flatten(ids_of(dataset.loader(shuffle=True, seed=2))) != epochs[0]


def test_a_batch_of_a_loader_is_the_collated_items(dataset, all_ids):
    loader = dataset.loader(batch_size=4, shuffle=True, seed=3, pad_to_multiple_of=16)
    for batch in loader:
        items = [dataset[all_ids.index(sample_id)] for sample_id in batch.sample_ids]
        expected = dataset.collate(items, pad_to_multiple_of=16)
        for name in ("maps", "attention_mask", "input_ids", "word_ids", "offsets"):
            assert torch.equal(getattr(batch, name), getattr(expected, name))
        assert batch.samples == expected.samples


GRID = list(product([1, 3, 4, 11], [False, True], [False, True], [(0, 1), (0, 2), (1, 2)]))


@pytest.mark.parametrize(("batch_size", "shuffle", "drop_last", "ranks"), GRID)
def test_a_state_of_any_step_gives_exactly_the_remaining_batches(batch_size, shuffle, drop_last, ranks, dataset):
    options = {"shuffle": shuffle, "drop_last": drop_last, "rank": ranks[0], "world_size": ranks[1]}
    loader = dataset.loader(batch_size, seed=9, **options)
    states, batches = [json.dumps(loader.state_dict())], []
    for _ in range(2):
        for batch in loader:
            batches.append(batch.sample_ids)
            states.append(json.dumps(loader.state_dict()))
    for step, state in enumerate(states):
        resumed = dataset.loader(batch_size, seed=123, **options)
        resumed.load_state_dict(json.loads(state))
        rest = []
        while len(rest) < len(batches) - step:
            rest += ids_of(resumed)
        assert rest[: len(batches) - step] == batches[step:]


def test_the_state_says_version_seed_epoch_and_samples_of_all_ranks(dataset):
    loader = dataset.loader(batch_size=2, shuffle=True, seed=4, rank=1, world_size=2)
    batches = iter(loader)
    next(batches)
    next(batches)
    state = loader.state_dict()
    expected = {"seed": 4, "epoch": 0, "samples_consumed": 8, "batch_size": 2, "shuffle": True}
    assert state == {"fingerprint": dataset.recipe.fingerprint, **expected}


def test_the_end_of_an_epoch_is_step_zero_of_the_next(dataset):
    loader = dataset.loader(batch_size=4, shuffle=True)
    seen = [loader.state_dict() for _ in loader]
    assert [state["samples_consumed"] for state in seen] == [4, 8, 0]
    assert [state["epoch"] for state in seen] == [0, 0, 1]
    assert loader.state_dict() == seen[-1]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_a_state_taken_by_any_rank_after_a_step_loses_no_sample(world_size, batch_size, dataset, all_ids):
    loaders = [dataset.loader(batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    runs = [iter(loader) for loader in loaders]
    seen: list[str] = []
    while True:
        batches = [next(run, None) for run in runs]
        seen += [sample_id for batch in batches if batch is not None for sample_id in batch.sample_ids]
        if len(seen) == SIZE:
            break
        for loader in loaders:
            rest = []
            for rank in range(world_size):
                resumed = dataset.loader(batch_size, rank=rank, world_size=world_size)
                resumed.load_state_dict(loader.state_dict())
                rest += flatten(ids_of(resumed))
            assert sorted([*seen, *rest]) == sorted(all_ids)


@given(
    before=st.tuples(st.integers(1, 5), st.integers(1, 3)),
    after=st.tuples(st.integers(1, 5), st.integers(1, 3)),
    steps=st.integers(0, 12),
)
@settings(deadline=None, max_examples=40)
def test_another_batch_size_or_number_of_ranks_goes_on_without_loss_or_repeat(before, after, steps, dataset, all_ids):
    batch_size, world_size = before
    loaders = [
        dataset.loader(batch_size, shuffle=True, seed=2, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    steps = min(steps, (SIZE - 1) // (batch_size * world_size))
    seen = [sample_id for loader in loaders for batch in islice(loader, steps) for sample_id in batch.sample_ids]
    state = loaders[0].state_dict()
    batch_size, world_size = after
    for rank in range(world_size):
        loader = dataset.loader(batch_size, shuffle=True, rank=rank, world_size=world_size)
        loader.load_state_dict(state)
        seen += flatten(ids_of(loader))
    assert sorted(seen) == sorted(all_ids)


def test_a_loop_that_is_left_goes_on_with_the_next_batch(dataset, all_ids):
    loader = dataset.loader(batch_size=4)
    seen = []
    for batch in loader:
        seen += batch.sample_ids
        break
    assert len(loader) == 2
    assert seen + flatten(ids_of(loader)) == all_ids


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loop_whose_place_another_took_says_so_and_the_other_goes_on(num_workers, dataset, all_ids):
    loader = dataset.loader(batch_size=3, shuffle=True, num_workers=num_workers)
    maps = {item.sample_id: item.maps for item in dataset}
    older = iter(loader)
    seen = next(older).sample_ids
    newer = iter(loader)
    rest = [next(newer)]
    with pytest.raises(InvalidRecipeError, match="another loop over this loader began"):
        next(older)
    rest += newer
    assert sorted([*seen, *(name for batch in rest for name in batch.sample_ids)]) == sorted(all_ids)
    for batch in rest:
        for name, values in zip(batch.sample_ids, batch.maps, strict=True):
            length = maps[name].shape[-1]
            assert torch.equal(values[:, :length, :length], torch.as_tensor(maps[name])), name


def test_a_loop_that_was_left_open_is_not_gone_on_with_after_a_whole_one(dataset, all_ids):
    loader = dataset.loader(batch_size=3)
    left = iter(loader)
    next(left)
    list(loader)
    with pytest.raises(InvalidRecipeError, match="another loop over this loader began"):
        next(left)
    assert flatten(ids_of(loader)) == all_ids


def test_a_moved_store_and_other_workers_go_on_with_the_remaining_batches(tiny_bert, materialize_text):
    store, ref = materialize_text(tiny_bert, TEXTS, maps=(1,))
    loader = open_dataset(ref, store).loader(batch_size=2, shuffle=True, seed=8, num_workers=1)
    batches = iter(loader)
    next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    rest = [batch.sample_ids for batch in batches]
    moved = Path(store).rename(Path(store).with_name("moved"))
    for num_workers in (0, 2):
        resumed = open_dataset(ref, moved).loader(batch_size=2, shuffle=True, num_workers=num_workers)
        resumed.load_state_dict(state)
        assert ids_of(resumed) == rest


RESUME = """
import json, sys
from pipeline.readers import open_dataset
if __name__ == "__main__":
    store, ref, states, options = json.loads(sys.argv[1])
    remaining = []
    for state in states:
        loader = open_dataset(ref, store).loader(batch_size=2, shuffle=True, **options)
        loader.load_state_dict(state)
        remaining.append([sample_id for batch in loader for sample_id in batch.sample_ids])
    print(json.dumps(remaining))
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_new_process_goes_on_from_any_step_with_other_workers_ranks_and_place(
    num_workers, tiny_bert, materialize_text, tmp_path
):
    store, ref = materialize_text(tiny_bert, TEXTS, maps=(1,), partition_samples=3)
    loader = open_dataset(ref, store).loader(batch_size=2, shuffle=True, seed=8, num_workers=2 - num_workers)
    states, seen = [loader.state_dict()], []
    for batch in loader:
        seen.append(batch.sample_ids)
        states.append(loader.state_dict())
    following = flatten(ids_of(loader))
    moved = Path(store).rename(Path(store).with_name("elsewhere"))
    script = tmp_path / "resume.py"
    script.write_text(RESUME)

    def resume(**options) -> list[list[str]]:
        request = json.dumps([str(moved), ref, states, options])
        done = subprocess.run(
            [sys.executable, str(script), request], capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(PROJECT)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    expected = [*(flatten(seen[step:]) for step in range(len(seen))), following]
    assert resume(num_workers=num_workers) == expected
    ranks = [resume(num_workers=num_workers, rank=rank, world_size=2) for rank in range(2)]
    assert [sorted(one + other) for one, other in zip(*ranks, strict=True)] == [sorted(ids) for ids in expected]


def test_a_small_cache_decodes_each_chunk_once_a_shuffled_epoch(tiny_bert, materialize_text, monkeypatch):
    decoded: list[tuple] = []
    read_chunk = StoredVersion.read_chunk

    def count(self, name, partition, chunk, out):
        decoded.append((name, partition, chunk))
        read_chunk(self, name, partition, chunk, out)

    store, ref = materialize_text(tiny_bert, TEXTS, maps=(1, 2), partition_samples=1)
    loader = open_dataset(ref, store, cache_bytes=1).loader(batch_size=2, shuffle=True)
    monkeypatch.setattr(StoredVersion, "read_chunk", count)
    assert len(flatten(ids_of(loader))) == SIZE
    assert len(decoded) == len(set(decoded)) == 2 * SIZE


def test_a_state_of_another_version_is_refused_with_both(stored, tiny_bert, materialize_text, dataset):
    other_store, other_ref = materialize_text(tiny_bert, TEXTS, maps=(2,))
    state = open_dataset(other_ref, other_store).loader().state_dict()
    with pytest.raises(InvalidRecipeError, match=f"{state['fingerprint'][:12]}.*{dataset.recipe.fingerprint[:12]}"):
        dataset.loader().load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1}, {"samples_consumed": SIZE + 1}, {"samples_consumed": -1}, {"seed": "x"}, {"epoch": None},
        {"shuffle": True}, {"fingerprint": None}, {"seed": -1},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_state_is_refused_and_changes_nothing(change, dataset):
    loader = dataset.loader(batch_size=4)
    next(iter(loader))
    before = loader.state_dict()
    with pytest.raises(InvalidRecipeError):
        loader.load_state_dict({**before, **change})
    with pytest.raises(InvalidRecipeError, match="not a loader state"):
        loader.load_state_dict({})
    assert loader.state_dict() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0; expected 1"),
        ({"num_workers": -1}, "num_workers is -1; expected 0"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of is 0; expected 1"),
        ({"world_size": 0}, "world_size is 0; expected 1"),
        ({"rank": 2, "world_size": 2}, "rank is 2; expected 0 to 1"),
        ({"rank": -1}, "rank is -1"),
        ({"seed": -1}, "seed is -1; expected 0"),
    ],
)
def test_loader_options_out_of_range_are_refused(options, message, dataset):
    with pytest.raises(InvalidRecipeError, match=message):
        dataset.loader(**options)
