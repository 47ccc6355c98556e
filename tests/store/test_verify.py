"""`verify` finds what digests cannot: values that are no attention, and an index that does not fit the samples."""

import json
import shutil
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import zarr

from pipeline.store.layout import open_store
from pipeline.store.samples import write_samples
from pipeline.store.verify import verify_version
from pipeline.store.versions import resolve_ref
from storage_schema.errors import CorruptedObjectError
from storage_schema.manifest import Manifest, compute_manifest_digest
from storage_schema.samples import from_table

TEXTS = [f"Text number {number} of {'rather ' * (number % 3)}few." for number in range(6)]
LONG = " ".join(f"word{number}" for number in range(60))
SETTINGS = {"maps": (1,), "partition_samples": 3, "store_dtype": "float32"}


@pytest.fixture(scope="module", params=["tiny_bert", "tiny_llama"])
def whole(request, materialize_text) -> Path:
    return materialize_text(request.getfixturevalue(request.param), TEXTS, **SETTINGS)[0]


@pytest.fixture
def store(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "store"))


def locate(store: Path) -> tuple[Path, dict, Path]:
    """The manifest's path, its values, and the version's group."""
    (path,) = store.glob("tiny-*/lines/all/v1.json")
    manifest = json.loads(path.read_bytes())
    return path, manifest, path.parent / manifest["folder"]


def record_again(store: Path) -> None:
    """Records what the objects are now, as if they had been written so."""
    path, manifest, group = locate(store)

    def describe(file: Path) -> dict:
        data = file.read_bytes()
        return {"sha256": sha256(data).hexdigest(), "num_bytes": len(data)}

    files = {path.relative_to(group).as_posix(): path for path in group.rglob("*") if path.is_file()}
    beside = ("run.json", "manifest.json")
    manifest["objects"] = {name: describe(path) for name, path in files.items() if name not in beside}
    manifest["samples"] = describe(store / manifest["samples_path"])
    del manifest["manifest_sha256"]
    manifest["manifest_sha256"] = compute_manifest_digest(manifest)
    path.write_text(json.dumps(manifest))
    (group / "manifest.json").write_bytes(Manifest.decode(path.read_bytes(), "here").encode())


def verify(store: Path) -> list[str]:
    folder = open_store(store)
    path, _, _ = locate(store)
    return verify_version(folder, resolve_ref(folder, str(path.parent.relative_to(store))))


def edit_row(store: Path, edit) -> None:
    group = zarr.open_group(locate(store)[2], mode="r+")
    row = group["order_1"][1]
    edit(row, int(group["start"][4]), int(group["length"][4]))
    group["order_1"][1] = row
    record_again(store)


def spoil_sum(row, start, length):
    row[start + 1] += 0.01


def spoil_sign(row, start, length):
    row[start + 1] += 1.0
    row[start + 2] -= 1.0


def spoil_finite(row, start, length):
    row[start + 1] = np.nan


def clear(row, start, length):
    row[start : start + length] = 0


@pytest.mark.parametrize("edit", [spoil_sum, spoil_sign, spoil_finite, clear])
def test_rows_that_are_no_attention_are_found_by_map_sample_and_partition(edit, store):
    edit_row(store, edit)
    (finding, *_) = verify(store)
    assert "map 1 of sample 4 (partition 1): a row sums to" in finding


def test_values_beyond_the_last_sample_are_found(store):
    def write_beyond(row, start, length):
        row[-1] = 0.5

    edit_row(store, write_beyond)
    assert verify(store) == ["map 1, partition 1: values beyond its last sample"]


@pytest.mark.parametrize(
    ("array", "value", "message"),
    [
        ("sample_hash", 1, "not the ids of the sample table"),
        ("sample_repetition", 1, "not the ids of the sample table"),
        ("word_ids", 1000, "a token belongs to a word that its sample does not have"),
        ("word_ids", -2, "a token belongs to a word that its sample does not have"),
        ("length", 2, "not the manifest's numbers of samples and tokens"),
        ("start", 7, ""),
        ("start", 10**9, ""),
        ("partition", 1, ""),
        ("partition", 9, ""),
        ("offsets", 10**6, ""),
    ],
)
def test_an_index_that_does_not_fit_is_a_finding_not_a_crash(array, value, message, store):
    group = zarr.open_group(locate(store)[2], mode="r+")
    values = group[array][...]
    values[1] = value
    group[array][...] = values
    record_again(store)
    findings = verify(store)
    assert findings
    assert any(message in finding for finding in findings)


@pytest.mark.parametrize("change", ["fewer", "other order"])
def test_another_sample_table_is_a_finding_not_a_crash(change, store):
    _, manifest, _ = locate(store)
    path = store / manifest["samples_path"]
    table = pq.read_table(path)
    pq.write_table(table.slice(0, 4) if change == "fewer" else table.take([1, 0, 2, 3, 4, 5]), path)
    record_again(store)
    assert any("content hash" in finding for finding in verify(store))


def test_a_sample_table_with_other_content_is_not_taken_over_by_a_writer(store):
    _, manifest, _ = locate(store)
    path = store / manifest["samples_path"]
    table = pq.read_table(path)
    samples = from_table(table)
    pq.write_table(table.take([1, 0, 2, 3, 4, 5]), path)
    with pytest.raises(CorruptedObjectError, match=f"{path} does not hold the samples of lines/all"):
        write_samples(open_store(store), "lines", "all", manifest["recipe"]["corpus_sha256"], samples)


@pytest.mark.parametrize("model", ["tiny_bert", "tiny_llama"])
@pytest.mark.parametrize("store_dtype", ["float16", "float32"])
def test_long_and_one_token_samples_are_within_the_tolerance(model, store_dtype, request, materialize_text):
    texts = [LONG, "a", *(LONG[number:] for number in range(1, 9))]
    store, ref = materialize_text(
        request.getfixturevalue(model), texts, store_dtype=store_dtype, maps=(1, 2, 3, "rollout")
    )
    version = resolve_ref(open_store(store), ref)
    heard = []
    assert verify_version(open_store(store), version, lambda done, total: heard.append((done, total))) == []
    assert version.manifest.counts.truncated_samples > 0
    assert heard[-1] == (40, 40)
