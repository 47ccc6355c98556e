"""Versions get numbers one after the other, never change, and are found by every name they have."""

import hashlib
import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.store.catalog import list_datasets
from pipeline.store.layout import Store, open_store_for_writing
from pipeline.store.versions import list_versions, publish_version, resolve_ref, tag_version
from storage_schema.errors import CorruptedObjectError, DatasetNotFoundError, InvalidNameError, NewerFormatError
from storage_schema.manifest import Counts, Manifest, StoredObject
from storage_schema.recipe import Recipe, encode_canonical
from storage_schema.refs import Dataset

DATASET = Dataset("m", "lines", "all")
RECIPE = Recipe(
    model="m", model_revision="sha256:" + "a" * 64, tokenizer_sha256="b" * 64, corpus="lines", split="all",
    corpus_sha256="c" * 64, max_length=64, maps=(1,),
)  # fmt: skip
TEXTS = ["One short text.", "Another text that is a little longer than the first one."]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pipeline.readers", "pipeline.extraction", "pipeline.store.writer"])


def describe(**changes) -> Manifest:
    recipe = replace(RECIPE, **changes)
    return Manifest(
        dataset=DATASET, recipe=recipe, folder=recipe.fingerprint[:16], packing="full", num_layers=1, pad_token_id=0,
        samples_path="_samples/lines/all/c.parquet", samples=StoredObject("d" * 64, 1), objects={},
        counts=Counts(samples=0, tokens=0, words=0, cells=0, partitions=0, truncated_samples=0, words_without_token=0,
                      skipped_lines=0, dropped_words=0),
        statistics={}, model_licence="none", corpus_licence="none",
    )  # fmt: skip


@pytest.fixture
def store(tmp_path) -> Store:
    return open_store_for_writing(tmp_path / "store")


def publish_all(store: Store, barrier, limits: list[int], outcomes) -> None:
    barrier.wait()
    outcomes.put([(limit, publish_version(store, describe(limit=limit)).number) for limit in limits])


def publish_together(store: Store, work: list[list[int]]) -> list[tuple[int, int]]:
    barrier, outcomes = CONTEXT.Barrier(len(work)), CONTEXT.Queue()
    processes = [CONTEXT.Process(target=publish_all, args=(store, barrier, limits, outcomes)) for limits in work]
    for process in processes:
        process.start()
    results = [pair for _ in processes for pair in outcomes.get(timeout=60)]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return results


def test_recipes_published_at_once_get_different_numbers_and_none_is_lost(store):
    results = publish_together(store, [[process * 10 + turn + 1 for turn in range(8)] for process in range(6)])
    assert sorted(number for _, number in results) == list(range(1, 49))
    stored = {version.number: version.manifest.recipe.limit for version in list_versions(store, DATASET)}
    assert stored == {number: limit for limit, number in results}
    assert not list(store.objects.path.rglob("*.partial"))


def test_one_recipe_published_by_many_at_once_is_one_version(store):
    limits = list(range(1, 25))
    results = publish_together(store, [limits] * 8)
    assert sorted(version.manifest.recipe.limit for version in list_versions(store, DATASET)) == limits
    assert len(set(results)) == len(limits)


def test_publishing_again_gives_the_first_version_and_changes_nothing(store):
    first = publish_version(store, describe())
    path = (store.objects.path / str(DATASET)) / "v1.json"
    before = path.read_bytes(), path.stat().st_mtime_ns
    assert publish_version(store, replace(describe(), model_licence="another")) == first
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_numbers_go_up_past_nine_and_over_gaps(store):
    for limit in range(1, 12):
        publish_version(store, describe(limit=limit))
    ((store.objects.path / str(DATASET)) / "v4.json").unlink()
    assert publish_version(store, describe(limit=99)).number == 12
    assert [version.number for version in list_versions(store, DATASET)] == [1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12]
    assert resolve_ref(store, str(DATASET)).number == 12


def test_a_version_is_found_by_number_tag_fingerprint_and_latest(store):
    first, second = (publish_version(store, describe(limit=limit)) for limit in (1, 2))
    tag_version(store, first, "paper")
    fingerprint = first.manifest.recipe.fingerprint
    for version in ("v1", "paper", fingerprint, fingerprint[:8], fingerprint[:30]):
        assert resolve_ref(store, f"{DATASET}@{version}") == first
    for ref in (str(DATASET), f"{DATASET}@latest", f"{DATASET}@v2"):
        assert resolve_ref(store, ref) == second
    assert str(first.ref) == f"{DATASET}@v1"


def test_a_tag_moves_and_lists_with_its_version(store):
    first, second = (publish_version(store, describe(limit=limit)) for limit in (1, 2))
    tag_version(store, first, "best")
    tag_version(store, first, "also")
    tag_version(store, second, "best")
    assert resolve_ref(store, f"{DATASET}@best") == second
    assert [entry.tags for entry in list_datasets(store.objects.path)] == [("also",), ("best",)]
    with pytest.raises(InvalidNameError, match="reads as"):
        tag_version(store, first, "v7")


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("other/lines/all", "has no dataset other/lines/all; it has: m/lines/all"),
        ("m/lines/all@v3", r"has no version 'v3'; it has: v1 \([0-9a-f]{12}\), v2"),
        ("m/lines/all@paper", "has no tag 'paper'; tags: best"),
        ("m/lines/all@00000000", "has no version '00000000'; it has: v1"),
    ],
)
def test_what_is_not_there_is_named_with_what_is(ref, message, store):
    for limit in (1, 2):
        tag_version(store, publish_version(store, describe(limit=limit)), "best")
    with pytest.raises(DatasetNotFoundError, match=message):
        resolve_ref(store, ref)


def find_two_that_share_a_prefix() -> tuple[int, int]:
    template = encode_canonical(RECIPE.to_json())
    seen: dict[bytes, int] = {}
    for limit in range(1, 400_000):
        text = template.replace(b'"limit":null', b'"limit":%d' % limit)
        digest = hashlib.sha256(text).digest()[:4]
        if digest in seen:
            return seen[digest], limit
        seen[digest] = limit
    raise AssertionError("no two of the recipes share eight hex digits")


def test_a_fingerprint_that_fits_two_versions_is_ambiguous_and_both_are_named(store):
    versions = [publish_version(store, describe(limit=limit)) for limit in find_two_that_share_a_prefix()]
    one, other = (version.manifest.recipe.fingerprint for version in versions)
    assert one[:8] == other[:8]
    with pytest.raises(DatasetNotFoundError, match=f"several versions .*{one[:12]}.*{other[:12]}"):
        resolve_ref(store, f"{DATASET}@{one[:8]}")
    assert resolve_ref(store, f"{DATASET}@{one[:20]}") == versions[0]


def read_tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock"))
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_another_setting_is_another_version_beside_untouched_ones(tiny_bert, materialize_text):
    store, first = materialize_text(tiny_bert, TEXTS)
    assert first.endswith("@v1")
    before = read_tree(store)
    changes = [{"max_length": 16}, {"maps": (1,)}, {"store_dtype": "float32"}, {"partition_samples": 1}]
    for number, settings in enumerate(changes, start=2):
        _, ref = materialize_text(tiny_bert, TEXTS, store=store, **settings)
        assert ref == first.replace("@v1", f"@v{number}")
        after = read_tree(store)
        assert {path: after[path] for path in before} == before
        before = after
    assert [entry.ref.partition("@")[2] for entry in list_datasets(store)] == ["v1", "v2", "v3", "v4", "v5"]
    assert materialize_text(tiny_bert, TEXTS, store=store)[1] == first
    assert read_tree(store) == before


def test_texts_that_differ_are_another_version_of_the_same_dataset(tiny_bert, materialize_text):
    store, first = materialize_text(tiny_bert, TEXTS)
    _, second = materialize_text(tiny_bert, [*TEXTS, "A third."], store=store)
    assert (first[-3:], second[-3:]) == ("@v1", "@v2")


def test_a_damaged_manifest_is_named_wherever_its_dataset_is_read(store):
    publish_version(store, describe())
    path = (store.objects.path / str(DATASET)) / "v1.json"
    path.write_bytes(path.read_bytes()[:-20])
    for action in (lambda: resolve_ref(store, str(DATASET)), lambda: list_datasets(store.objects.path)):
        with pytest.raises(CorruptedObjectError, match=str(path)):
            action()


def test_a_newer_manifest_is_named(store):
    publish_version(store, describe())
    path = (store.objects.path / str(DATASET)) / "v1.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "ola_manifest": 99}))
    with pytest.raises(NewerFormatError, match=f"{path}: manifest format 99"):
        resolve_ref(store, str(DATASET))


@pytest.mark.parametrize("damage", ["damaged", "newer"])
def test_one_bad_manifest_leaves_the_versions_beside_it_readable_by_number(damage, store):
    first = publish_version(store, describe(limit=1))
    publish_version(store, describe(limit=2))
    path = (store.objects.path / str(DATASET)) / "v2.json"
    path.write_text('{"ola_manifest": 99}' if damage == "newer" else "{")
    assert resolve_ref(store, f"{DATASET}@v1") == first


def test_a_manifest_under_another_datasets_name_is_refused(store):
    publish_version(store, describe())
    other = store.objects.path / "other" / "lines" / "all"
    other.mkdir(parents=True)
    (other / "v1.json").write_bytes(((store.objects.path / str(DATASET)) / "v1.json").read_bytes())
    with pytest.raises(CorruptedObjectError, match="other/lines/all"):
        resolve_ref(store, "other/lines/all")


@pytest.mark.parametrize("record", [b"", b"{}", b"[]", b'{"fingerprint": ""}', b'{"fingerprint": 5}'])
def test_a_damaged_tag_is_named(record, store):
    tag_version(store, publish_version(store, describe()), "best")
    path = (store.objects.path / str(DATASET)) / "_tags" / "best.json"
    path.write_bytes(record)
    with pytest.raises(CorruptedObjectError, match=f"{path} is not a tag"):
        resolve_ref(store, f"{DATASET}@best")
