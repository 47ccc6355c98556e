"""A manifest reads back as written, byte for byte the same each time, and a damaged one is refused by name."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from storage_schema.errors import CorruptedObjectError, NewerFormatError
from storage_schema.manifest import (
    MANIFEST_FORMAT,
    TOMBSTONE_FORMAT,
    Counts,
    Manifest,
    MapStatistics,
    StoredObject,
    Tombstone,
    decode_record,
)
from storage_schema.recipe import RECIPE_SCHEMA, Recipe
from storage_schema.refs import Dataset

RECIPE = Recipe(
    model="org/name",
    model_revision="commit:" + "a" * 40,
    tokenizer_sha256="b" * 64,
    corpus="lines",
    split="all",
    corpus_sha256="c" * 64,
    max_length=64,
    maps=(1, "rollout"),
)
COUNTS = Counts(
    samples=3, tokens=30, words=12, cells=310, partitions=1, truncated_samples=0, words_without_token=1,
    skipped_lines=2, dropped_words=0,
)  # fmt: skip
STATISTICS = MapStatistics(mean=0.1, std=1 / 3, min=0.0, max=1.0)
MANIFEST = Manifest(
    dataset=Dataset("org--name", "lines", "all"),
    recipe=RECIPE,
    folder=RECIPE.fingerprint[:16],
    packing="full",
    num_layers=12,
    pad_token_id=7,
    samples_path="_samples/lines/all/cccc.parquet",
    samples=StoredObject("d" * 64, 99),
    objects={"zarr.json": StoredObject("e" * 64, 10), "order_1/c/0/0": StoredObject("f" * 64, 32)},
    counts=COUNTS,
    statistics={"order_1": STATISTICS, "rollout": STATISTICS},
    model_licence="Apache-2.0",
    corpus_licence="© nobody, «none»",
    number=3,
)
TOMBSTONE = Tombstone(dataset=MANIFEST.dataset, number=3, recipe=RECIPE)


def edit(**changes: object) -> bytes:
    return json.dumps({**json.loads(MANIFEST.encode()), **changes}).encode()


def test_a_manifest_reads_back_as_written():
    assert Manifest.decode(MANIFEST.encode(), "here") == MANIFEST


def test_equal_manifests_have_equal_bytes_however_their_objects_were_collected():
    turned = replace(
        MANIFEST,
        objects=dict(reversed(MANIFEST.objects.items())),
        statistics=dict(reversed(MANIFEST.statistics.items())),
    )
    assert turned.encode() == MANIFEST.encode()
    assert Manifest.decode(MANIFEST.encode(), "here").encode() == MANIFEST.encode()


def test_the_bytes_are_sorted_json_with_fingerprint_and_format():
    values = json.loads(MANIFEST.encode())
    assert list(values) == sorted(values)
    assert (values["ola_manifest"], values["fingerprint"]) == (MANIFEST_FORMAT, RECIPE.fingerprint)
    assert values["dataset"] == "org--name/lines/all"
    assert values["recipe"] == RECIPE.to_json()


def test_the_size_counts_the_objects_of_the_group_alone():
    assert MANIFEST.num_bytes == 42


def test_a_statistic_that_is_not_a_number_is_never_written():
    broken = replace(MANIFEST, statistics={"order_1": replace(STATISTICS, std=float("nan"))})
    with pytest.raises(ValueError, match="not JSON compliant"):
        broken.encode()


def test_a_newer_format_is_named_with_both_numbers():
    newer = edit(ola_manifest=MANIFEST_FORMAT + 1, recipe={"unheard": "of"})
    with pytest.raises(NewerFormatError, match=f"here: manifest format {MANIFEST_FORMAT + 1}.*up to {MANIFEST_FORMAT}"):
        Manifest.decode(newer, "here")


def test_a_newer_recipe_is_named_with_the_manifest_that_holds_it():
    newer = edit(recipe={**RECIPE.to_json(), "schema": RECIPE_SCHEMA + 1})
    with pytest.raises(NewerFormatError, match="here"):
        Manifest.decode(newer, "here")


@pytest.mark.parametrize("key", sorted(json.loads(MANIFEST.encode())))
def test_a_manifest_without_one_of_its_keys_is_damaged(key):
    values = json.loads(MANIFEST.encode())
    del values[key]
    with pytest.raises(CorruptedObjectError, match="here"):
        Manifest.decode(json.dumps(values).encode(), "here")


@pytest.mark.parametrize("length", range(0, len(MANIFEST.encode()) - 1, 97))
def test_a_truncated_manifest_is_damaged(length):
    with pytest.raises(CorruptedObjectError, match="here: not a manifest"):
        Manifest.decode(MANIFEST.encode()[:length], "here")


@pytest.mark.parametrize("data", [b"[]", b"null", b"\xff\xfe", b"{}", b"1", b'{"ola_manifest": "1"}', b"\0" * 50])
def test_other_bytes_are_no_manifest(data):
    with pytest.raises(CorruptedObjectError, match="here: not a manifest"):
        Manifest.decode(data, "here")


@pytest.mark.parametrize("key", ["model", "max_length", "maps", "store_dtype"])
def test_a_recipe_that_its_fingerprint_does_not_fit_is_damaged(key):
    other = {"model": "other", "max_length": 65, "maps": [1, 2], "store_dtype": "float32"}
    with pytest.raises(CorruptedObjectError, match="fingerprint"):
        Manifest.decode(edit(recipe={**RECIPE.to_json(), key: other[key]}), "here")


ODD_VALUES = [
    {"fingerprint": None},
    {"fingerprint": 5},
    {"fingerprint": "0" * 64},
    {"packing": "fuml"},
    {"folder": "../../elsewhere"},
    {"folder": "0" * 16},
    {"samples_path": "../outside.parquet"},
    {"samples_path": "/etc/passwd"},
    {"objects": {"../v1.json": {"sha256": "e" * 64, "num_bytes": 10}}},
    {"objects": {"zarr.json": {"sha256": "e" * 64, "num_bytes": "10"}}},
    {"pad_token_id": "7"},
    {"counts": {**json.loads(MANIFEST.encode())["counts"], "samples": "3"}},
    {"number": None},
    {"number": "3"},
    {"ola_manifest": 1},
    {"unheard_of": 1},
]


@pytest.fixture(scope="module")
def outcomes() -> list[str]:
    """What decoding each of `ODD_VALUES` raises in a process of its own, where no type check of the suite helps."""
    code = (
        "import sys, json\nfrom storage_schema.manifest import Manifest\n"
        "for text in json.load(sys.stdin):\n"
        "    try: Manifest.decode(text.encode(), 'here')\n"
        "    except Exception as error: print(type(error).__name__, str(error)[:4])\n"
        "    else: print('accepted')"
    )
    texts = json.dumps([edit(**changes).decode() for changes in ODD_VALUES])
    done = subprocess.run([sys.executable, "-c", code], input=texts, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("case", range(len(ODD_VALUES)), ids=[str(values)[:50] for values in ODD_VALUES])
def test_values_that_no_writer_writes_are_damage(case, outcomes):
    assert outcomes[case] == "CorruptedObjectError here"


def test_a_changed_digit_anywhere_is_damage():
    # The manifest decides how bytes are read (packing, pad id, counts), so its own bytes need a check too.
    with pytest.raises(CorruptedObjectError, match="here"):
        Manifest.decode(edit(pad_token_id=MANIFEST.pad_token_id + 1), "here")


def test_a_manifest_of_the_first_format_reads_back_as_written_without_a_number():
    first = replace(MANIFEST, number=None)
    values = json.loads(first.encode())
    assert values["ola_manifest"] == 1
    assert "number" not in values
    assert Manifest.decode(first.encode(), "here") == first


def test_a_tombstone_reads_back_in_a_manifests_place():
    assert decode_record(TOMBSTONE.encode(), "here") == TOMBSTONE
    assert decode_record(MANIFEST.encode(), "here") == MANIFEST


def test_a_newer_tombstone_is_named_with_both_numbers():
    newer = {**json.loads(TOMBSTONE.encode()), "ola_removed": TOMBSTONE_FORMAT + 1}
    with pytest.raises(NewerFormatError, match=f"here: tombstone format {TOMBSTONE_FORMAT + 1}.*{TOMBSTONE_FORMAT}"):
        decode_record(json.dumps(newer).encode(), "here")


@pytest.mark.parametrize("key", ["dataset", "number", "fingerprint", "recipe"])
def test_a_damaged_tombstone_is_named(key):
    values = json.loads(TOMBSTONE.encode())
    for changed in ({k: v for k, v in values.items() if k != key}, {**values, key: "0" * 64}):
        with pytest.raises(CorruptedObjectError, match="here: not the record of a removed version"):
            decode_record(json.dumps(changed).encode(), "here")
