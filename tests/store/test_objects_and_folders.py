"""Objects appear whole or not at all, and a folder that is no store is refused without being touched."""

import json
import multiprocessing
import threading
from pathlib import Path

import pytest

from pipeline.readers import open_dataset
from pipeline.store.catalog import list_datasets
from pipeline.store.folder import FolderObjects
from pipeline.store.layout import STORE_FORMAT, check_writable, open_store, open_store_for_writing
from storage_schema.errors import NewerFormatError, StoreAccessError

PROCESSES = 8
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pipeline.readers", "pipeline.extraction", "pipeline.store.writer"])
REF = "a/b/c"


def race_for(folder: Path, key: str, barrier, number: int, outcomes) -> None:
    data = bytes([number]) * 200_000
    barrier.wait()
    outcomes.put((number, FolderObjects(folder).put_if_absent(key, data)))


def test_of_eight_processes_one_alone_puts_its_object(tmp_path):
    for attempt in range(3):
        key = f"{attempt}/deep/object"
        path = tmp_path / key
        barrier, outcomes = CONTEXT.Barrier(PROCESSES), CONTEXT.Queue()
        processes = [
            CONTEXT.Process(target=race_for, args=(tmp_path, key, barrier, n, outcomes)) for n in range(PROCESSES)
        ]
        for process in processes:
            process.start()
        results = dict(outcomes.get(timeout=60) for _ in processes)
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
        (winner,) = [number for number, won in results.items() if won]
        assert path.read_bytes() == bytes([winner]) * 200_000
        assert [entry.name for entry in path.parent.iterdir()] == ["object"]


def test_an_object_that_is_there_stays_as_it_is(tmp_path):
    objects = FolderObjects(tmp_path)
    assert objects.put_if_absent("object", b"first")
    assert not objects.put_if_absent("object", b"second")
    assert objects.read("object") == b"first"


def test_a_replaced_object_is_never_seen_torn(tmp_path):
    objects = FolderObjects(tmp_path)
    contents = [bytes([number]) * 300_000 for number in range(2)]
    objects.replace("object", contents[0])
    stop = threading.Event()

    def write() -> None:
        for turn in range(60):
            objects.replace("object", contents[turn % 2])
        stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not stop.is_set():
        seen.add(objects.read("object"))
    writer.join()
    assert seen <= set(contents)
    assert [entry.name for entry in tmp_path.iterdir()] == ["object"]


@pytest.mark.parametrize("make", ["missing", "empty"])
def test_a_missing_or_empty_folder_becomes_a_store(make, tmp_path):
    path = tmp_path / "deep" / "store"
    if make == "empty":
        path.mkdir(parents=True)
    check_writable(path)
    assert path.exists() is (make == "empty")
    assert open_store_for_writing(path).describe() == str(path)
    assert json.loads((path / "ola-store.json").read_bytes()) == {"ola_store": STORE_FORMAT}
    assert open_store(path).describe() == str(path)


def test_a_store_that_another_process_is_just_making_is_waited_for_or_finished(tmp_path):
    # Between its two steps, or killed there, the maker has left its marker under a partial name.
    (tmp_path / ".ola-store.json.abc123.partial").write_bytes(b"")
    check_writable(tmp_path)
    open_store_for_writing(tmp_path)
    assert open_store(tmp_path).describe() == str(tmp_path)


def make_store(path: Path, barrier, outcomes) -> None:
    barrier.wait()
    try:
        open_store_for_writing(path)
    except Exception as error:
        outcomes.put(f"{type(error).__name__}: {error}")
    else:
        outcomes.put("opened")


def test_eight_processes_may_make_one_store_at_once(tmp_path):
    for attempt in range(6):
        barrier, outcomes = CONTEXT.Barrier(PROCESSES), CONTEXT.Queue()
        path = tmp_path / str(attempt)
        processes = [CONTEXT.Process(target=make_store, args=(path, barrier, outcomes)) for _ in range(PROCESSES)]
        for process in processes:
            process.start()
        assert [outcomes.get(timeout=60) for _ in processes] == ["opened"] * PROCESSES
        for process in processes:
            process.join(60)


def refuse_everywhere(store: str | Path, error: type[Exception], message: str) -> None:
    for action in (open_store, open_store_for_writing, check_writable, list_datasets, lambda s: open_dataset(REF, s)):
        with pytest.raises(error, match=message):
            action(store)


def test_a_file_is_no_store(tmp_path):
    path = tmp_path / "store"
    path.write_bytes(b"mine")
    refuse_everywhere(path, StoreAccessError, f"the store {path} is a file; a store is a folder")
    assert path.read_bytes() == b"mine"


def test_a_folder_with_other_things_is_no_store_and_stays_untouched(tmp_path):
    (tmp_path / "thesis.tex").write_bytes(b"mine")
    refuse_everywhere(tmp_path, StoreAccessError, "is no store: it has no ola-store.json; name another place")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    "store", ["s3://user:secret@bucket/store", "s3://bucket/store?secret=token", "s3://bucket/a#secret"]
)
def test_a_url_with_credentials_is_refused_without_repeating_them(store):
    with pytest.raises(StoreAccessError) as refusal:
        open_dataset(REF, store)
    assert "secret" not in str(refusal.value)
    assert "token" not in str(refusal.value)
    refuse_everywhere(store, StoreAccessError, "credentials belong into the environment")


@pytest.mark.parametrize("store", ["gs://user:secret@bucket", "file:///tmp/store", "https://host/bucket?secret"])
def test_a_url_of_another_scheme_is_refused_by_name(store):
    with pytest.raises(StoreAccessError, match=r"^(?!.*secret)"):
        open_dataset(REF, store)
    refuse_everywhere(store, StoreAccessError, r"://\.\.\. cannot be used: a store is a folder, or s3://bucket/prefix")


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ("s3://", "names no bucket"),
        ("s3://Bucket/a", "names no bucket"),
        ("s3://localhost:9000/bucket", "another server than Amazon's is named by AWS_ENDPOINT_URL"),
        ("s3://bucket/a/../b", r"'\.\.' may not stand in its prefix"),
        ("s3://bucket/a//b", "'' may not stand in its prefix"),
        ("s3://bucket/a b", "'a b' may not stand in its prefix"),
        (Path("s3://bucket/a"), "a URL that went through pathlib"),
    ],
)
def test_a_url_that_names_no_bucket_is_refused(store, message):
    refuse_everywhere(store, StoreAccessError, message)


def test_a_newer_store_is_refused_with_both_numbers(tmp_path):
    (tmp_path / "ola-store.json").write_text(json.dumps({"ola_store": STORE_FORMAT + 1, "new": []}))
    refuse_everywhere(tmp_path, NewerFormatError, f"has format {STORE_FORMAT + 1}, this release reads up to")


@pytest.mark.parametrize("marker", [b"", b"{", b"[]", b"{}", b"\xff", b"\0\0\0"])
def test_a_damaged_marker_is_named_with_its_remedy(marker, tmp_path):
    (tmp_path / "ola-store.json").write_bytes(marker)
    refuse_everywhere(tmp_path, StoreAccessError, "is not a store's marker; restore it from a copy")


def test_a_missing_store_lists_nothing_and_opens_with_the_remedy(tmp_path):
    assert list_datasets(tmp_path / "none") == []
    with pytest.raises(StoreAccessError, match=r"there is no store at .*none; `ola materialize"):
        open_dataset(REF, tmp_path / "none")
    assert not (tmp_path / "none").exists()
