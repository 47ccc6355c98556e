"""A disk without space stops a run with a message and loses nothing; reading needs no right to write."""

import multiprocessing
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.materialize import materialize
from pipeline.readers import open_dataset
from pipeline.store.catalog import list_datasets

TEXTS = [f"Sentence {number} of {'very ' * (number % 5)}many." for number in range(40)]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pipeline.readers", "pipeline.extraction", "pipeline.store.writer"])
OLA = [sys.executable, "-m", "pipeline.cli"]


def mount(*arguments: object) -> bool:
    done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, check=False)
    return done.returncode == 0


@pytest.fixture
def small_disk(tmp_path):
    """An empty file system of 400 KiB; skips by name where this process may not mount one."""
    path = tmp_path / "disk"
    path.mkdir()
    if os.geteuid() != 0 or not mount("-t", "tmpfs", "-o", "size=400k", "none", path):
        pytest.skip("this process may not mount a tmpfs")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture
def command(tiny_bert, tmp_path) -> list[str]:
    file = tmp_path / "lines.txt"
    file.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    return ["materialize", "--model", str(tiny_bert), "--corpus", f"text:{file}", "--partition-samples", "2"]


def list_files(folder: Path) -> dict[Path, tuple[int, int, bytes]]:
    return {
        path: (path.stat().st_mtime_ns, path.stat().st_ino, path.read_bytes() if path.is_file() else b"")
        for path in [folder, *folder.rglob("*")]
    }


def assert_stopped(exit_code: int | None, errors: str, message: str, store: Path) -> None:
    assert exit_code == 1
    assert message in errors
    assert "Traceback" not in errors
    assert list_datasets(store) == []
    assert list(store.glob("_work/*/partition-*.json"))


def test_a_full_disk_is_named_and_with_more_space_the_same_command_goes_on(command, small_disk):
    store = small_disk / "store"
    done = subprocess.run([*OLA, *command, "--store", str(store)], capture_output=True, text=True, check=False)
    assert_stopped(done.returncode, done.stderr, "No space left on device", store)
    assert not list(store.rglob("*.partial"))
    before = {path: path.stat().st_mtime_ns for path in store.rglob("order_1/c/0/0")}
    assert mount("-o", "remount,size=64m", small_disk)
    assert main([*command, "--store", str(store)]) == 0
    (entry,) = list_datasets(store)
    assert main(["verify", entry.ref, "--store", str(store)]) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not list((store / "_work").iterdir())


def run_limited(arguments: list[str], limit: int, errors: Path) -> None:
    os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY), sys.stderr.fileno())
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    sys.exit(main(arguments))


def test_a_limit_of_file_size_is_named_and_without_it_the_same_command_goes_on(command, tmp_path):
    store, errors = tmp_path / "store", tmp_path / "errors"
    command = [*command, "--store", str(store)]
    limit = 10_000  # a manifest of twenty partitions is larger, every object is smaller
    process = CONTEXT.Process(target=run_limited, args=(command, limit, errors))
    process.start()
    process.join(120)
    assert_stopped(process.exitcode, errors.read_text(), "File too large", store)
    assert main(command) == 0
    assert main(["verify", "tiny-bert/lines/all", "--store", str(store)]) == 0


def read_in_every_way(ref: str, store: Path) -> None:
    assert [entry.ref for entry in list_datasets(store)] == [ref]
    dataset = open_dataset(ref, store)
    assert sum(len(batch) for batch in dataset.loader(batch_size=7, shuffle=True)) == len(TEXTS)
    for arguments in (["ls"], ["ls", "--json"], ["show", ref], ["show", ref, "--json"], ["verify", ref]):
        assert main([*arguments, "--store", str(store)]) == 0


def test_reading_changes_no_file_and_no_folder(tiny_bert, materialize_text):
    store, ref = materialize_text(tiny_bert, TEXTS)
    before = list_files(store)
    read_in_every_way(ref, store)
    assert list_files(store) == before


def test_an_up_to_date_version_is_not_touched(tiny_bert, materialize_text):
    store, ref = materialize_text(tiny_bert, TEXTS)
    before = list_files(store)
    assert materialize_text(tiny_bert, TEXTS, store=store) == (store, ref)
    assert list_files(store) == before


def test_a_read_only_disk_can_be_read_and_refuses_writing_by_name(command, small_disk, tiny_bert, capsys):
    store = small_disk / "store"
    assert mount("-o", "remount,size=64m", small_disk)
    corpus = command[command.index("--corpus") + 1]
    (ref,) = materialize(str(tiny_bert), corpus, store=store, maps=(1,))
    assert mount("-o", "remount,ro", small_disk)
    read_in_every_way(ref, store)
    assert materialize(str(tiny_bert), corpus, store=store, maps=(1,)) == [ref]
    capsys.readouterr()
    assert main(["tag", ref, "best", "--store", str(store)]) == 2
    assert main([*command, "--store", str(store)]) == 2
    errors = capsys.readouterr().err
    assert errors.count("cannot be written") == 2
    assert "Traceback" not in errors
