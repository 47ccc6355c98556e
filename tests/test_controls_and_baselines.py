"""Controls and baselines through the whole pipeline: named apart, stored, verified, recomputed."""

import json

import numpy as np
import pytest

from pipeline.cli import main
from pipeline.materialize import materialize
from pipeline.readers import list_datasets, open_dataset
from pipeline.store.layout import open_store
from pipeline.store.verify import verify_version
from pipeline.store.versions import resolve_ref
from storage_schema.errors import UnsupportedModelError
from storage_schema.recipe import VARIANTS

TEXTS = ["The river did not flood.", "Nobody knew why, but everyone had an opinion.", "Yes."]


def run(*arguments):
    return main([str(argument) for argument in arguments])


@pytest.fixture
def lines(tmp_path):
    file = tmp_path / "lines.txt"
    file.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    return f"text:{file}"


def test_controls_are_datasets_of_their_own_and_leave_the_genuine_one_alone(tiny_llama, lines, tmp_path):
    store = tmp_path / "store"
    (genuine,) = materialize(str(tiny_llama), lines, store=store)
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    # Seed 0 would draw the very weights of this random model.
    controls = [
        materialize(str(tiny_llama), lines, store=store, variant=variant, seed=seed)[0]
        for variant in VARIANTS
        for seed in (3, 7)
    ]
    expected = [f"tiny-llama+{variant}.{seed}/lines/all@v1" for variant in VARIANTS for seed in (3, 7)]
    assert controls == expected
    assert {path: path.read_bytes() for path in before} == before
    assert open_dataset("tiny-llama/lines/all", store).ref == genuine
    assert len(list_datasets(store)) == 7
    maps = open_dataset(genuine, store)[1].maps
    for ref in controls:
        assert not np.array_equal(open_dataset(ref, store)[1].maps, maps), ref


def test_a_control_is_made_once_and_recomputed_from_its_seed(tiny_llama, lines, tmp_path, capsys):
    store = tmp_path / "store"
    settings = ("materialize", "--model", tiny_llama, "--corpus", lines, "--store", store, "--variant", "half-random")
    assert run(*settings) == 0
    assert run(*settings, "--seed", 0) == 0
    assert "up to date" in capsys.readouterr().out
    ref = "tiny-llama+half-random.0/lines/all"
    assert run("verify", ref, "--recompute", 3, "--model", tiny_llama, "--store", store) == 0
    assert "3 samples recomputed" in capsys.readouterr().out
    assert run("show", ref, "--json", "--store", store) == 0
    recipe = json.loads(capsys.readouterr().out)["recipe"]
    assert (recipe["variant"], recipe["seed"]) == ("half-random", 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--seed", 1), "variant is None with seed 1"),
        (("--variant", "random", "--seed", -1), "the seed of variant random is -1"),
        (("--variant", "random", "--seed", 2**32), "the seed of variant random is 4294967296"),
    ],
)
def test_a_seed_without_its_variant_or_out_of_range_is_refused(tiny_bert, lines, tmp_path, capsys, options, message):
    store = tmp_path / "store"
    assert run("materialize", "--model", tiny_bert, "--corpus", lines, "--store", store, *options) == 2
    assert message in capsys.readouterr().err
    assert not store.exists()


@pytest.mark.parametrize("model", ["tiny_bert", "tiny_llama"])
def test_baselines_are_stored_beside_orders_and_recomputed(request, model, lines, tmp_path, capsys):
    folder, store = request.getfixturevalue(model), tmp_path / "store"
    (ref,) = materialize(str(folder), lines, store=store, maps=("rollout", "irnl", 2, "alti", 1))
    dataset = open_dataset(ref, store)
    assert dataset.maps == (1, 2, "alti", "irnl", "rollout")
    for item in dataset:
        np.testing.assert_allclose(item.maps.sum(-1), 1, atol=2.0**-11)
    assert verify_version(open_store(store), resolve_ref(open_store(store), ref)) == []
    assert run("verify", ref, "--recompute", 3, "--model", folder, "--store", store) == 0
    assert open_dataset(ref, store, maps=("irnl",))[0].maps.shape[0] == 1


def test_baselines_that_a_model_cannot_give_are_refused_before_anything_is_written(build_model, lines, tmp_path):
    folder, store = build_model(tmp_path / "tiny-bloom", "bloom"), tmp_path / "store"
    with pytest.raises(UnsupportedModelError, match=r"tiny-bloom \(bloom\) cannot be taken apart for irnl and alti"):
        materialize(str(folder), lines, store=store, maps=(1, "irnl"))
    assert not store.exists()
    assert materialize(str(folder), lines, store=store, maps=(1, "rollout")) == ["tiny-bloom/lines/all@v1"]
    (record,) = store.glob("tiny-bloom/lines/all/*/run.json")
    assert json.loads(record.read_text())["attention"] == "eager"


@pytest.mark.parametrize(
    ("architecture", "path", "baselines"), [("llama", "fused", "alti,irnl,rollout"), ("falcon", "eager", "rollout")]
)
def test_ola_models_says_how_a_model_is_read(build_model, tmp_path, capsys, architecture, path, baselines):
    folder = build_model(tmp_path / "tiny", architecture)
    assert run("models", folder, "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["architecture"], row["path"], row["baselines"]) == (architecture, path, baselines)
    assert (row["layers"], row["packing"]) == (3, "lower")
