"""The whole pipeline on real weights and real text, and on every kind of input."""

import json

import numpy as np
import pytest

from pipeline.cli import main
from pipeline.materialize import materialize
from pipeline.ola.identity import identify_model
from pipeline.readers import list_datasets, open_dataset
from pipeline.store.layout import open_store
from pipeline.store.verify import verify_version
from pipeline.store.versions import resolve_ref
from storage_schema.errors import UnknownModelError

REAL_MODELS = ["minilm-l6", "smollm2-135m", pytest.param("gemma3-270m", marks=pytest.mark.slow)]


@pytest.fixture(scope="session")
def real_model():
    """A function from a registry name to itself, once its weights are here; skips by name where they cannot be had."""

    def find(name: str) -> str:
        try:
            identify_model(name)
        except UnknownModelError as error:
            pytest.skip(f"the weights of {name} cannot be fetched: {error}")
        return name

    return find


@pytest.mark.parametrize("name", REAL_MODELS)
def test_stored_maps_are_the_golden_ones(name, real_model, golden_folder, golden_sentences, materialize_text):
    golden = np.load(golden_folder / f"{name}.npz")
    store, exact = materialize_text(real_model(name), golden_sentences, store_dtype="float32")
    _, rounded = materialize_text(name, golden_sentences, store=store)
    assert (exact.rpartition("@")[2], rounded.rpartition("@")[2]) == ("v1", "v2")
    for ref in (exact, rounded):
        dataset = open_dataset(ref, store)
        for index in range(len(golden_sentences)):
            item = dataset[index]
            assert item.input_ids.tolist() == golden[f"ids_{index}"].tolist()
            for order in (1, 2, 3):
                expected = golden[f"order{order}_{index}"]
                allowed = 1e-5 + (np.maximum(2.0**-11 * expected, 2.0**-25) if ref == rounded else 0)
                assert (np.abs(item.maps[order - 1].numpy() - expected) <= allowed).all()


@pytest.mark.parametrize("name", REAL_MODELS)
@pytest.mark.parametrize(
    ("corpus", "split", "unit", "annotation"),
    [
        ("ud-ewt", "dev", "sentence", "heads"),
        ("conll2000", "test", "sentence", "chunks"),
        ("semeval2010-task8", "test", "sentence", "relations"),
        ("wnut17", "test", "sentence", "entities"),
        ("ud-ewt", "dev", "words:50", "upos"),
    ],
)
def test_real_corpora_run_through_real_models(
    name, corpus, split, unit, annotation, real_model, corpus_folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("OLA_DATA", str(corpus_folder(corpus).parent))
    (ref,) = materialize(
        real_model(name), corpus, store=tmp_path, split=split, text_unit=unit, limit=6, maps=(1, 2, "rollout")
    )
    assert verify_version(open_store(tmp_path), resolve_ref(open_store(tmp_path), ref)) == []
    dataset = open_dataset(ref, tmp_path)
    assert len(dataset) == 6
    for item in dataset:
        sample = item.sample
        assert item.maps.shape == (3, len(item.input_ids), len(item.input_ids))
        assert getattr(sample, annotation) is not None
        for word, (start, stop) in zip(item.word_ids.tolist(), item.offsets.tolist(), strict=True):
            if word >= 0:
                assert set(sample.text[start:stop]) & set(sample.text[slice(*sample.word_spans[word])])
        if unit == "words:50":
            assert len(sample.words) == 50


def test_the_sample_corpus_makes_one_dataset_a_split(real_model, tmp_path):
    refs = materialize(real_model("minilm-l6"), "sample", store=tmp_path)
    assert refs == [f"minilm-l6/sample/{split}@v1" for split in ("train", "dev", "test")]
    sizes = [len(open_dataset(ref, tmp_path)) for ref in refs]
    assert sum(sizes) > 100
    assert sizes[0] > sizes[1] > 10


def test_files_of_the_user_become_datasets(tiny_bert, tmp_path):
    (tmp_path / "mine.jsonl").write_text(
        json.dumps(
            {"text": "Ada wrote it.", "words": ["Ada", "wrote", "it", "."], "entities": ["B-PER", "O", "O", "O"]}
        )
        + "\n"
    )
    (tmp_path / "tree.conllu").write_text(
        "# text = Don't go.\n1-2\tDon't\t_\t_\t_\t_\t_\t_\t_\t_\n1\tDo\tdo\tAUX\tVB\t_\t3\taux\t_\t_\n"
        "2\tn't\tnot\tPART\tRB\t_\t3\tadvmod\t_\t_\n3\tgo\tgo\tVERB\tVB\t_\t0\troot\t_\t_\n4\t.\t.\tPUNCT\t.\t_\t3\tpunct\t_\t_\n\n"
    )
    store = tmp_path / "store"
    (jsonl,) = materialize(str(tiny_bert), f"jsonl:{tmp_path / 'mine.jsonl'}", store=store)
    (conllu,) = materialize(str(tiny_bert), f"conllu:{tmp_path / 'tree.conllu'}", store=store)
    assert (jsonl, conllu) == ("tiny-bert/mine/all@v1", "tiny-bert/tree/all@v1")
    assert open_dataset(jsonl, store)[0].sample.entities == ("B-PER", "O", "O", "O")
    item = open_dataset(conllu, store)[0]
    assert item.sample.heads == (3, 3, 0, 3)
    assert {0, 1, 2, 3} == set(item.word_ids.tolist()) - {-1}


def test_settings_that_change_what_is_in_a_dataset_stand_in_its_name(tiny_bert, materialize_text):
    texts = ["One two three four five six seven."] * 4
    store, plain = materialize_text(tiny_bert, texts)
    refs = {
        materialize_text(tiny_bert, texts, store=store, **settings)[1]
        for settings in ({"limit": 2}, {"text_unit": "words:3"}, {"text_form": "words"}, {"text_unit": "document"})
    }
    assert refs == {
        "tiny-bert/lines/all+first2@v1",
        "tiny-bert/lines+words3/all@v1",
        "tiny-bert/lines+joined/all@v1",
        "tiny-bert/lines+document/all@v1",
    }
    assert open_dataset("tiny-bert/lines/all", store).ref == plain
    assert len(list_datasets(store)) == 5


def test_truncation_is_counted_and_keeps_special_tokens(tiny_bert, materialize_text):
    store, ref = materialize_text(
        tiny_bert, ["A short one.", "A much longer text than sixteen tokens allow."], max_length=16
    )
    dataset = open_dataset(ref, store)
    assert dataset.manifest.counts.truncated_samples == 1
    assert [len(item.input_ids) for item in dataset] == [13, 16]
    assert dataset[1].input_ids[-1] == 2


def test_no_batch_size_changes_a_map(tiny_llama, materialize_text):
    texts = [f"{'word ' * (number % 13)}end {number}" for number in range(30)]
    store, one = materialize_text(tiny_llama, texts, batch_tokens=1, store_dtype="float32")
    other_store, many = materialize_text(tiny_llama, texts, batch_tokens=4096, store_dtype="float32")
    for alone, together in zip(open_dataset(one, store), open_dataset(many, other_store), strict=True):
        assert (alone.maps - together.maps).abs().max() <= 1e-5
        assert not together.maps.triu(1).any()


def test_maps_of_a_text_do_not_depend_on_longer_ones_beside_it_under_longrope(build_model, tmp_path, capsys):
    """transformers scales all positions of a batch by the factors of its longest text."""
    rope = {
        "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
        "original_max_position_embeddings": 16, "rope_theta": 1e4,
    }  # fmt: skip
    model = build_model(
        tmp_path / "tiny-phi3", "phi3", max_position_embeddings=128, original_max_position_embeddings=16,
        rope_parameters=rope, num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    file = tmp_path / "lines.txt"
    file.write_text("\n".join(["Yes.", "The river did flood the budget of the committee again.", "No!", "Tom."]) + "\n")
    (ref,) = materialize(str(model), f"text:{file}", store=tmp_path / "store", batch_tokens=100_000)
    arguments = ["verify", ref, "--recompute", "4", "--model", str(model), "--store", str(tmp_path / "store")]
    assert main(arguments) == 0, capsys.readouterr().err
