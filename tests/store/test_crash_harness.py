"""Kills and copies at random moments of real runs: nothing finished is lost, nothing unfinished is seen."""

import json
import random
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.materialize import materialize
from pipeline.readers import list_datasets, open_dataset
from pipeline.store.layout import open_store
from pipeline.store.verify import verify_version
from pipeline.store.versions import resolve_ref
from storage_schema.errors import DatasetNotFoundError
from tests.store.processes import PATIENCE, OlaProcess, list_recorded_shards, wait_until

DATASET = "tiny-bert/lines/all"
OLDER = [f"{DATASET}@v1", "tiny-bert/lines/all+first3@v1"]
NEW = f"{DATASET}@v2"
NUM_PARTITIONS = 20
PARTITION_SAMPLES = 2
TEXTS = [f"Line {number} of {'very ' * (number % 5)}many." for number in range(NUM_PARTITIONS * PARTITION_SAMPLES)]


@dataclass(frozen=True)
class Run:
    """A run that nothing disturbs, and what there was before it."""

    command: list[str]
    older_store: Path
    manifest: bytes
    files: set[str]
    seconds: float
    """From its first step in the store to its last."""

    def start(self, store: Path) -> OlaProcess:
        """The command's process, once it has begun to write."""
        process = OlaProcess([*self.command, "--store", str(store)], store.parent / f"log-{time.monotonic_ns()}")
        # What an earlier run left in the store says nothing about this one.
        wait_until(lambda: any(f"{store}/_work/" in path for path in process.written) or not process.is_alive)
        return process


def has_work(store: Path) -> bool:
    return any(store.glob("_work/*"))


def list_files(store: Path) -> set[str]:
    return {path.relative_to(store).as_posix() for path in store.rglob("*")}


@pytest.fixture(scope="module")
def run(tiny_bert, tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("undisturbed")
    file, older_store, store = folder / "lines.txt", folder / "older", folder / "store"
    file.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    for settings in ({}, {"limit": 3}):
        materialize(str(tiny_bert), f"text:{file}", store=older_store, maps=(1,), **settings)
    shutil.copytree(older_store, store)
    command = ["materialize", "--model", str(tiny_bert), "--corpus", f"text:{file}"]
    command += ["--maps", "1,2", "--partition-samples", str(PARTITION_SAMPLES)]
    for _ in range(2):  # the first one fills the page cache
        shutil.rmtree(store)
        shutil.copytree(older_store, store)
        undisturbed = Run(command, older_store, b"", set(), 0)
        process = undisturbed.start(store)
        began = time.monotonic()
        wait_until(lambda: not has_work(store))
        seconds = time.monotonic() - began
        assert process.wait() == 0, process.printed
    return Run(command, older_store, (store / DATASET / "v2.json").read_bytes(), list_files(store), seconds)


def assert_whole(store: Path, ref: str) -> None:
    folder = open_store(store)
    assert verify_version(folder, resolve_ref(folder, ref)) == []


def check_what_is_visible(store: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether the new version is there, under its final record; if it is not, no reader sees anything of it."""
    for ref in OLDER:
        assert_whole(store, ref)
    published = (store / DATASET / "v2.json").exists()
    seen = [OLDER[0], *([NEW] if published else []), *OLDER[1:]]
    assert [entry.ref for entry in list_datasets(store)] == seen
    capsys.readouterr()
    assert main(["ls", "--json", "--store", str(store)]) == 0
    assert [entry["ref"] for entry in json.loads(capsys.readouterr().out)] == seen
    if published:
        assert (store / DATASET / "v2.json").read_bytes() == run.manifest
        return True
    assert open_dataset(DATASET, store).maps == (1,)
    for version in ("v2", json.loads(run.manifest)["fingerprint"]):
        with pytest.raises(DatasetNotFoundError):
            open_dataset(f"{DATASET}@{version}", store)
    return False


def assert_a_rerun_ends_as_the_undisturbed_run(store: Path, run: Run, *, published: bool) -> None:
    recorded = list_recorded_shards(store)
    process = run.start(store)
    assert process.wait() == 0, process.printed
    assert ("up to date" in process.printed) == published
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in recorded} == recorded
    if not published:
        record = json.loads((store / DATASET / json.loads(run.manifest)["folder"] / "run.json").read_bytes())
        assert record["partitions_taken_over"] == len({path.parent.name for path in recorded})
    assert (store / DATASET / "v2.json").read_bytes() == run.manifest
    assert list_files(store) == run.files
    for ref in (*OLDER, NEW):
        assert_whole(store, ref)


@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_a_run_killed_again_and_again_at_random_moments_loses_nothing(kills, run, tmp_path, capsys):
    moments = random.Random(kills)
    done = trial = 0
    recorded = []  # shards before and after each run
    while done < kills:
        trial += 1
        store = Path(shutil.copytree(run.older_store, tmp_path / str(trial) / "store"))
        published = False
        while not published and done < kills:
            before = len(list_recorded_shards(store))
            process = run.start(store)
            time.sleep(moments.random() * run.seconds)
            killed = process.kill()
            done += killed
            recorded.append((before, len(list_recorded_shards(store))))
            published = check_what_is_visible(store, run, capsys)
            assert killed or published, process.printed
        assert_a_rerun_ends_as_the_undisturbed_run(store, run, published=published)
        shutil.rmtree(store.parent)
    # Kills before any work, or after all of it, would tell nothing.
    assert sum(before < after for before, after in recorded) >= kills // 5, recorded


@pytest.mark.parametrize("copies", [2, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_a_copy_made_at_a_random_moment_of_a_run_is_as_good_as_a_killed_run(copies, run, tmp_path, capsys):
    moments = random.Random(copies)
    for number in range(copies):
        store, copy = tmp_path / str(number) / "store", tmp_path / str(number) / "copy"
        shutil.copytree(run.older_store, store)
        process = run.start(store)
        time.sleep(moments.random() * run.seconds)
        # Files that vanish under its hands are no reason to stop, but its exit code is 1 then.
        subprocess.run(["cp", "-r", store, copy], capture_output=True, check=False, timeout=PATIENCE)
        published = check_what_is_visible(copy, run, capsys)
        assert process.wait() == 0, process.printed
        assert_a_rerun_ends_as_the_undisturbed_run(copy, run, published=published)
        assert check_what_is_visible(store, run, capsys)
        assert list_files(store) == run.files
        shutil.rmtree(store.parent)
