"""A store in a bucket holds the bytes of a store in a folder, and keeps the same promises."""

import os
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from pipeline.cli import main
from pipeline.materialize import materialize
from pipeline.readers import list_datasets, open_dataset
from pipeline.store.layout import connect, open_store, open_store_for_writing
from pipeline.store.verify import verify_version
from pipeline.store.versions import resolve_ref
from storage_schema.errors import (
    CorruptedObjectError,
    DamagedError,
    MissingObjectError,
    StoreAccessError,
    StoreUnavailableError,
)
from tests.conftest import PROJECT

TEXTS = [f"Text number {number} of {'rather ' * (number % 3)}few." for number in range(9)]
SETTINGS = {"maps": (1, "rollout"), "partition_samples": 3}
REF = "tiny-llama/lines/all@v1"
TENSORS = ("maps", "attention_mask", "input_ids", "word_ids", "offsets")


@pytest.fixture(scope="module")
def lines_file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "lines.txt"
    file.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def folder(tiny_llama, lines_file, tmp_path_factory) -> Path:
    """The same recipe in a folder."""
    store = tmp_path_factory.mktemp("folder") / "store"
    assert materialize(str(tiny_llama), f"text:{lines_file}", store=store, **SETTINGS) == [REF]
    return store


@pytest.fixture
def url(folder, bucket) -> str:
    """A bucket with the objects of the folder."""
    source, target = connect(folder), connect(bucket)
    for key in source.list_sizes(""):
        target.replace(key, source.read(key))
    return bucket


def read_objects(store: str | Path) -> dict[str, bytes]:
    objects = connect(store)
    return {key: objects.read(key) for key in objects.list_sizes("") if not key.endswith("run.json")}


def list_keys(url: str) -> list[str]:
    manifest = resolve_ref(open_store(url), REF).manifest
    return [*(f"{manifest.dataset}/{manifest.folder}/{name}" for name in manifest.objects), manifest.samples_path]


def verify(url: str) -> list[str]:
    store = open_store(url)
    return verify_version(store, resolve_ref(store, REF))


def read_everything(url: str | Path) -> list[tuple]:
    return [
        (item.sample, item.maps.numpy().tobytes(), item.input_ids.tolist(), item.offsets.tolist())
        for item in open_dataset(REF, url)
    ]


def test_a_bucket_gets_the_bytes_that_a_folder_gets(tiny_llama, lines_file, folder, bucket):
    assert list_datasets(bucket) == []
    assert materialize(str(tiny_llama), f"text:{lines_file}", store=bucket, **SETTINGS) == [REF]
    assert read_objects(bucket) == read_objects(folder)
    assert list_datasets(bucket) == list_datasets(folder)
    assert connect(bucket).list_names("_work") == []
    assert verify(bucket) == []


def test_every_command_works_on_a_bucket(url, tmp_path, capsys):
    picture = tmp_path / "map.svg"
    for command in (
        ["ls"], ["ls", "--json"], ["show", REF], ["verify", REF], ["tag", REF, "best"], ["show", f"{REF[:-3]}@best"],
        ["plot", REF, "--sample", "1", "--output", str(picture)],
    ):  # fmt: skip
        assert main([*command, "--store", url]) == 0
    assert picture.stat().st_size
    assert "best" in capsys.readouterr().out
    assert [entry.tags for entry in list_datasets(url)] == [("best",)]


def test_a_bucket_is_mended_exported_and_cleared_like_a_folder(tiny_llama, lines_file, url, folder, tmp_path, capsys):
    objects, before = connect(url), read_objects(url)
    keys = list_keys(url)
    for key in keys[::2]:
        objects.replace(key, before[key][:-1])
    for key in [*keys[1::2], "tiny-llama/lines/all/v1.json"]:
        objects.remove(key)
    assert main(["repair", REF, "--store", url, "--model", str(tiny_llama), "--corpus", f"text:{lines_file}"]) == 0
    assert read_objects(url) == before
    assert verify(url) == []
    assert main(["export", REF, str(tmp_path / "out"), "--store", url]) == 0
    exported = {key: data for key, data in read_objects(tmp_path / "out").items() if key != "README.md"}
    assert exported == before
    assert main(["diff", REF, REF, "--store", url, "--other-store", str(folder)]) == 0
    assert "objects: the same" in capsys.readouterr().out
    assert main(["rm", REF, "--store", url]) == 0
    assert main(["gc", "--apply", "--store", url]) == 0
    assert read_objects(url).keys() == {"ola-store.json", "tiny-llama/lines/all/v1.json"}
    assert list_datasets(url) == []


def test_an_up_to_date_version_costs_no_model_and_writes_nothing(tiny_llama, lines_file, url, capsys):
    before = read_objects(url)
    code = (
        "import sys; from pipeline.cli import main; code = main(sys.argv[1:]); "
        "sys.exit(code or ('pipeline.extraction' in sys.modules))"
    )
    command = ["materialize", "--model", str(tiny_llama), "--corpus", f"text:{lines_file}", "--maps", "1,rollout"]
    done = subprocess.run(
        [sys.executable, "-c", code, *command, "--partition-samples", "3", "--store", url],
        capture_output=True, text=True, check=False, cwd=PROJECT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "up to date" in done.stdout
    assert read_objects(url) == before


@pytest.fixture
def own_forkserver():
    """A fork server of this test alone: one that an earlier test started has that test's environment."""
    forkserver._forkserver._stop()
    yield
    forkserver._forkserver._stop()


@pytest.mark.usefixtures("own_forkserver")
@pytest.mark.parametrize(("num_workers", "start_method"), [(0, None), (2, "spawn"), (2, "forkserver")])
def test_a_loader_reads_from_a_bucket_what_it_reads_from_a_folder(num_workers, start_method, url, folder):
    options = {"batch_size": 4, "shuffle": True, "seed": 3}
    dataset = open_dataset(REF, url)
    assert dataset[0].maps.any()
    batches = dataset.loader(**options, num_workers=num_workers, start_method=start_method)
    for found, expected in zip(batches, open_dataset(REF, folder).loader(**options), strict=True):
        assert found.sample_ids == expected.sample_ids
        assert all(torch.equal(getattr(found, name), getattr(expected, name)) for name in TENSORS)
        assert found.samples == expected.samples


@pytest.mark.parametrize("start_method", ["fork", None])
def test_our_loader_spawns_where_forked_workers_would_hang_and_says_so(start_method, url):
    dataset = open_dataset(REF, url)
    with pytest.warns(UserWarning, match="workers start by `spawn`"):
        loader = dataset.loader(batch_size=4, num_workers=1, start_method=start_method)
    assert sum(len(batch) for batch in loader) == len(TEXTS)


def test_a_forked_process_is_told_that_it_would_hang(url):
    dataset = open_dataset(REF, url)
    batches = DataLoader(dataset, collate_fn=dataset.collate, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(StoreUnavailableError, match=r"start workers with `spawn` or `forkserver`"):
        list(batches)


def test_what_was_read_is_read_again_without_the_bucket(url, tmp_path):
    objects = connect(url)
    dataset = open_dataset(REF, url)
    expected = [item.maps for item in dataset]
    for key in list_keys(url):
        objects.remove(key)
    assert all(torch.equal(item.maps, maps) for item, maps in zip(dataset, expected, strict=True))
    with pytest.raises(MissingObjectError):
        open_dataset(REF, url)


def test_what_one_process_read_another_reads_from_the_same_cache(url):
    manifest = resolve_ref(open_store(url), REF).manifest
    expected = connect(url).read(manifest.samples_path)
    connect(url).localize(manifest.samples_path, manifest.samples)
    connect(url).remove(manifest.samples_path)
    assert connect(url).localize(manifest.samples_path, manifest.samples).read_bytes() == expected


def test_a_damaged_copy_in_the_cache_is_fetched_again(url, folder, tmp_path):
    expected = read_everything(folder)
    assert read_everything(url) == expected
    copies = [path for path in (tmp_path / "cache" / "objects").rglob("*") if path.is_file()]
    assert len(copies) > len(TEXTS)
    for path, data in zip(copies, ([b"", b"torn"] * len(copies)), strict=False):
        path.write_bytes(data)
    copies[0].unlink()
    assert read_everything(url) == expected
    assert all(path.stat().st_size > len(b"torn") for path in copies)


def damage(url: str, key: str, kind: str) -> None:
    objects = connect(url)
    data = bytearray(objects.read(key))
    data[len(data) // 2] ^= 1
    if kind == "delete":
        objects.remove(key)
    else:
        objects.replace(key, {"flip": bytes(data), "truncate": bytes(data[:-1]), "empty": b""}[kind])


@pytest.mark.parametrize("kind", ["flip", "truncate", "empty", "delete"])
def test_damage_to_any_object_is_named_by_verify_and_by_readers(kind, url, tmp_path, monkeypatch):
    objects = connect(url)
    keys = list_keys(url)
    for number, key in enumerate(keys if kind == "flip" else keys[::5]):
        monkeypatch.setenv("OLA_CACHE", str(tmp_path / str(number)))
        data = objects.read(key)
        damage(url, key, kind)
        (finding,) = verify(url)
        assert objects.describe(key) in finding
        error = {"flip": DamagedError, "delete": MissingObjectError}.get(kind, CorruptedObjectError)
        with pytest.raises(error, match=objects.describe(key).replace("+", r"\+")):
            read_everything(url)
        objects.replace(key, data)
    assert verify(url) == []


def test_a_manifest_that_is_damaged_or_newer_is_named(url):
    key = "tiny-llama/lines/all/v1.json"
    damage(url, key, "flip")
    with pytest.raises(CorruptedObjectError, match=connect(url).describe(key)):
        open_dataset(REF, url)
    assert main(["ls", "--store", url]) == 1


def test_stores_in_one_bucket_do_not_see_one_another(url):
    other = f"{url}-other"
    open_store_for_writing(other)
    assert list_datasets(other) == []
    assert connect(other).list_names("") == ["ola-store.json"]
    connect(other).remove_tree("")
    assert verify(url) == []


def test_a_prefix_with_other_things_is_no_store_and_stays_untouched(bucket):
    connect(bucket).replace("thesis.tex", b"mine")
    for action in (open_store, open_store_for_writing, list_datasets):
        with pytest.raises(StoreAccessError, match=f"{bucket} is no store: it has no ola-store.json"):
            action(bucket)
    assert connect(bucket).list_sizes("") == {"thesis.tex": 4}


SECRETS = ("VERY-SECRET-KEY", "VERY-SECRET-TOKEN", "ANOTHER-SECRET")


def assert_refused(capfd, arguments: list[str], code: int, *messages: str) -> None:
    assert main(arguments) == code
    captured = capfd.readouterr()
    for message in messages:
        assert message in captured.err
    assert "Traceback" not in captured.err
    for secret in SECRETS:
        assert secret not in captured.out + captured.err


def test_credentials_that_may_only_read_do_read_and_are_refused_before_a_model_is_loaded(
    url, tiny_llama, lines_file, monkeypatch, capfd
):
    before = read_objects(url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "READONLY")
    assert main(["verify", REF, "--store", url]) == 0
    command = ["materialize", "--model", str(tiny_llama), "--corpus", f"text:{lines_file}", "--maps", "1"]
    assert_refused(capfd, [*command, "--store", url], 2, "cannot be written", "403 AccessDenied")
    assert_refused(capfd, ["tag", REF, "best", "--store", url], 2, "cannot be written")
    assert read_objects(url) == before


def test_wrong_credentials_are_named_and_never_shown(url, monkeypatch, capfd):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "WRONG")
    for command in (["ls"], ["show", REF], ["verify", REF]):
        assert_refused(capfd, [*command, "--store", url], 1, "403 SignatureDoesNotMatch", "AWS_ACCESS_KEY_ID")


def test_a_server_that_does_not_answer_is_named_without_what_its_url_holds(url, monkeypatch, capfd):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:ANOTHER-SECRET@127.0.0.1:1")
    assert_refused(capfd, ["ls", "--store", url], 1, "127.0.0.1 cannot be reached")


@pytest.mark.parametrize(
    "endpoint", ["http://[ANOTHER-SECRET", "ANOTHER-SECRET:9000", "ftp://ANOTHER-SECRET", "http://", "http://a:99999"]
)
def test_an_endpoint_that_is_no_url_is_refused_without_repeating_it(endpoint, url, monkeypatch, capfd):
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    assert_refused(capfd, ["ls", "--store", url], 2, "AWS_ENDPOINT_URL is no server's URL")


def test_a_missing_bucket_is_named(bucket, tiny_llama, lines_file, capfd):
    missing = "s3://no-such-bucket/store"
    assert_refused(capfd, ["ls", "--store", missing], 1, missing, "127.0.0.1 has no such bucket")
    command = ["materialize", "--model", str(tiny_llama), "--corpus", f"text:{lines_file}", "--store", missing]
    assert_refused(capfd, command, 1, "has no such bucket")


def test_errors_carry_no_answer_of_the_server_behind_them(url, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "WRONG")
    with pytest.raises(StoreUnavailableError) as refusal:
        open_store(url)
    error: BaseException | None = refusal.value
    while error is not None:
        assert not any(secret in str(error) for secret in SECRETS)
        error = error.__cause__ or error.__context__


def test_an_open_dataset_pickles_without_credentials(url):
    import pickle

    data = pickle.dumps(open_dataset(REF, url))
    assert not any(secret.encode() in data for secret in SECRETS)
    assert os.environ["AWS_ACCESS_KEY_ID"].encode() not in data
