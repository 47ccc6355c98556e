"""Several models' datasets over the texts they share: the same text at every place, in every way of reading."""

import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from pipeline.readers import join_datasets, open_dataset
from storage_schema.errors import InvalidRecipeError

TEXTS = ["Yes.", "A text of some words.", "Yes.", "Another one, which is longer.", "One more.", "The last of all."]
OTHERS = ["One more.", "A text that the first has not.", "Yes.", "A text of some words.", "The last of all.", "Yes."]
COMMON = ["Yes.", "A text of some words.", "Yes.", "One more.", "The last of all."]


@pytest.fixture(scope="module")
def datasets(tiny_bert, tiny_llama, materialize_text):
    first = materialize_text(tiny_bert, TEXTS, maps=(1, 2), partition_samples=2)
    second = materialize_text(tiny_llama, OTHERS, maps=(1,), partition_samples=3)
    return [open_dataset(ref, store) for store, ref in (first, second)]


@pytest.fixture(scope="module")
def joined(datasets):
    return join_datasets(datasets)


def test_the_common_samples_come_in_the_order_of_the_first(joined, datasets):
    assert len(joined) == len(COMMON)
    assert joined.num_left_out == (1, 1)
    assert "5 samples in common, left out (1, 1)" in repr(joined)
    items = [joined[index] for index in range(len(joined))]
    assert [[item.sample.text for item in pair] for pair in items] == [[text] * 2 for text in COMMON]
    assert all(len({item.sample_id for item in pair}) == 1 for pair in items)
    assert items[2][0].sample_id == f"{items[0][0].sample_id}-1"
    for dataset, own in zip(datasets, zip(*items, strict=True), strict=True):
        places = [dataset.sample_ids.index(item.sample_id) for item in own]
        assert all(torch.equal(item.maps, dataset[place].maps) for item, place in zip(own, places, strict=True))


def test_indexes_count_from_either_end_and_stop_there(joined):
    assert joined[-1][1].sample_id == joined[4][1].sample_id
    for index in (5, -6):
        with pytest.raises(IndexError, match=f"have 5 samples in common, asked for {index}"):
            _ = joined[index]


def test_a_batch_has_a_part_of_each_dataset_padded_to_its_own_length(joined, datasets):
    indices = [3, 1, 4]
    parts = joined.read_batch(indices, pad_to_multiple_of=4)
    collated = joined.collate([joined[index] for index in indices], pad_to_multiple_of=4)
    assert len(parts) == 2
    for part, other, dataset in zip(parts, collated, datasets, strict=True):
        assert part.sample_ids == other.sample_ids == [joined[index][0].sample_id for index in indices]
        assert part.maps.shape[1] == len(dataset.maps)
        assert torch.equal(part.maps, other.maps)
        assert torch.equal(part.input_ids, other.input_ids)
        assert part.samples == other.samples


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_shuffles_shards_and_resumes_a_join(num_workers, joined):
    all_ids = sorted(joined[index][0].sample_id for index in range(len(joined)))
    loader = joined.loader(batch_size=2, shuffle=True, seed=3, num_workers=num_workers)
    epochs = []
    for _ in range(2):
        batches = [[part.sample_ids for part in batch] for batch in loader]
        assert all(first == second for first, second in batches)
        epochs.append([sample_id for first, _ in batches for sample_id in first])
        assert sorted(epochs[-1]) == all_ids
    again = joined.loader(batch_size=2, shuffle=True, seed=3)
    next(iter(again))
    resumed = joined.loader(batch_size=1, shuffle=True, num_workers=num_workers)
    resumed.load_state_dict(again.state_dict())
    assert [batch[0].sample_ids[0] for batch in resumed] == epochs[0][2:]
    ranks = [joined.loader(batch_size=1, rank=rank, world_size=2) for rank in range(2)]
    assert sorted(batch[1].sample_ids[0] for rank in ranks for batch in rank) == all_ids


def test_a_plain_torch_loader_reads_a_join(joined):
    batches = list(DataLoader(joined, batch_size=2, collate_fn=joined.collate))
    assert [len(first) for first, _ in batches] == [2, 2, 1]
    assert all(first.sample_ids == second.sample_ids for first, second in batches)


def test_a_join_pickles(joined):
    again = pickle.loads(pickle.dumps(joined))
    assert (len(again), again.fingerprint) == (len(joined), joined.fingerprint)
    assert torch.equal(again[3][1].maps, joined[3][1].maps)


def test_a_state_belongs_to_the_very_join(joined, datasets):
    state = joined.loader().state_dict()
    for other in (datasets[0], datasets[1], join_datasets(datasets[::-1])):
        with pytest.raises(InvalidRecipeError, match=state["fingerprint"][:12]):
            other.loader().load_state_dict(state)
        with pytest.raises(InvalidRecipeError, match=other.fingerprint[:12]):
            joined.loader().load_state_dict(other.loader().state_dict())


def test_joins_of_nothing_are_refused_by_name(datasets, tiny_bert, materialize_text):
    with pytest.raises(InvalidRecipeError, match="two datasets or more, got 1"):
        join_datasets(datasets[:1])
    with pytest.raises(InvalidRecipeError, match=f"{datasets[0].ref} .*is joined with itself"):
        join_datasets([*datasets, datasets[0]])
    store, ref = materialize_text(tiny_bert, ["Nothing in common."])
    with pytest.raises(InvalidRecipeError, match=r"no sample is in all of .*\(6 samples, sentence, original\).*\(1 "):
        join_datasets([datasets[0], open_dataset(ref, store)])


def test_other_maps_of_a_version_may_be_joined(tiny_bert, materialize_text):
    store, ref = materialize_text(tiny_bert, TEXTS, maps=(1, 2))
    both = join_datasets([open_dataset(ref, store, maps=(name,)) for name in (1, 2)])
    assert len(both) == len(TEXTS)
    assert torch.equal(torch.cat([item.maps for item in both[1]]), open_dataset(ref, store)[1].maps)
