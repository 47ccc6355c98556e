"""Two versions are compared in recipe and numbers, sample by sample."""

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.cli import main
from pipeline.materialize import materialize
from pipeline.readers import open_dataset

TEXTS = [f"Text number {number} of {'rather ' * (number % 4)}few." for number in range(6)]


@pytest.fixture
def corpus(tmp_path):
    """A function that makes the corpus `lines` have these texts, and returns its name."""

    def write(texts: list[str]) -> str:
        (tmp_path / "lines.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
        return f"text:{tmp_path / 'lines.txt'}"

    return write


@pytest.fixture
def store(tmp_path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def diff(store, capsys):
    """A function that runs `ola diff --json`."""

    def run(first: str, second: str, *options: object) -> dict:
        capsys.readouterr()
        assert main([*map(str, ("diff", first, second, "--store", store, "--json", *options))]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_a_version_differs_from_itself_in_nothing(tiny_bert, corpus, store, diff):
    (ref,) = materialize(str(tiny_bert), corpus(TEXTS), store=store, maps=(1, "rollout"))
    found = diff(ref, ref)
    assert [found[key] for key in ("recipe", "facts", "counts", "statistics", "objects")] == [{}, {}, {}, {}, []]
    assert [found[key] for key in ("only_in_first", "only_in_second", "other_tokens")] == [0, 0, 0]
    assert [(m["map"], m["samples"], m["equal_samples"], m["largest"]) for m in found["maps"]] == [
        (1, 6, 6, 0.0),
        ("rollout", 6, 6, 0.0),
    ]


def test_recipe_counts_and_samples_that_differ_are_all_told(tiny_bert, corpus, store, diff):
    materialize(str(tiny_bert), corpus(TEXTS), store=store, maps=(1, 2))
    materialize(str(tiny_bert), corpus(["New.", *TEXTS[1:]]), store=store, maps=(2, 3), store_dtype="float32")
    found = diff("tiny-bert/lines/all@v1", "tiny-bert/lines/all@v2")
    assert found["recipe"].keys() == {"corpus_sha256", "maps", "store_dtype"}
    assert found["recipe"]["maps"] == [[1, 2], [2, 3]]
    assert found["counts"].keys() == {"tokens", "words", "cells"}
    assert (found["only_in_first"], found["only_in_second"], found["other_tokens"]) == (1, 1, 0)
    first, second = (open_dataset(f"tiny-bert/lines/all@v{n}", store, maps=(2,)) for n in (1, 2))
    differences = [np.abs(first[i].maps.numpy() - second[i].maps.numpy()).ravel() for i in range(1, 6)]
    (order,) = found["maps"]
    assert (order["map"], order["samples"]) == (2, 5)
    assert order["equal_samples"] == sum(not d.any() for d in differences)
    assert order["largest"] == pytest.approx(max(d.max() for d in differences))
    assert order["mean"] == pytest.approx(np.concatenate(differences).mean(), rel=1e-5)
    assert 0 < order["largest"] < 2.0**-11


def test_maps_of_other_models_are_compared_where_tokens_are_equal(build_model, corpus, tmp_path, store, diff):
    # One tokenizer, with and without special tokens: no sample has the same tokens under both.
    build_model(tmp_path / "one", "bert")
    build_model(tmp_path / "two", "llama", num_key_value_heads=2)
    build_model(tmp_path / "bare", "llama", num_key_value_heads=2, add_special_tokens=False)
    refs = [
        materialize(str(tmp_path / name), corpus(TEXTS), store=store, maps=(1,))[0] for name in ("one", "two", "bare")
    ]
    found = diff(refs[0], refs[1])
    assert {"model", "model_revision"} <= found["recipe"].keys()
    assert found["facts"]["packing"] == ["full", "lower"]
    assert (found["other_tokens"], found["maps"][0]["samples"], found["maps"][0]["equal_samples"]) == (0, 6, 0)
    assert found["maps"][0]["largest"] > 0.01
    found = diff(refs[1], refs[2])
    assert (found["other_tokens"], found["maps"]) == (6, [])


def test_one_recipe_with_other_bytes_names_the_objects(tiny_bert, corpus, store, diff, tmp_path):
    (ref,) = materialize(str(tiny_bert), corpus(TEXTS), store=store, maps=(1,))
    other = tmp_path / "other"
    materialize(str(tiny_bert), corpus(TEXTS), store=other, maps=(1,), batch_tokens=11)
    found = diff(ref, ref, "--other-store", other)
    assert found["recipe"] == {}
    assert set(found["objects"]) <= {"order_1/c/0/0"}
    assert (found["maps"][0]["equal_samples"] == 6) == (found["objects"] == [])
    assert found["maps"][0]["largest"] <= 2.0**-11


def test_the_table_shows_what_the_json_says(tiny_bert, corpus, store, capsys):
    materialize(str(tiny_bert), corpus(TEXTS), store=store, maps=(1,))
    materialize(str(tiny_bert), corpus(TEXTS[:5]), store=store, maps=(1,))
    capsys.readouterr()
    assert main(["diff", "tiny-bert/lines/all@v1", "tiny-bert/lines/all@v2", "--store", str(store)]) == 0
    printed = capsys.readouterr().out
    assert "corpus_sha256" in printed
    assert "1 samples only in tiny-bert/lines/all@v1" in printed
    assert printed.splitlines()[-1].split() == ["1", "5", "5", "0.00e+00", "0.00e+00"]


def test_damage_and_unknown_refs_are_named(tiny_bert, corpus, store, capsys):
    (ref,) = materialize(str(tiny_bert), corpus(TEXTS), store=store, maps=(1,))
    assert main(["diff", ref, "tiny-bert/lines/all@v7", "--store", str(store)]) == 2
    (shard,) = store.glob("tiny-bert/lines/all/*/order_1/c/0/0")
    data = bytearray(shard.read_bytes())
    data[30] ^= 1
    shard.write_bytes(bytes(data))
    assert main(["diff", ref, ref, "--store", str(store)]) == 1
    assert str(shard) in capsys.readouterr().err
