"""Processes that materialize overlapping recipes into one store at once share the work and never meet in a shard."""

import json
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.readers import list_datasets
from pipeline.store.layout import open_store
from pipeline.store.verify import verify_version
from pipeline.store.versions import resolve_ref
from tests.store.processes import OlaProcess, list_recorded_shards, wait_until

OVERLAPPING = [
    ["--split", "train", "--maps", "1"],
    ["--split", "train", "--maps", "1"],
    ["--split", "train", "--maps", "1"],
    ["--split", "all", "--maps", "1"],
    ["--split", "all", "--maps", "1,2"],
    ["--split", "train", "--maps", "1,2"],
    ["--split", "dev", "--maps", "1,2"],
    ["--split", "train", "--maps", "1", "--limit", "9"],
]
ALONE = [OVERLAPPING[3], OVERLAPPING[4], OVERLAPPING[7]]
ROW = re.compile(r"^(tiny-bert/\S+@v[0-9]+) .*?(up to date|[0-9.]+) *$", re.MULTILINE)


@dataclass(frozen=True)
class Starter:
    """Starts `ola materialize` over the corpus `sample`, in partitions of few samples."""

    model: Path
    folder: Path

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def start(self, number: int, settings: list[str]) -> OlaProcess:
        command = ["materialize", "--model", str(self.model), "--corpus", "sample", "--partition-samples", "5"]
        return OlaProcess([*command, *settings, "--store", str(self.store)], self.folder / f"log-{number}")


@pytest.fixture
def starter(tiny_bert, tmp_path) -> Starter:
    return Starter(tiny_bert, tmp_path)


def read_manifests(store: Path) -> dict[str, dict]:
    """Each finished version's record but its number, which is a matter of who was first, by fingerprint."""
    manifests = {}
    for entry in list_datasets(store):
        dataset, _, version = entry.ref.partition("@")
        assert entry.fingerprint not in manifests
        record = json.loads((store / dataset / f"{version}.json").read_bytes())
        assert f"v{record.pop('number')}" == version
        del record["manifest_sha256"]
        manifests[entry.fingerprint] = record
    return manifests


@pytest.fixture(scope="module")
def manifests(tiny_bert, tmp_path_factory) -> dict[str, dict]:
    """The records of all overlapping recipes, made one after another."""
    starter = Starter(tiny_bert, tmp_path_factory.mktemp("alone"))
    for number, settings in enumerate(ALONE):
        process = starter.start(number, settings)
        assert process.wait() == 0, process.printed
    return read_manifests(starter.store)


def list_written_shards(process: OlaProcess, store: Path) -> list[str]:
    shard = re.compile(re.escape(str(store)) + r"/[^_].*/c(/[0-9]+)+")
    return [path for path in process.written if shard.fullmatch(path)]


def read_rows(process: OlaProcess) -> dict[str, bool]:
    """Each ref that it reports, and whether it says that it made the version."""
    assert process.wait() == 0, process.printed
    return {ref: last != "up to date" for ref, last in ROW.findall(process.printed)}


def assert_versions_are_those_made_alone(store: Path, manifests: dict[str, dict]) -> None:
    found = read_manifests(store)
    assert {fingerprint: manifests[fingerprint] for fingerprint in found} == found
    numbers: dict[str, list[int]] = {}
    for entry in list_datasets(store):
        dataset, _, version = entry.ref.partition("@v")
        numbers.setdefault(dataset, []).append(int(version))
        assert verify_version(open_store(store), resolve_ref(open_store(store), entry.ref)) == []
    assert all(sorted(taken) == list(range(1, len(taken) + 1)) for taken in numbers.values())
    assert not list((store / "_work").iterdir())
    assert not list(store.rglob("*.partial"))


@pytest.mark.parametrize("repeat", [0, *(pytest.param(repeat, marks=pytest.mark.slow) for repeat in range(1, 11))])
def test_eight_processes_with_overlapping_recipes_make_each_version_once(repeat, starter, manifests):
    processes = [starter.start(number, settings) for number, settings in enumerate(OVERLAPPING)]
    rows = [read_rows(process) for process in processes]
    assert [len(reported) for reported in rows] == [3 if "all" in settings else 1 for settings in OVERLAPPING]

    assert_versions_are_those_made_alone(starter.store, manifests)
    assert read_manifests(starter.store) == manifests
    makers = Counter(ref for reported in rows for ref, made in reported.items() if made)
    assert makers == Counter(entry.ref for entry in list_datasets(starter.store))
    writes = Counter(path for process in processes for path in list_written_shards(process, starter.store))
    assert set(writes.values()) == {1}
    assert set(writes) == {str(path) for path in starter.store.rglob("c/**/*") if path.is_file()}


def start_rivals(starter: Starter) -> tuple[OlaProcess, list[OlaProcess]]:
    """One process that has finished some partitions, and three of the same recipe that have looked for its lock."""
    processes = [starter.start(number, OVERLAPPING[5]) for number in range(4)]
    wait_until(lambda: len(list_recorded_shards(starter.store)) > 10)
    (owner,) = [process for process in processes if list_written_shards(process, starter.store)]
    owner.send(signal.SIGSTOP)
    others = [process for process in processes if process is not owner]
    wait_until(lambda: all(any(path.endswith(".lock") for path in other.written) for other in others))
    return owner, others


def test_a_live_owner_that_stands_still_is_not_taken_over(starter, manifests):
    owner, others = start_rivals(starter)
    time.sleep(1)  # several looks at the lock
    assert all(other.is_alive and not list_written_shards(other, starter.store) for other in others)
    assert list_datasets(starter.store) == []
    owner.send(signal.SIGCONT)
    assert [read_rows(process) for process in (owner, *others)] == [
        {"tiny-bert/sample/train@v1": made} for made in (True, False, False, False)
    ]
    assert not any(list_written_shards(other, starter.store) for other in others)
    assert set(Counter(list_written_shards(owner, starter.store)).values()) == {1}
    assert_versions_are_those_made_alone(starter.store, manifests)


@pytest.mark.parametrize("repeat", [0, *(pytest.param(repeat, marks=pytest.mark.slow) for repeat in range(1, 6))])
def test_a_killed_owner_is_taken_over_by_exactly_one(repeat, starter, manifests):
    owner, others = start_rivals(starter)
    recorded = {str(path) for path in list_recorded_shards(starter.store)}
    assert owner.kill()
    assert sorted(made for other in others for made in read_rows(other).values()) == [False, False, True]
    writers = [set(written) for other in others if (written := list_written_shards(other, starter.store))]
    assert len(writers) == 1
    assert not writers[0] & recorded
    assert_versions_are_those_made_alone(starter.store, manifests)
