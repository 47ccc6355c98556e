"""What a killed writer leaves is taken up, mended or swept; a live owner is waited for.

Kills at random moments: test_crash_harness.py.
"""

import json
import random
import shutil
import time
from pathlib import Path

import pytest

from pipeline.materialize import materialize
from pipeline.store.layout import open_store, open_store_for_writing
from pipeline.store.ownership import own_work
from pipeline.store.verify import verify_version
from pipeline.store.versions import resolve_ref
from storage_schema.recipe import Recipe
from tests.store.processes import CONTEXT, PATIENCE, wait_until

TEXTS = [f"Sentence {number} of {'very ' * (number % 5)}many." for number in range(30)]
SETTINGS = {"maps": (1,), "partition_samples": 2}


@pytest.fixture(scope="module")
def lines_file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "lines.txt"
    file.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def older_store(tiny_bert, lines_file, tmp_path_factory) -> Path:
    """A store with one finished version of the dataset."""
    store = tmp_path_factory.mktemp("older") / "store"
    assert materialize(str(tiny_bert), f"text:{lines_file}", store=store, maps=(1,)) == ["tiny-bert/lines/all@v1"]
    return store


@pytest.fixture(scope="module")
def undisturbed(tiny_bert, lines_file, older_store, tmp_path_factory) -> bytes:
    """The manifest of version 2, made without a disturbance."""
    store = tmp_path_factory.mktemp("undisturbed") / "store"
    shutil.copytree(older_store, store)
    materialize(str(tiny_bert), f"text:{lines_file}", store=store, **SETTINGS)
    return (store / "tiny-bert/lines/all/v2.json").read_bytes()


@pytest.fixture
def store(older_store, tmp_path) -> Path:
    return Path(shutil.copytree(older_store, tmp_path / "store"))


def start(model: Path, lines_file: Path, store: Path):
    process = CONTEXT.Process(
        target=materialize, args=(str(model), f"text:{lines_file}"), kwargs={"store": store, **SETTINGS}
    )
    process.start()
    return process


def list_records(store: Path) -> list[Path]:
    return list(store.glob("_work/*/*.json"))


def kill_after(records: int, model: Path, lines_file: Path, store: Path) -> None:
    process = start(model, lines_file, store)
    wait_until(lambda: len(list_records(store)) >= records or not process.is_alive())
    time.sleep(random.Random(records).random() * 0.05)
    process.kill()
    process.join(PATIENCE)
    assert process.exitcode == -9


def list_finished_shards(store: Path) -> dict[Path, tuple[int, int]]:
    """Of each recorded object: its inode and its time of writing."""
    finished = {}
    for record in list_records(store):
        (group,) = store.glob(f"*/*/*/{record.parent.name}")
        for path in json.loads(record.read_bytes())["objects"]:
            status = (group / path).stat()
            finished[group / path] = (status.st_ino, status.st_mtime_ns)
    return finished


def assert_whole(store: Path, ref: str) -> None:
    folder = open_store(store)
    assert verify_version(folder, resolve_ref(folder, ref)) == []


@pytest.fixture(scope="module")
def interrupted_store(tiny_bert, lines_file, older_store, tmp_path_factory) -> Path:
    store = Path(shutil.copytree(older_store, tmp_path_factory.mktemp("interrupted") / "store"))
    kill_after(8, tiny_bert, lines_file, store)
    return store


@pytest.fixture
def interrupted(interrupted_store, tmp_path) -> Path:
    return Path(shutil.copytree(interrupted_store, tmp_path / "interrupted"))


def damage(path: Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if kind == "delete":
        path.unlink()
    else:
        path.write_bytes({"flip": bytes(data), "truncate": bytes(data[:-1]), "empty": b""}[kind])


@pytest.mark.parametrize(
    ("array", "kinds"), [("order_1", ["flip", "truncate", "delete", "empty"]), ("input_ids", ["flip"])]
)
def test_damaged_objects_of_an_unfinished_version_are_made_again(
    array, kinds, tiny_bert, lines_file, interrupted, undisturbed
):
    shards = [path for path in list_finished_shards(interrupted) if f"/{array}/c/" in str(path)]
    for path, kind in zip(shards, kinds, strict=False):
        damage(path, kind)
    materialize(str(tiny_bert), f"text:{lines_file}", store=interrupted, **SETTINGS)
    assert (interrupted / "tiny-bert/lines/all/v2.json").read_bytes() == undisturbed
    assert_whole(interrupted, "tiny-bert/lines/all@v2")


def test_torn_journal_records_cost_their_partitions_alone(tiny_bert, lines_file, interrupted, undisturbed):
    records = sorted(interrupted.glob("_work/*/partition-*.json"))
    torn = [b"", b"{", b"[]", b"\xff", records[4].read_bytes()[:-9]]
    for path, data in zip(records, torn, strict=False):
        path.write_bytes(data)
    kept = [interrupted / f"tiny-bert/lines/all/{records[5].parent.name}/order_1/c/5/0"]
    before = [path.stat().st_ino for path in kept]
    materialize(str(tiny_bert), f"text:{lines_file}", store=interrupted, **SETTINGS)
    assert (interrupted / "tiny-bert/lines/all/v2.json").read_bytes() == undisturbed
    assert [path.stat().st_ino for path in kept] == before


def test_partial_files_of_a_killed_writer_are_swept_wherever_it_died(tiny_bert, lines_file, interrupted):
    (work,) = interrupted.glob("_work/*/")
    places = ["", "_samples/lines/all", "tiny-bert/lines/all", f"tiny-bert/lines/all/{work.name}/order_1/c"]
    for place in places:
        (interrupted / place / ".object.abc123.partial").write_bytes(b"torn")
    materialize(str(tiny_bert), f"text:{lines_file}", store=interrupted, **SETTINGS)
    assert not list(interrupted.rglob("*.partial"))


@pytest.mark.parametrize("left", ["journal", "lock"])
def test_what_a_writer_killed_at_the_very_end_leaves_is_swept(left, tiny_bert, lines_file, store):
    def materialize_again() -> list[str]:
        return materialize(str(tiny_bert), f"text:{lines_file}", store=store, maps=(1,))

    fingerprint = resolve_ref(open_store(store), "tiny-bert/lines/all").manifest.recipe.fingerprint
    (store / "_work").mkdir(exist_ok=True)
    (store / "_work" / f"{fingerprint[:16]}.lock").touch()
    if left == "journal":
        (store / "_work" / fingerprint[:16]).mkdir()
        (store / "_work" / fingerprint[:16] / "index.json").write_bytes(b"{}")
    assert materialize_again() == ["tiny-bert/lines/all@v1"]
    assert not list((store / "_work").iterdir())


def hold_work(store: Path, recipe: Recipe, log: Path, seconds: float) -> None:
    def note(word: str) -> None:
        with log.open("a") as file:
            file.write(f"{word}\n")

    with own_work(open_store(store), recipe, on_wait=lambda: note("waits")):
        note("owns")
        time.sleep(seconds)
        note("leaves")


RECIPE = Recipe(
    model="m", model_revision="sha256:" + "a" * 64, tokenizer_sha256="b" * 64, corpus="lines", split="all",
    corpus_sha256="c" * 64, max_length=64, maps=(1,),
)  # fmt: skip


def own(store: Path, log: Path, seconds: float):
    process = CONTEXT.Process(target=hold_work, args=(store, RECIPE, log, seconds))
    process.start()
    return process


def read(log: Path) -> list[str]:
    return log.read_text().split() if log.exists() else []


def test_a_live_owner_is_waited_for_and_a_killed_one_is_taken_over(tmp_path):
    store, logs = tmp_path / "store", [tmp_path / "first", tmp_path / "second"]
    open_store_for_writing(store)
    first = own(store, logs[0], seconds=PATIENCE)
    wait_until(lambda: read(logs[0]) == ["owns"])
    second = own(store, logs[1], seconds=0)
    wait_until(lambda: read(logs[1]) == ["waits"])
    time.sleep(0.5)
    assert read(logs[1]) == ["waits"]
    first.kill()
    second.join(PATIENCE)
    assert (second.exitcode, read(logs[1])) == (0, ["waits", "owns", "leaves"])
    first.join()
    assert not list((store / "_work").iterdir())


def test_owners_follow_one_another_and_never_meet(tmp_path):
    open_store_for_writing(tmp_path / "store")
    log = tmp_path / "log"
    processes = [own(tmp_path / "store", log, seconds=0.05) for _ in range(5)]
    for process in processes:
        process.join(PATIENCE)
        assert process.exitcode == 0
    words = [word for word in read(log) if word == "owns"]
    assert len(words) == 5
    inside = 0
    for word in read(log):
        inside += {"owns": 1, "leaves": -1, "waits": 0}[word]
        assert 0 <= inside <= 1
    assert not list((tmp_path / "store" / "_work").iterdir())
