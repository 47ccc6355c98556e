"""Whatever of a version is damaged is made again with the recorded bytes, or refused with the reason."""

import json
import shutil
from hashlib import sha256
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.materialize import materialize
from pipeline.readers import open_dataset
from pipeline.store.layout import open_store
from pipeline.store.verify import verify_version
from pipeline.store.versions import resolve_ref
from storage_schema.errors import CorruptedObjectError, DamagedError, MissingObjectError
from storage_schema.manifest import Manifest, compute_manifest_digest
from tests.store.processes import kill_at_change

DATASET = "tiny-llama/lines/all"
REF = f"{DATASET}@v1"
TEXTS = [f"Text number {number} of {'rather ' * (number % 3)}few." for number in range(9)]
SETTINGS = {"maps": (1, "rollout"), "partition_samples": 3}


@pytest.fixture(scope="module")
def lines_file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "lines.txt"
    file.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def whole(tiny_llama, lines_file, tmp_path_factory) -> Path:
    store = tmp_path_factory.mktemp("whole") / "store"
    assert materialize(str(tiny_llama), f"text:{lines_file}", store=store, **SETTINGS) == [REF]
    return store


@pytest.fixture
def store(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "store"))


@pytest.fixture
def repair(tiny_llama, lines_file, store):
    """A function that runs `ola repair` and returns its exit code."""

    def run(ref: str = REF, model: Path | str = tiny_llama, corpus: str = f"text:{lines_file}") -> int:
        return main(["repair", ref, "--store", str(store), "--model", str(model), "--corpus", corpus])

    return run


def list_objects(store: Path) -> list[Path]:
    manifest = json.loads((store / DATASET / "v1.json").read_bytes())
    group = store / DATASET / manifest["folder"]
    return [*(group / name for name in manifest["objects"]), group / "manifest.json", store / manifest["samples_path"]]


def read_tree(store: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in store.rglob("*") if path.is_file())
    return {str(path.relative_to(store)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


DAMAGES = {
    "flipped": flip,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-2]),
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": Path.unlink,
}


def verify(store: Path, ref: str = REF) -> list[str]:
    opened = open_store(store)
    return verify_version(opened, resolve_ref(opened, ref))


def test_a_whole_version_is_left_as_it_is(store, repair, capsys):
    before = read_tree(store)
    assert repair() == 0
    assert "every object is as recorded" in capsys.readouterr().out
    assert read_tree(store) == before


def test_each_object_alone_is_made_again_and_no_other_is_written(store, repair, capsys):
    before = read_tree(store)
    for number, path in enumerate(list_objects(store)):
        list(DAMAGES.values())[number % len(DAMAGES)](path)
        assert repair() == 0
        assert capsys.readouterr().out.split() == [f"{REF}:", "rebuilt", str(path)]
        after = read_tree(store)
        name = str(path.relative_to(store))
        assert after[name][0] == before[name][0]
        assert {key: after[key] for key in before if key != name} == {key: before[key] for key in before if key != name}
        before = after
    assert verify(store) == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_all_objects_at_once_are_made_again(damage, store, repair, capsys):
    before = read_tree(store)
    paths = list_objects(store)
    for path in paths:
        DAMAGES[damage](path)
    assert len(verify(store)) == len(paths)
    assert repair() == 0
    assert len(capsys.readouterr().out.splitlines()) == len(paths)
    assert {name: data for name, (data, _) in read_tree(store).items()} == {
        name: data for name, (data, _) in before.items()
    }
    assert verify(store) == []


def test_objects_in_each_others_place_are_put_right(store, repair):
    before = {name: data for name, (data, _) in read_tree(store).items()}
    one, other = [path for path in list_objects(store) if "/order_1/c/" in str(path)][:2]
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    assert repair() == 0
    assert {name: data for name, (data, _) in read_tree(store).items()} == before


def test_what_another_version_has_is_copied_without_a_model(tiny_llama, lines_file, store, repair):
    materialize(str(tiny_llama), f"text:{lines_file}", store=store, maps=(1,), partition_samples=3)
    before = {name: data for name, (data, _) in read_tree(store).items()}
    for path in list_objects(store):
        if "/order_1/c/" in str(path) or "/input_ids/c/" in str(path):
            path.unlink()
    assert repair(model="/nowhere/tiny-llama", corpus="text:/nowhere/lines.txt") == 0
    assert {name: data for name, (data, _) in read_tree(store).items()} == before


def test_what_can_be_made_is_made_and_the_rest_is_refused_with_its_reason(
    tiny_llama, lines_file, store, repair, capsys
):
    table = list_objects(store)[-1]
    shard = next(path for path in list_objects(store) if "/rollout/c/" in str(path))
    data = table.read_bytes()
    flip(table)
    flip(shard)
    changed = lines_file.parent / "other" / "lines.txt"
    changed.parent.mkdir(exist_ok=True)
    changed.write_text("Something else.\n", encoding="utf-8")
    assert repair(corpus=f"text:{changed}") == 1
    message = capsys.readouterr().err
    assert f"{table} is still damaged: the corpus lines/all has other samples now" in message
    assert f"{shard} is still damaged: the sample table {table} is not the one" in message
    table.write_bytes(data)
    assert repair(corpus="text:/nowhere") == 0
    assert verify(store) == []


def test_a_model_that_is_not_the_recipes_is_refused(tiny_bert, store, repair, capsys):
    shard = next(path for path in list_objects(store) if "/rollout/c/" in str(path))
    shard.unlink()
    assert repair(model=tiny_bert) == 1
    assert "the version was made with" in capsys.readouterr().err
    assert not shard.exists()


def test_bytes_that_are_not_the_recorded_ones_are_never_written(store, repair, capsys):
    path = store / DATASET / "v1.json"
    manifest = json.loads(path.read_bytes())
    shard = next(path for path in list_objects(store) if "/order_1/c/1/" in str(path))
    name = str(shard.relative_to(store / DATASET / manifest["folder"]))
    manifest["objects"][name]["sha256"] = sha256(b"as another machine made it").hexdigest()
    del manifest["manifest_sha256"]
    manifest["manifest_sha256"] = compute_manifest_digest(manifest)
    path.write_bytes(Manifest.decode(json.dumps(manifest).encode(), "here").encode())
    before = shard.read_bytes()
    assert repair() == 1
    assert f"{shard} is still damaged: what is made here has other bytes" in capsys.readouterr().err
    assert shard.read_bytes() == before
    shard.unlink()
    assert repair() == 1
    assert not shard.exists()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_lost_manifest_is_named_and_restored_from_its_copy(damage, store, repair, capsys):
    path = store / DATASET / "v1.json"
    before = path.read_bytes()
    DAMAGES[damage](path)
    error = MissingObjectError if damage == "deleted" else CorruptedObjectError
    for action in (lambda: open_dataset(REF, store), lambda: verify(store)):
        with pytest.raises(error, match=rf"{path}.*`ola repair .*@vN?1?` restores it"):
            action()
    assert repair() == 0
    assert "restored its manifest" in capsys.readouterr().out
    assert path.read_bytes() == before
    assert verify(store) == []


def test_manifests_in_each_others_place_are_named_and_restored(tiny_llama, lines_file, store, repair):
    materialize(str(tiny_llama), f"text:{lines_file}", store=store, maps=(1,), partition_samples=3)
    paths = [store / DATASET / f"v{number}.json" for number in (1, 2)]
    one, other = (path.read_bytes() for path in paths)
    paths[0].write_bytes(other)
    paths[1].write_bytes(one)
    for ref in (REF, DATASET):
        with pytest.raises(DamagedError, match="is the record of"):
            open_dataset(ref, store)
    assert [repair(f"{DATASET}@v{number}") for number in (1, 2)] == [0, 0]
    assert [path.read_bytes() for path in paths] == [one, other]


def test_a_manifest_whose_copy_is_gone_too_is_beyond_repair(store, repair, capsys):
    path = store / DATASET / "v1.json"
    list_objects(store)[-2].unlink()
    flip(path)
    before = read_tree(store)
    assert repair() == 1
    assert str(path) in capsys.readouterr().err
    assert read_tree(store) == before


def test_a_removed_version_is_not_brought_back(store, repair, capsys):
    assert main(["rm", REF, "--store", str(store)]) == 0
    assert repair() == 2
    assert "was removed" in capsys.readouterr().err


def test_a_repair_killed_at_any_step_can_be_done_again(tiny_llama, lines_file, store, repair, tmp_path):
    before = {name: data for name, (data, _) in read_tree(store).items()}
    for path in list_objects(store):
        if path.name != "manifest.json":
            flip(path)
    (store / DATASET / "v1.json").unlink()
    damaged = Path(shutil.copytree(store, tmp_path / "damaged"))
    arguments = ["repair", REF, "--store", str(store), "--model", str(tiny_llama), "--corpus", f"text:{lines_file}"]
    for step in range(2, 200, 19):
        is_killed = kill_at_change(arguments, step)
        for path, (data, _) in read_tree(store).items():
            is_beside = path.startswith("_work/") or path.endswith(".partial")
            assert is_beside or data == before[path] or data == (damaged / path).read_bytes()
        if not is_killed:
            break
        shutil.rmtree(store)
        shutil.copytree(damaged, store)
    assert repair() == 0
    assert main(["gc", "--apply", "--store", str(store)]) == 0
    assert {name: data for name, (data, _) in read_tree(store).items()} == before
