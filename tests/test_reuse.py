"""What an earlier version has of the very same work is taken over, and a version comes out as if it were not."""

import json
import shutil
from pathlib import Path

import pytest

from pipeline.materialize import materialize
from pipeline.store.layout import open_store
from pipeline.store.verify import verify_version
from pipeline.store.versions import resolve_ref

TEXTS = [f"Text number {number} of {'rather ' * (number % 4)}few." for number in range(14)]


def write_lines(folder: Path, texts: list[str]) -> str:
    folder.mkdir(exist_ok=True)
    file = folder / "lines.txt"
    file.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return f"text:{file}"


of_both_packings = pytest.mark.parametrize("model", ["tiny_bert", "tiny_llama"], indirect=True)


@pytest.fixture
def model(request) -> Path:
    return request.getfixturevalue(getattr(request, "param", "tiny_llama"))


@pytest.fixture
def make(model, tmp_path):
    """A function that makes a version, here and in a store of its own, and returns both manifests and `run.json`."""
    store = tmp_path / "store"

    def run(texts: list[str], **settings) -> tuple[dict, dict, dict]:
        settings = {"partition_samples": 4, "maps": (1, 2), **settings}
        corpus = write_lines(tmp_path / "corpus", texts)
        (ref,) = materialize(str(model), corpus, store=store, **settings)
        shutil.rmtree(tmp_path / "alone", ignore_errors=True)
        materialize(str(model), corpus, store=tmp_path / "alone", **settings)
        opened = open_store(store)
        assert verify_version(opened, resolve_ref(opened, ref)) == []
        dataset, _, version = ref.partition("@")
        manifest = json.loads((store / dataset / f"{version}.json").read_bytes())
        alone = json.loads((tmp_path / "alone" / dataset / "v1.json").read_bytes())
        record = json.loads((store / dataset / manifest["folder"] / "run.json").read_bytes())
        return manifest, alone, record

    run.store, run.model = store, str(model)
    return run


def assert_same(manifest: dict, alone: dict) -> None:
    beside = {"number", "manifest_sha256"}
    assert {key: value for key, value in manifest.items() if key not in beside} == {
        key: value for key, value in alone.items() if key not in beside
    }


def name(manifest: dict, version: int) -> str:
    return f"{manifest['dataset']}@v{version}"


@of_both_packings
def test_a_grown_corpus_takes_over_the_partitions_that_were_full(make):
    make(TEXTS[:10])
    manifest, alone, record = make(TEXTS)
    assert_same(manifest, alone)
    assert manifest["counts"]["partitions"] == 4
    assert record["partitions_reused"] == {name(manifest, 1): 2}


@of_both_packings
def test_an_added_map_takes_over_the_others(make):
    make(TEXTS, maps=(1, "rollout"))
    manifest, alone, record = make(TEXTS, maps=(1, 2, 3, "rollout", "irnl", "alti"))
    assert_same(manifest, alone)
    assert record["partitions_reused"] == {name(manifest, 1): 4}


def test_fewer_maps_of_several_versions_need_no_model(make, monkeypatch):
    make(TEXTS, maps=(1,))
    make(TEXTS, maps=(2, 3))
    monkeypatch.setattr("pipeline.ola.load.LoadedModel.compute_maps", None)
    corpus = f"text:{make.store.parent / 'corpus' / 'lines.txt'}"
    (ref,) = materialize(make.model, corpus, store=make.store, maps=(1, 3), partition_samples=4)
    opened = open_store(make.store)
    version = resolve_ref(opened, ref)
    assert verify_version(opened, version) == []
    group = make.store / opened.group_key(version.manifest.dataset, version.manifest.recipe.fingerprint)
    dataset = str(version.manifest.dataset)
    reused = json.loads((group / "run.json").read_bytes())["partitions_reused"]
    assert reused == {f"{dataset}@v1": 4, f"{dataset}@v2": 4}


def test_texts_that_changed_or_moved_are_told_by_their_tokens(make):
    make(TEXTS)
    changed = [*TEXTS[:5], "Something else.", *TEXTS[6:]]
    manifest, alone, record = make(changed)
    assert_same(manifest, alone)
    assert record["partitions_reused"] == {name(manifest, 1): 3}
    manifest, alone, record = make([*TEXTS[8:12], *TEXTS[:4]])
    assert_same(manifest, alone)
    assert sum(record["partitions_reused"].values()) == 2


@pytest.mark.parametrize(
    "change", [{"partition_samples": 5}, {"max_length": 9}, {"store_dtype": "float32"}, {"dtype": "bfloat16"}], ids=str
)
def test_another_setting_takes_nothing_over(change, make):
    make(TEXTS)
    _, _, record = make(TEXTS, **change)
    assert record["partitions_reused"] == {}


@pytest.mark.parametrize(
    "change",
    [{"device": "another"}, {"threads": 99}, {"batch_tokens": 7}, {"batch_halvings": 1}, {"versions": {}}],
    ids=str,
)
def test_a_version_of_another_environment_serves_nothing(change, make):
    manifest, _, record = make(TEXTS[:8])
    path = make.store / manifest["dataset"] / manifest["folder"] / "run.json"
    path.write_text(json.dumps({**record, **change}))
    manifest, alone, record = make(TEXTS)
    assert_same(manifest, alone)
    assert record["partitions_reused"] == {}


def test_what_is_damaged_is_made_anew(make):
    manifest, _, _ = make(TEXTS[:8])
    path = make.store / manifest["dataset"] / manifest["folder"] / "order_1" / "c" / "1" / "0"
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(bytes(data))
    manifest, alone, record = make(TEXTS)
    assert_same(manifest, alone)
    assert record["partitions_reused"] == {name(manifest, 1): 2}
    path.unlink()
    manifest, alone, record = make(TEXTS, maps=(1, 3))
    assert_same(manifest, alone)
    assert record["partitions_reused"] == {name(manifest, 2): 4}


def test_a_sample_table_that_is_missing_is_written_again(model, tmp_path):
    corpus = write_lines(tmp_path / "corpus", TEXTS)
    store = tmp_path / "store"
    (ref,) = materialize(str(model), corpus, store=store, maps=(1,))
    (table,) = store.glob("_samples/**/*.parquet")
    before = table.read_bytes()
    table.unlink()
    assert materialize(str(model), corpus, store=store, maps=(1,)) == [ref]
    assert table.read_bytes() == before
