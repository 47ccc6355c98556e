"""Runs that are interrupted stop cleanly, say so, and are taken up by the same command."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.store.catalog import list_datasets


@pytest.fixture
def command(tiny_bert, tmp_path) -> list[str]:
    file = tmp_path / "long.txt"
    file.write_text("".join(f"Sentence {number} of a long text.\n" for number in range(800)), encoding="utf-8")
    return [
        "materialize", "--model", str(tiny_bert), "--corpus", f"text:{file}", "--partition-samples", "4",
        "--store", str(tmp_path / "store"),
    ]  # fmt: skip


def count_records(store: Path) -> int:
    return len(list(store.glob("_work/*/partition-*.json")))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_cleanly_and_a_rerun_goes_on(number, code, command, tmp_path, capsys):
    store = tmp_path / "store"
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline.cli", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while count_records(store) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert "run the same command again to go on" in errors
    assert "Traceback" not in errors
    finished = count_records(store)
    assert 3 <= finished < 200
    assert list_datasets(store) == []
    shards = {path: path.stat().st_mtime_ns for path in sorted(store.rglob("order_1/c/*/0"))[:3]}

    assert main(command) == 0
    assert "800" in capsys.readouterr().out
    (entry,) = list_datasets(store)
    assert main(["verify", entry.ref, "--store", str(store)]) == 0
    assert {path: path.stat().st_mtime_ns for path in shards} == shards
    assert not any(store.glob("_work/*"))
    assert not any(store.rglob("*.partial"))
