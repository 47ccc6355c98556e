"""A dataset gives each sample exactly as it was stored, alone or padded into a batch."""

import pickle
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch

from pipeline.readers import list_datasets, open_dataset
from storage_schema.errors import DatasetNotFoundError, InvalidNameError, InvalidRecipeError
from storage_schema.samples import Sample

TEXTS = [
    "Yes.",
    "A text of some words.",
    "Don't — it’s naïve… 🙂 indeed.",
    "Yes.",
    "The last text of all is the longest one.",
]
MAPS = (1, 2, 3, "rollout")


@pytest.fixture(scope="module", params=["tiny_bert", "tiny_llama"])
def stored(request, materialize_text):
    """(store, ref) of float32 maps."""
    return materialize_text(
        request.getfixturevalue(request.param), TEXTS, maps=MAPS, store_dtype="float32", partition_samples=2
    )


@pytest.fixture(scope="module")
def dataset(stored):
    return open_dataset(stored[1], stored[0])


def test_a_dataset_says_what_it_is(stored, dataset):
    store, ref = stored
    assert len(dataset) == len(TEXTS)
    assert dataset.maps == MAPS
    assert dataset.ref == ref
    assert dataset.recipe == dataset.manifest.recipe
    assert (dataset.recipe.maps, dataset.recipe.store_dtype) == (MAPS, "float32")
    (entry,) = list_datasets(store)
    assert (entry.ref, entry.samples, entry.bytes) == (ref, len(TEXTS), dataset.manifest.num_bytes)
    assert entry.tokens == sum(len(item.input_ids) for item in dataset)


def test_an_item_has_every_field_with_its_shape_and_type(dataset):
    for item, text in zip(dataset, TEXTS, strict=True):
        length = len(item.input_ids)
        assert (item.input_ids.shape, item.word_ids.shape, item.offsets.shape) == ((length,), (length,), (length, 2))
        assert {item.input_ids.dtype, item.word_ids.dtype, item.offsets.dtype} == {torch.int64}
        assert (item.maps.shape, item.maps.dtype) == ((len(MAPS), length, length), torch.float32)
        assert torch.allclose(item.maps.sum(-1), torch.ones(len(MAPS), length), atol=1e-5)
        assert isinstance(item.sample, Sample)
        assert (item.sample.text, item.sample.sample_id) == (text, item.sample_id)
        assert item.sample.upos is None
        assert item.sample.label is None


def test_tokens_point_to_their_words_and_characters(dataset):
    for item in dataset:
        spans = item.sample.word_spans
        for word, (start, stop) in zip(item.word_ids.tolist(), item.offsets.tolist(), strict=True):
            if word < 0:
                assert not item.sample.text[start:stop].strip()
            else:
                assert max(start, spans[word][0]) < min(stop, spans[word][1])
        assert set(item.word_ids.tolist()) - {-1} == set(range(len(item.sample.words)))


def test_a_repeated_text_has_an_id_of_its_own_and_the_same_maps(dataset):
    first, again = dataset[0], dataset[3]
    assert again.sample_id == f"{first.sample_id}-1"
    assert torch.allclose(again.maps, first.maps, atol=1e-5)


@pytest.mark.parametrize("maps", [(3, 1), ("rollout", 2), (2,), [1, 2, 3]])
def test_maps_come_in_the_order_they_are_asked_for(maps, stored, dataset):
    chosen = open_dataset(stored[1], stored[0], maps=maps)
    assert chosen.maps == tuple(maps)
    for item, whole in zip(chosen, dataset, strict=True):
        assert torch.equal(item.maps, whole.maps[[MAPS.index(name) for name in maps]])


@pytest.mark.parametrize("maps", [(4,), (1, "irnl"), (0,), (), ("1",)])
def test_maps_that_are_not_stored_are_refused_with_those_that_are(maps, stored):
    with pytest.raises(InvalidRecipeError, match=r"stores the maps \(1, 2, 3, 'rollout'\); asked for"):
        open_dataset(stored[1], stored[0], maps=maps)


def test_float16_differs_by_its_rounding_alone(stored, tiny_bert, tiny_llama, materialize_text, dataset):
    model = tiny_bert if dataset.recipe.model == "tiny-bert" else tiny_llama
    store, ref = materialize_text(model, TEXTS, maps=MAPS, partition_samples=2)
    for half, single in zip(open_dataset(ref, store), dataset, strict=True):
        assert half.maps.dtype == torch.float32
        assert np.array_equal(half.maps.numpy(), single.maps.numpy().astype(np.float16).astype(np.float32))


def test_indexes_count_from_either_end_and_stop_there(dataset):
    for index in range(len(dataset)):
        assert dataset[index - len(dataset)].sample_id == dataset[index].sample_id
    for index in (len(dataset), -len(dataset) - 1, 10**9):
        with pytest.raises(IndexError, match=f"has {len(TEXTS)} samples, asked for {index}"):
            _ = dataset[index]
    assert [item.sample_id for item in dataset] == [dataset[index].sample_id for index in range(len(dataset))]


def test_changing_an_item_changes_nothing_that_is_read_later(dataset):
    item = dataset[1]
    kept = item.maps.clone()
    item.maps.zero_()
    item.input_ids.zero_()
    assert torch.equal(dataset[1].maps, kept)
    assert dataset[1].input_ids.any()


@pytest.mark.parametrize("multiple", [1, 7, 8, 64])
def test_a_batch_is_padded_on_the_right(multiple, dataset):
    items = [dataset[index] for index in (2, 0, 4)]
    batch = dataset.collate(items, pad_to_multiple_of=multiple)
    length = -(-max(len(item.input_ids) for item in items) // multiple) * multiple
    assert batch.maps.shape == (3, len(MAPS), length, length)
    assert (batch.maps.dtype, batch.input_ids.dtype) == (torch.float32, torch.int64)
    assert len(batch) == 3
    for row, item in enumerate(items):
        stop = len(item.input_ids)
        assert batch.attention_mask[row].tolist() == [1] * stop + [0] * (length - stop)
        assert torch.equal(batch.maps[row, :, :stop, :stop], item.maps)
        assert not batch.maps[row, :, stop:].any()
        assert not batch.maps[row, :, :, stop:].any()
        for name, padding in (("input_ids", dataset.manifest.pad_token_id), ("word_ids", -1), ("offsets", 0)):
            values = getattr(batch, name)[row]
            assert torch.equal(values[:stop], getattr(item, name))
            assert (values[stop:] == padding).all()


def test_a_batch_keeps_ids_and_samples_in_order(dataset):
    items = [dataset[index] for index in (4, 1, 1)]
    batch = dataset.collate(items)
    assert batch.sample_ids == [item.sample_id for item in items]
    assert batch.samples == [item.sample for item in items]


def test_the_pad_id_is_the_tokenizers(build_model, materialize_text, tmp_path):
    from transformers import AutoTokenizer

    model = build_model(tmp_path / "padded", "bert")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = "</s>"
    tokenizer.save_pretrained(model)
    store, ref = materialize_text(model, TEXTS)
    dataset = open_dataset(ref, store)
    assert dataset.manifest.pad_token_id == 2
    batch = dataset.collate([dataset[0], dataset[4]])
    assert (batch.input_ids[0][batch.attention_mask[0] == 0] == 2).all()
    assert batch.attention_mask[1].all()


def test_a_batch_moves_as_one(dataset):
    batch = dataset.collate([dataset[0], dataset[1]]).to("meta")
    moved = [batch.maps, batch.attention_mask, batch.input_ids, batch.word_ids, batch.offsets]
    assert {tensor.device.type for tensor in moved} == {"meta"}
    assert len(batch.samples) == 2


def test_a_dataset_and_its_items_pickle(dataset):
    _ = dataset[0]
    again = pickle.loads(pickle.dumps(dataset))
    assert (again.ref, again.maps, len(again)) == (dataset.ref, dataset.maps, len(dataset))
    assert torch.equal(again[2].maps, dataset[2].maps)
    assert pickle.loads(pickle.dumps(dataset[2])).sample == dataset[2].sample


def test_a_pickled_dataset_holds_no_maps(dataset):
    before = len(pickle.dumps(dataset))
    _ = [item.maps for item in dataset]
    assert len(pickle.dumps(dataset)) == before


def test_a_small_batch_carries_its_own_rows_alone_between_processes(tiny_bert, materialize_text):
    store, ref = materialize_text(tiny_bert, [f"Text {number} of a corpus of many texts." for number in range(100)])
    dataset = open_dataset(ref, store)
    one, two = (dataset.collate([dataset[index] for index in range(size)]) for size in (1, 2))
    assert len(pickle.dumps(one.rows)) <= len(pickle.dumps(two.rows))


def test_a_tiny_cache_reads_the_same_and_stays_tiny(tiny_bert, materialize_text):
    texts = [f"Text {number} of a corpus." for number in range(20)]
    store, ref = materialize_text(tiny_bert, texts, maps=(1,), partition_samples=1)
    expected = [item.maps.clone() for item in open_dataset(ref, store)]

    def measure(cache_bytes: int) -> int:
        dataset = open_dataset(ref, store, cache_bytes=cache_bytes)
        tracemalloc.start()
        assert all(torch.equal(dataset[index].maps, expected[index]) for index in range(20))
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return kept

    chunk = 64 * 1024 * 2
    assert measure(cache_bytes=1) < 4 * chunk
    assert measure(cache_bytes=8 * chunk) < 12 * chunk
    assert measure(cache_bytes=100 * chunk) > 16 * chunk


@pytest.mark.parametrize(
    ("ref", "error"),
    [("no ref", InvalidNameError), ("../../etc@v1", InvalidNameError), ("a/b/c", DatasetNotFoundError)],
)
def test_refs_of_nothing_are_refused(ref, error, stored):
    with pytest.raises(error):
        open_dataset(ref, stored[0])


def test_the_store_is_the_one_given_else_the_environments(stored, monkeypatch, tmp_path):
    store, ref = stored
    monkeypatch.setenv("OLA_STORE", str(store))
    assert open_dataset(ref).ref == ref
    monkeypatch.delenv("OLA_STORE")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "store").symlink_to(store)
    monkeypatch.chdir(tmp_path)
    assert open_dataset(ref).ref == ref
    assert [entry.ref for entry in list_datasets()] == [ref]


READ = "from pipeline.readers import open_dataset; print(len(open_dataset({ref!r}, {store!r})))"


@pytest.mark.parametrize(("has_init", "options"), [(False, []), (True, ["-P"])])
def test_a_foreign_folder_with_a_pipeline_of_its_own_reads(has_init, options, tiny_bert, materialize_text, tmp_path):
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "mine.py").write_text("raise SystemExit('not this one')\n")
    if has_init:
        (tmp_path / "pipeline" / "__init__.py").write_text("raise SystemExit('not this one')\n")
    store, ref = materialize_text(tiny_bert, TEXTS)
    code = READ.format(ref=ref, store=str(store))
    done = subprocess.run(
        [sys.executable, *options, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, str(len(TEXTS))), done.stderr
