"""Damage to any object of a version is found and named, and never read as data."""

import contextlib
import json
import os
import resource
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from pipeline.readers import open_dataset
from pipeline.store.layout import open_store
from pipeline.store.open import StoredVersion
from pipeline.store.presence import check_presence
from pipeline.store.samples import read_samples_table
from pipeline.store.verify import verify_version
from pipeline.store.versions import read_manifest_copy, resolve_ref, tag_version
from storage_schema.errors import CorruptedObjectError, DamagedError, MissingObjectError, OlaError
from storage_schema.samples import from_table

TEXTS = [f"Text number {number} of {'rather ' * (number % 3)}few." for number in range(9)]
REF = "tiny-llama/lines/all@v1"
DATASET = "tiny-llama/lines/all"


@pytest.fixture(scope="module")
def whole(tiny_llama, materialize_text) -> Path:
    store, ref = materialize_text(tiny_llama, TEXTS, maps=(1, "rollout"), partition_samples=3)
    assert ref == REF
    return store


@pytest.fixture
def store(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "store"))


def read_manifest(store: Path) -> dict:
    return json.loads((store / DATASET / "v1.json").read_bytes())


def list_objects(store: Path) -> list[Path]:
    manifest = read_manifest(store)
    group = store / DATASET / manifest["folder"]
    return [*(group / path for path in manifest["objects"]), store / manifest["samples_path"]]


def verify(store: Path) -> list[str]:
    folder = open_store(store)
    return verify_version(folder, resolve_ref(folder, REF))


def read_everything(store: Path) -> list[tuple]:
    dataset = open_dataset(REF, store)
    return [
        (item.sample, item.maps.numpy().tobytes(), *(item.input_ids, item.word_ids, item.offsets)) for item in dataset
    ]


def is_same(found: list[tuple], expected: list[tuple]) -> bool:
    return all(
        one[:2] == other[:2] and all((a == b).all() for a, b in zip(one[2:], other[2:], strict=True))
        for one, other in zip(found, expected, strict=True)
    )


def flip(data: bytes) -> bytes:
    changed = bytearray(data)
    changed[len(data) // 2] ^= 1
    return bytes(changed)


def test_a_flipped_bit_in_any_object_is_found_by_verify_and_never_read_as_data(store):
    expected = read_everything(store)
    for path in list_objects(store):
        data = path.read_bytes()
        path.write_bytes(flip(data))
        assert [finding for finding in verify(store) if str(path) in finding], path
        if path.name == "zarr.json":
            with contextlib.suppress(OlaError):
                assert is_same(read_everything(store), expected), path
        else:
            is_index = path.parent.name == "c" or (path.parents[1].name == "c" and "offsets" in path.parts)
            with pytest.raises(DamagedError, match=str(path).partition("/c/")[0] if is_index else str(path)):
                read_everything(store)
        path.write_bytes(data)
    assert verify(store) == []


@pytest.mark.parametrize("damage", ["truncate", "empty", "delete"])
def test_an_object_that_is_cut_or_gone_is_named_by_verify_and_at_open(damage, store):
    for path in list_objects(store):
        data = path.read_bytes()
        if damage == "delete":
            path.unlink()
        else:
            path.write_bytes(data[:-1] if damage == "truncate" else b"")
        (finding,) = verify(store)
        assert str(path) in finding
        with pytest.raises(MissingObjectError if damage == "delete" else CorruptedObjectError, match=str(path)):
            open_dataset(REF, store)
        path.write_bytes(data)


def test_objects_in_each_others_place_are_named(store):
    objects = list_objects(store)
    contents = {path: path.read_bytes() for path in objects}
    expected = read_everything(store)
    for path, other in pairwise(objects):
        if contents[path] == contents[other]:
            continue
        path.write_bytes(contents[other])
        other.write_bytes(contents[path])
        findings = verify(store)
        assert all(any(str(one) in finding for finding in findings) for one in (path, other))
        try:
            assert is_same(read_everything(store), expected), path
        except DamagedError as error:
            assert str(path) in str(error) or str(other) in str(error)  # noqa: PT017
        path.write_bytes(contents[path])
        other.write_bytes(contents[other])


def flip_each(data: bytes, positions: range):
    for position in positions:
        changed = bytearray(data)
        changed[position] ^= 4
        yield position, bytes(changed)


def test_a_flipped_bit_of_the_sample_table_never_gives_other_samples(store):
    folder = open_store(store)
    version = resolve_ref(folder, REF)
    path = store / version.manifest.samples_path
    data = path.read_bytes()
    expected = from_table(StoredVersion(folder, version).samples_table)
    wrong = []
    for position, changed in flip_each(data, range(0, len(data), 11)):
        path.write_bytes(changed)
        try:
            if from_table(StoredVersion(folder, version).samples_table) != expected:
                wrong.append((position, "read as data"))
        except DamagedError as error:
            assert str(path) in str(error)  # noqa: PT017
        except Exception as error:
            wrong.append((position, type(error).__name__))
    assert wrong == []


@pytest.mark.parametrize("array", ["order_1", "rollout", "length", "start", "input_ids", "offsets"])
def test_one_bit_of_an_arrays_metadata_never_turns_its_data_into_zeros(array, store):
    # "/" and "." differ in one bit; with "." the chunks have other names, and what is absent reads as zeros.
    expected = read_everything(store)
    path = store / DATASET / read_manifest(store)["folder"] / array / "zarr.json"
    text = path.read_text()
    assert text.count('"separator": "/"') == 1
    path.write_text(text.replace('"separator": "/"', '"separator": "."'))
    try:
        found = read_everything(store)
    except DamagedError as error:
        assert str(path.parent) in str(error)  # noqa: PT017
    else:
        assert is_same(found, expected)


def edit_manifest(store: Path, **changes) -> Path:
    path = store / DATASET / "v1.json"
    path.write_text(json.dumps({**read_manifest(store), **changes}))
    return path


@pytest.mark.parametrize("data", [b"", b"{", b"null", b"\xff\xfe", b"{}"])
def test_a_destroyed_manifest_is_named(data, store):
    path = store / DATASET / "v1.json"
    path.write_bytes(data)
    for action in (lambda: open_dataset(REF, store), lambda: verify(store)):
        with pytest.raises(CorruptedObjectError, match=str(path)):
            action()


@pytest.mark.parametrize(
    "change",
    [
        {"packing": "full"},
        {"pad_token_id": 3},
        {"samples_path": "_samples/other/all/0000.parquet"},
        {"folder": "0" * 16},
    ],
    ids=str,
)
def test_an_edited_manifest_never_changes_what_is_read(change, store):
    edit_manifest(store, **change)
    with pytest.raises(DamagedError):
        open_dataset(REF, store)[0]


def test_a_manifest_that_counts_too_many_samples_is_damage_not_a_wrong_index(store):
    counts = read_manifest(store)["counts"]
    edit_manifest(store, counts={**counts, "samples": counts["samples"] + 1})
    with pytest.raises(DamagedError):
        open_dataset(REF, store)
    with pytest.raises(DamagedError):
        verify(store)


def test_a_deleted_version_folder_is_missing_not_empty(store):
    shutil.rmtree(store / DATASET / read_manifest(store)["folder"])
    with pytest.raises(MissingObjectError, match="is missing"):
        open_dataset(REF, store)
    assert len(verify(store)) == len(list_objects(store))  # with the manifest's copy, without the sample table


def test_a_file_where_a_folder_was_is_damage(store):
    shard_folder = store / DATASET / read_manifest(store)["folder"] / "order_1" / "c" / "1"
    shutil.rmtree(shard_folder)
    shard_folder.write_bytes(b"")
    with pytest.raises(DamagedError, match=str(shard_folder)):
        open_dataset(REF, store)
    assert any(str(shard_folder) in finding for finding in verify(store))


def test_damage_after_opening_is_found_when_it_is_read(store):
    dataset = open_dataset(REF, store, cache_bytes=1)
    assert dataset[0].maps.shape[0] == 2
    path = store / DATASET / read_manifest(store)["folder"] / "order_1" / "c" / "2" / "0"
    data = path.read_bytes()
    path.write_bytes(flip(data))
    with pytest.raises(CorruptedObjectError, match=str(path)):
        _ = dataset[8]
    path.unlink()
    with pytest.raises(DamagedError, match=str(path)):
        _ = dataset[7]


def test_a_shard_that_changes_after_it_was_checked_is_not_read_on(tiny_bert, materialize_text):
    texts = [f"Text {number} {'and ' * 40}more." for number in range(60)]
    store, ref = materialize_text(tiny_bert, texts, maps=(1,))
    dataset = open_dataset(ref, store, cache_bytes=1)
    path = next(store.glob("tiny-bert/lines/all/*/order_1/c/0/0"))
    data = path.read_bytes()
    expected = [dataset[index].maps for index in (0, 30, 59)]
    changed = bytearray(data)
    changed[len(data) - len(data) // 10] ^= 1  # of the last chunk, which is not the one that is read
    path.write_bytes(bytes(changed))
    with pytest.raises(CorruptedObjectError, match=f"{path} is not the one that was written"):
        _ = dataset[30]
    path.write_bytes(data)
    assert all((dataset[index].maps == maps).all() for index, maps in zip((0, 30, 59), expected, strict=True))
    path.unlink()
    with pytest.raises(MissingObjectError, match=f"{path} is missing"):
        _ = dataset[30]


@contextlib.contextmanager
def no_more_files():
    """Within it this process can open nothing."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("act", ["resolve", "tag", "copy", "check presence", "texts", "read", "verify"])
def test_want_of_open_files_is_not_called_damage(store, act):
    opened = open_store(store)
    version = resolve_ref(opened, REF)
    tag_version(opened, version, "named")
    stored = StoredVersion(opened, version)
    acts = {
        "resolve": lambda: resolve_ref(opened, REF),
        "tag": lambda: resolve_ref(opened, f"{DATASET}@named"),
        "copy": lambda: read_manifest_copy(opened, version.manifest.dataset, version.manifest.folder),
        "texts": lambda: read_samples_table(opened, version.manifest.samples_path, version.manifest.samples),
        "check presence": lambda: check_presence(opened, version),
        "read": lambda: stored.read_partition("rollout", 1),
        "verify": lambda: list(verify_version(opened, version)),
    }
    acts[act]()  # imports what it needs
    stored = StoredVersion(opened, version)
    with no_more_files(), pytest.raises(OSError, match="Too many open files"):
        acts[act]()
    acts[act]()
