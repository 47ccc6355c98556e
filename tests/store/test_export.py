"""An exported version is a store of its own, whole, and there at once or not at all."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.materialize import materialize
from pipeline.readers import list_datasets
from pipeline.store.export import export_version
from pipeline.store.layout import open_store
from pipeline.store.verify import verify_version
from pipeline.store.versions import resolve_ref, tag_version
from tests.store.processes import kill_at_change

DATASET = "tiny-bert/lines/all"
REF = f"{DATASET}@v2"
TEXTS = [f"Text number {number} of {'rather ' * (number % 4)}few." for number in range(6)]


@pytest.fixture(scope="module")
def whole(tiny_bert, tmp_path_factory) -> Path:
    """A store with three versions; the second is tagged."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "lines.txt").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    for maps in ((1,), (1, 2), (2,)):
        materialize(
            str(tiny_bert), f"text:{folder / 'lines.txt'}", store=folder / "store", maps=maps, partition_samples=4
        )
    store = open_store(folder / "store")
    tag_version(store, resolve_ref(store, REF), "paper")
    return folder / "store"


def read_tree(store: Path) -> dict[str, bytes]:
    return {str(path.relative_to(store)): path.read_bytes() for path in store.rglob("*") if path.is_file()}


def export(store: Path, folder: Path, ref: str = REF) -> int:
    return main(["export", ref, str(folder), "--store", str(store)])


def test_an_exported_version_is_a_store_with_the_same_ref_tags_and_bytes(whole, tmp_path, capsys):
    before = read_tree(whole)
    assert export(whole, tmp_path / "paper") == 0
    assert "licences: model" in capsys.readouterr().out
    assert read_tree(whole) == before
    exported = read_tree(tmp_path / "paper")
    readme = exported.pop("README.md").decode()
    assert {name: before[name] for name in exported} == exported
    folder = resolve_ref(open_store(whole), REF).manifest.folder
    assert {name for name in before if f"/{folder}/" in name} <= exported.keys()
    assert [(entry.ref, entry.tags) for entry in list_datasets(tmp_path / "paper")] == [(REF, ("paper",))]
    store = open_store(tmp_path / "paper")
    assert verify_version(store, resolve_ref(store, f"{DATASET}@paper")) == []
    assert [path.name for path in tmp_path.iterdir()] == ["paper"]
    (code,) = [part.removeprefix("python\n") for part in readme.split("```") if part.startswith("python\n")]
    exec(code.replace('store="."', f"store={str(tmp_path / 'paper')!r}"), {})
    assert capsys.readouterr().out.endswith("few.\n")


def test_what_a_licence_says_is_shown_as_text(whole, tmp_path):
    store = open_store(whole)
    version = resolve_ref(store, REF)
    hostile = replace(version, manifest=replace(version.manifest, corpus_licence="<script>\n# `x` [a](b)"))
    export_version(store, hostile, tmp_path / "paper")
    readme = (tmp_path / "paper" / "README.md").read_text()
    assert r"corpus: \<script\> \# \`x\` \[a\](b)" in readme


def test_a_folder_that_has_something_is_left_alone(whole, tmp_path, capsys):
    (tmp_path / "paper").mkdir()
    (tmp_path / "paper" / "notes.txt").write_text("mine")
    assert export(whole, tmp_path / "paper") == 2
    assert "is there already" in capsys.readouterr().err
    assert export(whole, tmp_path / "no" / "paper") == 2
    assert read_tree(tmp_path) == {"paper/notes.txt": b"mine"}
    (tmp_path / "empty").mkdir()
    assert export(whole, tmp_path / "empty") == 0


@pytest.mark.parametrize("damage", ["flipped", "deleted"])
def test_a_damaged_version_is_not_exported(damage, whole, tmp_path, capsys):
    store = Path(shutil.copytree(whole, tmp_path / "store"))
    folder = resolve_ref(open_store(store), REF).manifest.folder
    shard = store / DATASET / folder / "order_2" / "c" / "1" / "0"
    if damage == "deleted":
        shard.unlink()
    else:
        data = bytearray(shard.read_bytes())
        data[30] ^= 1
        shard.write_bytes(bytes(data))
    assert export(store, tmp_path / "paper") == 1
    assert str(shard) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_an_export_killed_at_any_step_is_there_whole_or_not_at_all(whole, tmp_path):
    expected = tmp_path / "expected"
    store = open_store(whole)
    export_version(store, resolve_ref(store, REF), expected)
    folder = tmp_path / "paper"
    for step in range(0, 400, 37):
        is_killed = kill_at_change(["export", REF, str(folder), "--store", str(whole)], step)
        assert not folder.exists() or read_tree(folder) == read_tree(expected)
        if not is_killed:
            break
    assert step > 0
    if not folder.exists():
        assert export(whole, folder) == 0
    assert read_tree(folder) == read_tree(expected)
    assert {path.name for path in tmp_path.iterdir()} == {"paper", "expected"}
