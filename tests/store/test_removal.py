"""What is removed is gone at once and for good, garbage is what nothing refers to, and nobody's work is touched."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.materialize import materialize
from pipeline.readers import list_datasets, open_dataset
from pipeline.store.layout import open_store, open_store_for_writing
from pipeline.store.ownership import own_collection, own_work
from pipeline.store.removal import collect_garbage, remove_version
from pipeline.store.verify import verify_version
from pipeline.store.versions import bury_version, resolve_ref, tag_version
from storage_schema.errors import CorruptedObjectError, DatasetNotFoundError, MissingObjectError
from tests.store.processes import OlaProcess, kill_at_change, list_recorded_shards, wait_until

DATASET = "tiny-bert/lines/all"
TEXTS = [f"Sentence {number} of {'very ' * (number % 5)}many." for number in range(12)]


@pytest.fixture(scope="module")
def lines_file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "lines.txt"
    file.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def whole(tiny_bert, lines_file, tmp_path_factory) -> Path:
    """A store with three versions of a dataset; the second has two tags."""
    path = tmp_path_factory.mktemp("whole") / "store"
    for maps in ((1,), (2,), (1, 2)):
        materialize(str(tiny_bert), f"text:{lines_file}", store=path, maps=maps, partition_samples=4)
    store = open_store_for_writing(path)
    for tag, ref in (("paper", "v2"), ("also", "v2"), ("first", "v1")):
        tag_version(store, resolve_ref(store, f"{DATASET}@{ref}"), tag)
    return path


@pytest.fixture
def store(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "store"))


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_the_number_of_a_version_whose_manifest_was_lost_stays_its_own(store, tiny_bert, lines_file):
    opened = open_store_for_writing(store)
    lost = resolve_ref(opened, f"{DATASET}@v3")
    (store / DATASET / "v3.json").unlink()
    (ref,) = materialize(str(tiny_bert), f"text:{lines_file}", store=store, maps=(3,), partition_samples=4)
    assert ref == f"{DATASET}@v4"
    with pytest.raises(MissingObjectError, match=r"ola repair .*@v3"):
        collect_garbage(opened, apply=True)
    assert run("repair", f"{DATASET}@v3", "--store", store) == 0
    assert resolve_ref(opened, f"{DATASET}@v3") == lost
    assert not list(verify_version(opened, lost))


def read_tree(store: Path) -> dict[str, bytes]:
    return {str(path.relative_to(store)): path.read_bytes() for path in store.rglob("*") if path.is_file()}


def find_group(store: Path, version: str) -> Path:
    manifest = resolve_ref(open_store(store), f"{DATASET}@{version}").manifest
    return store / DATASET / manifest.folder


def remove(store: Path, version: str) -> list[str]:
    opened = open_store(store)
    return remove_version(opened, resolve_ref(opened, f"{DATASET}@{version}"))


def collect(store: Path, **options: bool) -> set[str]:
    return {garbage.key for garbage in collect_garbage(open_store(store), **options).garbage}


def test_a_removed_version_is_gone_with_its_tags_and_leaves_the_others_untouched(store, capsys):
    group, before = find_group(store, "v2"), read_tree(store)
    assert run("rm", f"{DATASET}@v2", "--store", store) == 0
    assert "v2 with the tags also, paper" in capsys.readouterr().out
    after = read_tree(store)
    lost = {name for name in before if before[name] != after.get(name)}
    tags = {f"{DATASET}/_tags/{tag}.json" for tag in ("also", "paper")}
    in_group = {name for name in before if name.startswith(str(group.relative_to(store)))}
    assert lost == in_group | tags | {f"{DATASET}/v2.json"}
    assert [entry.ref[-2:] for entry in list_datasets(store)] == ["v1", "v3"]
    for version in ("v2", "paper"):
        assert run("show", f"{DATASET}@{version}", "--store", store) == 2
    assert "v2 was removed" in capsys.readouterr().err


def test_the_number_of_a_removed_version_is_never_given_again(tiny_bert, lines_file, store):
    before = json.loads((store / DATASET / "v3.json").read_bytes())
    remove(store, "v3")
    assert resolve_ref(open_store(store), DATASET).number == 2
    settings = {"maps": (1, 2), "partition_samples": 4}
    assert materialize(str(tiny_bert), f"text:{lines_file}", store=store, **settings) == [f"{DATASET}@v4"]
    after = json.loads((store / DATASET / "v4.json").read_bytes())
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {"number", "manifest_sha256"}


def test_a_dataset_whose_versions_are_all_removed_has_none(store):
    for version in ("v1", "v2", "v3"):
        remove(store, version)
    assert list_datasets(store) == []
    with pytest.raises(DatasetNotFoundError, match="has no version 'latest'; it has: none"):
        resolve_ref(open_store(store), DATASET)


@pytest.mark.parametrize("ref", [DATASET, f"{DATASET}@latest", f"{DATASET}@v9", f"{DATASET}@nothing", "x"])
def test_only_a_version_that_is_named_for_good_is_removed(ref, store):
    before = read_tree(store)
    assert run("rm", ref, "--store", store) == 2
    assert read_tree(store) == before


def test_a_version_made_anew_while_its_removal_waited_is_left_alone(store, tmp_path):
    opened = open_store(store)
    version = resolve_ref(opened, f"{DATASET}@v2")
    before = read_tree(find_group(store, "v2"))
    with own_work(opened, version.manifest.recipe):
        process = OlaProcess(["rm", f"{DATASET}@v2", "--store", str(store)], tmp_path / "rm")
        wait_until(lambda: "waiting for another process" in process.printed)
        bury_version(opened, version)
    assert process.wait() == 2
    assert "was removed" in process.printed
    assert read_tree(store / DATASET / version.manifest.folder) == before


def test_a_removal_killed_at_any_step_is_all_or_nothing_to_readers_and_can_be_done_again(store, tmp_path):
    expected = Path(shutil.copytree(store, tmp_path / "expected"))
    remove(expected, "v2")
    for step in range(0, 100, 3):
        copy = Path(shutil.copytree(store, tmp_path / f"copy{step}"))
        is_killed = kill_at_change(["rm", f"{DATASET}@v2", "--store", str(copy)], step)
        opened = open_store(copy)
        for version in ("v1", "v3"):
            assert verify_version(opened, resolve_ref(opened, f"{DATASET}@{version}")) == []
        if len(list_datasets(copy)) == 3:
            assert verify_version(opened, resolve_ref(opened, f"{DATASET}@v2")) == []
            assert run("rm", f"{DATASET}@v2", "--store", copy) == 0
        collect(copy, unfinished=True, apply=True)
        assert read_tree(copy) == read_tree(expected)
        shutil.rmtree(copy)
        if not is_killed:
            break
    assert step > 10


def test_a_whole_store_has_no_garbage(store, capsys):
    before = read_tree(store)
    assert run("gc", "--apply", "--unfinished", "--store", store) == 0
    assert "nothing that no version refers to" in capsys.readouterr().out
    assert read_tree(store) == before


def test_garbage_is_listed_first_and_removed_only_when_told(store, capsys):
    group = find_group(store, "v3").relative_to(store)
    (store / DATASET / "v3.json").unlink()
    (store / group / "manifest.json").unlink()
    (store / DATASET / "_tags" / "old.json").write_text(json.dumps({"fingerprint": "0" * 64}))
    (store / "_samples/lines/all/0000000000000000.parquet").write_bytes(b"12345")
    foreign = [store / "notes.txt", store / "a b/c/d/x", store / "_samples/read.me", store / DATASET / "mine/x"]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    before = read_tree(store)
    assert run("gc", "--json", "--store", store) == 0
    listed = json.loads(capsys.readouterr().out)
    assert read_tree(store) == before
    found = {garbage["key"]: garbage["bytes"] for garbage in listed["garbage"]}
    table, tag = "_samples/lines/all/0000000000000000.parquet", f"{DATASET}/_tags/old.json"
    in_group = [name for name in before if name.startswith(f"{group}/")]
    assert found == {f"{group}/": sum(len(before[name]) for name in in_group), table: 5, tag: len(before[tag])}
    assert run("gc", "--apply", "--store", store) == 0
    assert read_tree(store) == {name: data for name, data in before.items() if name not in {*in_group, table, tag}}
    assert collect(store) == set()


def test_a_sample_table_stays_as_long_as_one_model_uses_it(tiny_llama, lines_file, store):
    (other,) = materialize(str(tiny_llama), f"text:{lines_file}", store=store, maps=(1,))
    for version in ("v1", "v2", "v3"):
        remove(store, version)
    assert collect(store, apply=True) == set()
    opened = open_store(store)
    assert verify_version(opened, resolve_ref(opened, other)) == []
    remove_version(opened, resolve_ref(opened, other))
    assert len(collect(store, apply=True)) == 1
    assert not list(store.glob("_samples/**/*.parquet"))


@pytest.mark.parametrize("damage", ["deleted", "damaged"])
def test_nothing_is_collected_while_a_manifest_is_lost(damage, store):
    path = store / DATASET / "v3.json"
    path.unlink() if damage == "deleted" else path.write_bytes(path.read_bytes()[:-9])
    before = read_tree(store)
    with pytest.raises((MissingObjectError, CorruptedObjectError), match=rf"{path}.*ola repair"):
        collect(store, apply=True, unfinished=True)
    assert read_tree(store) == before


@pytest.fixture
def command(tiny_bert, lines_file, store) -> list[str]:
    """An `ola` command that makes a fourth version, slowly: a sample a partition."""
    paths = ["--model", str(tiny_bert), "--corpus", f"text:{lines_file}", "--store", str(store)]
    return ["materialize", *paths, "--maps", "3", "--partition-samples", "1"]


def test_a_killed_writers_work_is_kept_for_its_rerun_and_removed_only_when_told(command, store, tmp_path):
    process = OlaProcess(command, tmp_path / "killed")
    wait_until(lambda: len(list_recorded_shards(store)) > 3)
    assert process.kill()
    kept = list_recorded_shards(store)
    survey = collect_garbage(open_store(store), apply=True)
    assert (survey.garbage, len(survey.unfinished)) == ([], 1)
    assert list_recorded_shards(store) == kept
    other = Path(shutil.copytree(store, tmp_path / "other"))
    assert OlaProcess(command, tmp_path / "rerun").wait() == 0
    assert all((path.stat().st_ino, path.stat().st_mtime_ns) == facts for path, facts in kept.items())
    collect(other, apply=True, unfinished=True)
    expected = {name: data for name, data in read_tree(store).items() if not name.startswith(f"{DATASET}/")}
    found = {name: data for name, data in read_tree(other).items() if not name.startswith(f"{DATASET}/")}
    assert found == expected
    assert len(list((other / DATASET).glob("*/zarr.json"))) == 3


def test_a_live_writers_work_and_table_are_never_collected(command, store, tmp_path):
    process = OlaProcess(command, tmp_path / "live")
    wait_until(lambda: len(list_recorded_shards(store)) > 3)
    process.send(signal.SIGSTOP)
    for version in ("v1", "v2", "v3"):
        remove(store, version)
    survey = collect_garbage(open_store(store), apply=True, unfinished=True)
    assert (survey.garbage, len(survey.unfinished)) == ([], 1)
    process.send(signal.SIGCONT)
    assert process.wait() == 0
    opened = open_store(store)
    assert verify_version(opened, resolve_ref(opened, f"{DATASET}@v4")) == []
    assert len(open_dataset(f"{DATASET}@v4", store)) == len(TEXTS)


def test_work_that_begins_while_garbage_is_collected_waits_for_it(command, store, tmp_path):
    with own_collection(open_store(store)):
        before = read_tree(store)
        process = OlaProcess(command, tmp_path / "waits")
        wait_until(lambda: len(list(store.glob("_work/*.lock"))) == 2)
        time.sleep(0.5)
        (lock,) = read_tree(store).keys() - before.keys()
        assert lock.startswith("_work/")
    assert process.wait() == 0
    assert resolve_ref(open_store(store), DATASET).number == 4
