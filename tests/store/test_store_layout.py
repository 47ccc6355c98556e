"""A version is plain Zarr with checksums, laid out as documented, and every object of it is on record."""

import json
import re
import shutil
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import zarr

from pipeline.readers import open_dataset
from pipeline.store.catalog import list_datasets
from pipeline.store.layout import open_store
from pipeline.store.verify import verify_version
from pipeline.store.versions import resolve_ref

TEXTS = [f"Text number {number} of a {'rather ' * (number % 5)}small corpus." for number in range(10)]
SETTINGS = {"maps": (1, 2, "rollout"), "partition_samples": 4}


@pytest.fixture(scope="module", params=["tiny_bert", "tiny_llama"])
def stored(request, materialize_text):
    """(store, ref, manifest as JSON, the version's folder)."""
    store, ref = materialize_text(request.getfixturevalue(request.param), TEXTS, **SETTINGS)
    dataset = store / ref.partition("@")[0]
    manifest = json.loads((dataset / "v1.json").read_bytes())
    return store, ref, manifest, dataset / manifest["folder"]


def list_files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_store_holds_marker_samples_manifest_and_group_alone(stored):
    store, ref, manifest, group = stored
    dataset = ref.partition("@")[0]
    files = list_files(store)
    beside = {f"{dataset}/{group.name}/{name}" for name in ("run.json", "manifest.json")}
    expected = {"ola-store.json", manifest["samples_path"], f"{dataset}/v1.json", *beside}
    assert files == expected | {f"{dataset}/{group.name}/{path}" for path in manifest["objects"]}
    assert (group / "manifest.json").read_bytes() == (store / dataset / "v1.json").read_bytes()
    assert json.loads((store / "ola-store.json").read_bytes()) == {"ola_store": 1}
    assert manifest["samples_path"] == f"_samples/lines/all/{manifest['recipe']['corpus_sha256'][:16]}.parquet"
    assert group.name == manifest["fingerprint"][:16]
    assert not any((store / "_work").iterdir())


def test_every_object_is_on_record_with_its_size_and_digest(stored):
    store, _, manifest, group = stored
    recorded = {group / path: record for path, record in manifest["objects"].items()}
    recorded[store / manifest["samples_path"]] = manifest["samples"]
    for path, record in recorded.items():
        data = path.read_bytes()
        assert record == {"num_bytes": len(data), "sha256": sha256(data).hexdigest()}
    assert list_files(group) - set(manifest["objects"]) == {"run.json", "manifest.json"}


def test_there_is_no_zarr_metadata_above_the_version(stored):
    store, _, _, group = stored
    for folder in group.relative_to(store).parents:
        assert not (store / folder / "zarr.json").exists()


def test_one_partition_is_one_row_and_one_shard(stored):
    _, _, manifest, group = stored
    assert manifest["counts"]["partitions"] == 3
    for name in ("order_1", "order_2", "rollout"):
        assert list_files(group / name / "c") == {"0/0", "1/0", "2/0"}
        array = zarr.open_array(group / name, mode="r")
        assert array.shape == (3, 4 * 1024 * 1024)
        assert array.shards == (1, array.shape[1])
        assert array.chunks == (1, 64 * 1024)
        assert array.dtype == np.float16
        assert array.metadata.dimension_names == ("partition", "cell")
    assert "order_0" not in list_files(group)


def test_every_array_is_shuffled_by_bits_and_checksummed_last(stored):
    _, _, manifest, group = stored
    arrays = [path for path in manifest["objects"] if path.endswith("/zarr.json")]
    assert len(arrays) == 8 + 3
    for path in arrays:
        (codec, *others) = json.loads((group / path).read_bytes())["codecs"]
        sharded = codec["name"] == "sharding_indexed"
        assert sharded is bool(re.match("order|rollout", path))
        codecs = codec["configuration"]["codecs"] if sharded else [codec, *others]
        assert [codec["name"] for codec in codecs] == ["bytes", "blosc", "crc32c"]
        assert codecs[1]["configuration"]["shuffle"] == "bitshuffle"
        assert codecs[1]["configuration"]["cname"] == "zstd"
        if sharded:
            assert codec["configuration"]["index_codecs"][-1]["name"] == "crc32c"


def test_rollout_says_its_scale(stored):
    _, _, manifest, group = stored
    attributes = dict(zarr.open_array(group / "rollout", mode="r").attrs)
    assert attributes == {"scale": 2.0 ** -manifest["num_layers"]}


def read_plainly(group: zarr.Group, name: str, sample: int, packing: str) -> np.ndarray:
    partition, start, length = (int(group[key][sample]) for key in ("partition", "start", "length"))
    mask = np.ones((length, length), bool) if packing == "full" else np.tri(length, dtype=bool)
    values = np.zeros((length, length), np.float32)
    values[mask] = group[name][partition, start : start + mask.sum()]
    return values


def test_zarr_and_numpy_alone_read_what_the_reader_reads(stored):
    store, ref, manifest, folder = stored
    group = zarr.open_group(folder, mode="r")
    dataset = open_dataset(ref, store)
    for index, item in enumerate(dataset):
        for name, values in zip(("order_1", "order_2", "rollout"), item.maps.numpy(), strict=True):
            assert np.array_equal(read_plainly(group, name, index, manifest["packing"]), values)
        first = int(group["length"][:index].sum())
        assert np.array_equal(group["input_ids"][first:][: len(item.input_ids)], item.input_ids.numpy())


def test_cells_beyond_the_last_sample_are_zero(stored):
    _, _, manifest, folder = stored
    group = zarr.open_group(folder, mode="r")
    lengths = group["length"][8:]
    used = int((lengths**2 if manifest["packing"] == "full" else lengths * (lengths + 1) // 2).sum())
    row = group["order_1"][2]
    assert row[used - 1] > 0
    assert not row[used:].any()


def test_dask_reads_it_without_our_code(stored):
    dask = pytest.importorskip("dask.array", reason="dask is not installed")
    _, _, _, folder = stored
    lazy = dask.from_zarr(str(folder), component="order_1")
    assert np.array_equal(lazy[0, :100].compute(), zarr.open_group(folder, mode="r")["order_1"][0, :100])


def test_the_same_work_gives_the_same_bytes_in_another_store(tiny_bert, materialize_text):
    stores = [materialize_text(tiny_bert, TEXTS, **SETTINGS)[0] for _ in range(2)]
    contents = [
        {path: (store / path).read_bytes() for path in list_files(store) if not path.endswith("run.json")}
        for store in stores
    ]
    assert contents[0] == contents[1]


def test_nothing_stored_holds_a_path_of_this_machine(stored):
    store, _, _, _ = stored
    for path in store.rglob("*"):
        if path.is_file():
            assert str(store).encode() not in path.read_bytes()


def test_a_moved_and_copied_store_works(stored, tmp_path):
    store, ref, _, _ = stored
    shutil.copytree(store, tmp_path / "first")
    moved = (tmp_path / "first").rename(tmp_path / "other place")
    assert list_datasets(moved) == list_datasets(store)
    folder = open_store(moved)
    assert verify_version(folder, resolve_ref(folder, ref)) == []
    assert (open_dataset(ref, moved)[3].maps == open_dataset(ref, store)[3].maps).all()


def test_the_run_is_described_beside_the_record(stored):
    _, _, _, group = stored
    run = json.loads((group / "run.json").read_bytes())
    assert {"began", "ended", "host", "device", "threads", "versions"} <= set(run)
    assert {"torch", "transformers", "zarr", "numpy"} <= set(run["versions"])
