"""In a bucket as in a folder: one owner of a work, a killed one is taken over, and nothing finished is lost."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from pipeline.materialize import materialize
from pipeline.readers import open_dataset
from pipeline.store import lease
from pipeline.store.catalog import list_datasets
from pipeline.store.layout import connect, open_store, open_store_for_writing
from pipeline.store.objects import describe_bytes
from pipeline.store.ownership import own_work
from pipeline.store.removal import collect_garbage
from pipeline.store.verify import verify_version
from pipeline.store.versions import publish_version, resolve_ref
from storage_schema.errors import DatasetNotFoundError, LostOwnershipError, StoreUnavailableError
from tests.store.test_versions_and_tags import describe

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pipeline.readers", "pipeline.extraction", "pipeline.store.writer"])
TEXTS = [f"Sentence {number} of {'very ' * (number % 5)}many." for number in range(16)]
SETTINGS = {"maps": (1,), "partition_samples": 2}
DATASET = "tiny-bert/lines/all"
SHORT_LEASE = 3.0
PATIENCE = 120

pytestmark = pytest.mark.slow  # processes that start, stand still and are killed: minutes


@pytest.fixture(autouse=True)
def _short_lease(monkeypatch):
    monkeypatch.setattr(lease, "LEASE_SECONDS", SHORT_LEASE)


@pytest.fixture(scope="module")
def lines_file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "lines.txt"
    file.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def undisturbed(tiny_bert, lines_file, tmp_path_factory) -> bytes:
    """The manifest, made in a folder without a disturbance."""
    store = tmp_path_factory.mktemp("undisturbed") / "store"
    materialize(str(tiny_bert), f"text:{lines_file}", store=store, **SETTINGS)
    return (store / DATASET / "v1.json").read_bytes()


def run(environment: dict[str, str], outcomes, function, *arguments, **settings) -> None:
    # The fork server began before the server of this test, and knows nothing of it.
    os.environ.update(environment)
    lease.LEASE_SECONDS = SHORT_LEASE
    try:
        outcomes.put(function(*arguments, **settings))
    except Exception as error:
        outcomes.put(f"{type(error).__name__}: {error}")


@pytest.fixture
def start(s3_environment, tmp_path):
    """A function that runs a function in a process; gives (process, queue of outcomes). None outlives the test."""
    started = []

    def begin(function, *arguments, outcomes=None, **settings):
        outcomes = outcomes or CONTEXT.Queue()
        environment = {**s3_environment, "OLA_CACHE": str(tmp_path / "cache")}
        process = CONTEXT.Process(target=run, args=(environment, outcomes, function, *arguments), kwargs=settings)
        process.start()
        started.append(process)
        return process, outcomes

    yield begin
    for process in started:
        process.kill()
        process.join(PATIENCE)


def wait_until(condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def list_work(url: str) -> list[str]:
    return list(connect(url).list_sizes("_work"))


def assert_whole(url: str, undisturbed: bytes) -> None:
    store = open_store(url)
    assert store.objects.read(f"{DATASET}/v1.json") == undisturbed
    assert verify_version(store, resolve_ref(store, DATASET)) == []
    assert [entry.ref for entry in list_datasets(url)] == [f"{DATASET}@v1"]
    assert list_work(url) == []


@pytest.mark.parametrize("records", [0, 1, 4, 8])
def test_a_kill_shows_nothing_unfinished_and_a_rerun_does_only_what_is_missing(
    records, tiny_bert, lines_file, bucket, undisturbed, start
):
    process, _ = start(materialize, str(tiny_bert), f"text:{lines_file}", store=bucket, **SETTINGS)
    wait_until(lambda: len(list_work(bucket)) > records)
    process.kill()
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL
    assert list_datasets(bucket) == []
    with pytest.raises(DatasetNotFoundError):
        open_dataset(DATASET, bucket)
    recorded = [name for name in list_work(bucket) if "partition-" in name]

    heard = []
    materialize(
        str(tiny_bert), f"text:{lines_file}", store=bucket, report=lambda *event: heard.append(event), **SETTINGS
    )
    first = next(done for _, stage, done, _ in heard if stage == "maps")
    assert first >= 2 * len(recorded) >= 2 * (records - 1)
    assert any(stage == "wait" for _, stage, _, _ in heard)
    assert_whole(bucket, undisturbed)


def test_processes_that_materialize_the_same_at_once_make_one_version(
    tiny_bert, lines_file, bucket, undisturbed, start
):
    outcomes = CONTEXT.Queue()
    for _ in range(3):
        start(materialize, str(tiny_bert), f"text:{lines_file}", store=bucket, outcomes=outcomes, **SETTINGS)
    assert [outcomes.get(timeout=PATIENCE) for _ in range(3)] == [[f"{DATASET}@v1"]] * 3
    assert_whole(bucket, undisturbed)


def test_an_owner_that_stood_still_too_long_stops_and_changes_nothing(
    tiny_bert, lines_file, bucket, undisturbed, start
):
    process, outcomes = start(materialize, str(tiny_bert), f"text:{lines_file}", store=bucket, **SETTINGS)
    wait_until(lambda: len(list_work(bucket)) > 3)
    os.kill(process.pid, signal.SIGSTOP)
    materialize(str(tiny_bert), f"text:{lines_file}", store=bucket, **SETTINGS)
    before = connect(bucket).list_sizes("")
    os.kill(process.pid, signal.SIGCONT)
    outcome = outcomes.get(timeout=PATIENCE)
    assert outcome.startswith("LostOwnershipError: ")
    assert "another process took this work over" in outcome
    assert connect(bucket).list_sizes("") == before
    assert_whole(bucket, undisturbed)


def own(url: str, seconds: float) -> str:
    objects = connect(url)
    with objects.own("_work/a", lambda: None):
        time.sleep(seconds)
    return "left"


def test_a_live_owner_is_waited_for_however_long_it_takes(bucket, start):
    _, outcomes = start(own, bucket, 3 * SHORT_LEASE)
    wait_until(lambda: list_work(bucket) == ["a.lease"])
    waits = []
    with connect(bucket).own("_work/a", lambda: waits.append(outcomes.empty())):
        assert outcomes.get(timeout=PATIENCE) == "left"
    assert waits == [True]
    assert list_work(bucket) == []


def test_a_killed_owner_is_taken_over_by_one_of_those_who_wait(bucket, start):
    process, _ = start(own, bucket, PATIENCE)
    wait_until(lambda: list_work(bucket) == ["a.lease"])
    process.kill()
    process.join(PATIENCE)
    outcomes = CONTEXT.Queue()
    began = time.monotonic()
    for _ in range(2):
        start(own, bucket, 0.5, outcomes=outcomes)
    assert [outcomes.get(timeout=PATIENCE) for _ in range(2)] == ["left", "left"]
    assert time.monotonic() - began > SHORT_LEASE
    assert list_work(bucket) == []


def test_a_lease_that_holds_anything_else_is_taken_over(bucket):
    connect(bucket).replace("_work/a.lease", b"\xff{torn")
    with connect(bucket).own("_work/a", lambda: None):
        assert list_work(bucket) == ["a.lease"]


def test_owners_never_meet(bucket, start):
    outcomes = CONTEXT.Queue()
    for _ in range(3):
        start(own_alone, bucket, outcomes=outcomes)
    assert [outcomes.get(timeout=PATIENCE) for _ in range(3)] == ["alone"] * 3


def own_alone(url: str) -> str:
    objects = connect(url)
    with objects.own("_work/a", lambda: None):
        if not objects.put_if_absent("inside", b""):
            return "met another"
        time.sleep(0.3)
        objects.remove("inside")
    return "alone"


def test_an_owner_whose_lease_was_taken_or_removed_is_told(bucket, monkeypatch):
    objects = connect(bucket)
    for change in (lambda: objects.replace("_work/a.lease", b"{}"), lambda: objects.remove("_work/a.lease")):
        with objects.own("_work/a", lambda: None) as owner:
            owner.check()
            change()
            time.sleep(SHORT_LEASE)
            with pytest.raises(LostOwnershipError, match=r"_work/a\.lease: another process took this work over"):
                owner.check()
        objects.remove("_work/a.lease")


def test_an_owner_recognizes_its_own_beat_when_the_answer_was_lost(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "LOSSY")
    with connect(bucket).own("_work/a", lambda: pytest.fail("waits for itself")) as owner:
        for _ in range(4):
            time.sleep(SHORT_LEASE / 2)
            owner.check()
    assert list_work(bucket) == []


def test_an_owner_whose_beat_seemed_to_fail_but_did_not_still_owns(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "LOSSY-BEATS")
    monkeypatch.setattr("pipeline.store.bucket._RETRIES", 0)
    heard = []
    with connect(bucket).own("_work/a", lambda: None) as owner:
        for _ in range(6):
            time.sleep(SHORT_LEASE / 3)
            try:
                owner.check()
            except StoreUnavailableError as error:
                heard.append(str(error))
    assert any("500" in message for message in heard)


def test_a_late_put_of_a_former_owner_does_not_go_unseen(bucket):
    mine, other = connect(bucket), connect(bucket)
    recorded = {name: describe_bytes(b"mine") for name in ("shard", "another")}
    for name in recorded:
        mine.replace(f"group/{name}", b"mine")
    assert mine.find_changed("group", recorded) == set()
    other.replace("group/shard", b"late")
    assert mine.find_changed("group", recorded) == {"shard"}
    other.remove("group/another")
    assert mine.find_changed("group", recorded) == {"shard", "another"}


def test_objects_at_the_top_of_a_store_are_compared_like_those_below(bucket, tmp_path):
    recorded = {"object": describe_bytes(b"whole"), "torn": describe_bytes(b"whole")}
    for objects in (connect(bucket), connect(tmp_path)):
        objects.replace("object", b"whole")
        objects.replace("torn", b"who")
        assert objects.find_changed("", recorded) == {"torn"}
        assert objects.list_names("") == ["object", "torn"]


def put(url: str, number: int) -> tuple[int, bool]:
    return number, connect(url).put_if_absent("key", bytes([number]) * 1000)


def test_of_several_processes_one_alone_puts_its_object(bucket, start):
    outcomes = CONTEXT.Queue()
    for number in range(4):
        start(put, bucket, number, outcomes=outcomes)
    results = dict(outcomes.get(timeout=PATIENCE) for _ in range(4))
    (winner,) = [number for number, won in results.items() if won]
    assert connect(bucket).read("key") == bytes([winner]) * 1000


def publish(url: str, limits: list[int]) -> list[tuple[int, int]]:
    store = open_store_for_writing(url)
    return [(limit, publish_version(store, describe(limit=limit)).number) for limit in limits]


def test_recipes_published_at_once_get_different_numbers_and_none_is_lost(bucket, start):
    outcomes = CONTEXT.Queue()
    for number in range(3):
        start(publish, bucket, [number * 10 + turn + 1 for turn in range(4)], outcomes=outcomes)
    results = [pair for _ in range(3) for pair in outcomes.get(timeout=PATIENCE)]
    assert sorted(number for _, number in results) == list(range(1, 13))


def test_garbage_of_a_killed_owner_is_collected_and_a_live_ones_is_not(
    tiny_bert, lines_file, bucket, undisturbed, start
):
    materialize(str(tiny_bert), f"text:{lines_file}", store=bucket, **SETTINGS)
    store = open_store(bucket)
    with own_work(store, resolve_ref(store, DATASET).manifest.recipe):
        survey = collect_garbage(store, unfinished=True, apply=True)
        assert (survey.garbage, len(survey.unfinished)) == ([], 1)
    process, _ = start(materialize, str(tiny_bert), f"text:{lines_file}", store=bucket, maps=(1,), partition_samples=1)
    wait_until(lambda: len(list_work(bucket)) > 2)
    process.kill()
    process.join(PATIENCE)
    assert collect_garbage(open_store(bucket), apply=True).garbage == []
    assert collect_garbage(open_store(bucket), unfinished=True, apply=True).garbage != []
    assert_whole(bucket, undisturbed)
    assert len([key for key in connect(bucket).list_sizes(DATASET) if key.endswith("/run.json")]) == 1
