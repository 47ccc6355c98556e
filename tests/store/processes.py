"""Real `ola` processes that start fast, forked from a server that has imported everything, and what they leave.

They run `pipeline.cli.main` as the command does; nothing in them is replaced. An audit hook of Python notes which files
each of them puts into the store.
"""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

PATIENCE = 120
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        *("pipeline.cli", "pipeline.readers", "pipeline.extraction", "pipeline.store.writer"),
        *("pyarrow.dataset", "transformers.models.bert.modeling_bert"),  # else loaded late, in the midst of the work
    ]
)


class OlaProcess:
    """One `ola` command in a process of its own."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        """Starts it; `folder` takes what it prints and notes."""
        folder.mkdir(parents=True)
        self._output, self._notes = folder / "output", folder / "notes"
        self._process = CONTEXT.Process(target=_run_ola, args=(arguments, self._output, self._notes), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def printed(self) -> str:
        return self._output.read_text(encoding="utf-8") if self._output.exists() else ""

    @property
    def written(self) -> list[str]:
        """Absolute paths that it opened for writing, or renamed or linked a file to, oldest first."""
        notes = self._notes.read_text(encoding="utf-8") if self._notes.exists() else ""
        return notes.split("\n")[:-1]

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> bool:
        """Whether SIGKILL was what ended it; it may have ended before."""
        self._process.kill()
        return self.wait() == -9

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        self._process.join(PATIENCE)
        assert self._process.exitcode is not None, f"still running; printed so far: {self.printed}"
        return self._process.exitcode


def _run_ola(arguments: list[str], output: Path, notes: Path) -> None:
    os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND), sys.stdout.fileno())
    os.dup2(sys.stdout.fileno(), sys.stderr.fileno())
    log = os.open(notes, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def note(event: str, values: tuple) -> None:
        if event == "open" and isinstance(values[0], str) and values[2] & (os.O_WRONLY | os.O_RDWR):
            if os.path.isdir(values[0]):  # noqa: PTH112 - tempfile says the folder in which it makes a file
                return
            path = values[0]
        elif event in ("os.rename", "os.link"):
            path = values[1]
        else:
            return
        os.write(log, f"{os.path.abspath(os.fspath(path))}\n".encode())  # noqa: PTH100 - pathlib audits itself

    import torch

    from pipeline.cli import main

    torch.set_num_threads(1)  # threads of several processes on few cores wait for one another
    sys.addaudithook(note)
    sys.exit(main(arguments))


def kill_at_change(arguments: list[str], step: int) -> bool:
    """Whether `ola` came to its `step`-th change of a file: right before it, the process kills itself."""
    process = CONTEXT.Process(target=_run_until_change, args=(arguments, step), daemon=True)
    process.start()
    process.join(PATIENCE)
    assert process.exitcode in (0, -9), process.exitcode
    return process.exitcode == -9


def _run_until_change(arguments: list[str], step: int) -> None:
    changes = 0

    def count(event: str, values: tuple) -> None:
        nonlocal changes
        is_writing = event == "open" and isinstance(values[0], str) and values[2] & (os.O_WRONLY | os.O_RDWR)
        if is_writing or event in ("os.rename", "os.link", "os.remove", "os.rmdir"):
            if changes == step:
                os.kill(os.getpid(), 9)
            changes += 1

    from pipeline.cli import main

    sys.addaudithook(count)
    sys.exit(main(arguments))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def list_recorded_shards(store: Path) -> dict[Path, tuple[int, int]]:
    """Of each shard that an unfinished version's journal records and that is as recorded: its inode and its time.

    A journal whose index is not as recorded is worth nothing.
    """
    recorded = {}
    for journal in store.glob("_work/*/"):
        for group in store.glob(f"*/*/*/{journal.name}"):
            if _list_intact(journal / "index.json", group):
                for record in journal.glob("partition-*.json"):
                    paths = _list_intact(record, group)
                    recorded |= {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}
    return recorded


def _list_intact(record: Path, group: Path) -> list[Path]:
    if not record.exists():
        return []
    objects = json.loads(record.read_bytes())["objects"]
    intact = all(
        (group / path).exists() and sha256((group / path).read_bytes()).hexdigest() == stored["sha256"]
        for path, stored in objects.items()
    )
    return [group / path for path in objects] if intact else []
