"""Refs read back as written, and no name that is accepted leads out of the store."""

from itertools import product
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from storage_schema.errors import InvalidNameError
from storage_schema.refs import Dataset, Ref, check_name, check_tag, name_dataset, parse_ref

WORD = r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}"
words = st.from_regex(WORD, fullmatch=True)
parts = st.from_regex(rf"{WORD}(\+{WORD}){{0,2}}", fullmatch=True)
datasets = st.builds(Dataset, parts, parts, parts)
NAMING = {"variant": None, "seed": None, "unit": "sentence", "form": "original", "limit": None}


@given(datasets, words)
@settings(deadline=None, max_examples=100)
def test_a_ref_reads_back_as_it_is_written(dataset, version):
    ref = Ref(dataset, version)
    assert parse_ref(str(ref)) == ref
    assert parse_ref(str(dataset)) == Ref(dataset, "latest")


@given(st.text(alphabet="abv1./_+@-~ \\\n\0é%*?", max_size=24))
@example("../b/c")
@example("a/../c")
@example("a/b/..")
@example("a/b/c@..")
@example("a/b/c@_tags")
@example("a+../b/c")
@example("a/b/c\n")
@settings(deadline=None, max_examples=500)
def test_whatever_parses_stays_in_the_store(text):
    try:
        ref = parse_ref(text)
    except InvalidNameError:
        return
    root = Path("/store").resolve()
    for name in (ref.dataset.model, ref.dataset.corpus, ref.dataset.split, ref.version):
        assert not set(name) & set("/\\\n\0 ~*?%")
        assert name[0].isascii()
        assert name[0].isalnum()
        assert ".." not in name.split("+")
    path = root.joinpath(*str(ref.dataset).split("/"), ref.version)
    assert Path(path).resolve().relative_to(root).parts == (*str(ref.dataset).split("/"), ref.version)


@pytest.mark.parametrize("text", ["a/b", "a/b/c/d", "/a/b/c", "a//c", "a/b/c@", "a/b/c@v1@v2", "", "@v1", "a/b/c@+x"])
def test_what_is_no_ref_is_refused_with_the_form_it_should_have(text):
    with pytest.raises(InvalidNameError):
        parse_ref(text)


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "_work", "-v", "a/b", "a b", "a\n", "é", "a+b", "x" * 129])
def test_names_with_other_characters_are_refused_with_the_rule(name):
    with pytest.raises(InvalidNameError, match=r"corpus name .* is not allowed: use letters"):
        check_name(name, "corpus")


@pytest.mark.parametrize("part", ["", "..", "_samples", "a+", "+a", "a++b", "a+.b", "a+_b"])
def test_a_dataset_refuses_bad_parts_wherever_they_stand(part):
    for position in range(3):
        names = ["a", "b", "c"]
        names[position] = part
        with pytest.raises(InvalidNameError):
            Dataset(*names)


@pytest.mark.parametrize("tag", ["v1", "v12", "latest", "deadbeef", "0" * 64, "12345678"])
def test_tags_that_read_as_another_kind_of_version_are_refused(tag):
    with pytest.raises(InvalidNameError, match="reads as"):
        check_tag(tag)


@given(words)
@settings(deadline=None, max_examples=100)
def test_an_accepted_tag_is_neither_number_nor_fingerprint_nor_latest(tag):
    try:
        check_tag(tag)
    except InvalidNameError:
        return
    ref = parse_ref(f"a/b/c@{tag}")
    assert (ref.number, ref.is_fingerprint, ref.version != "latest") == (None, False, True)


@pytest.mark.parametrize(
    ("version", "number", "is_fingerprint"),
    [
        ("v1", 1, False), ("v120", 120, False), ("v0", None, False), ("v01", None, False), ("deadbee", None, False),
        ("deadbeef", None, True), ("DEADBEEF", None, False), ("a" * 64, None, True), ("a" * 65, None, False),
    ],
)  # fmt: skip
def test_kinds_of_version_are_told_apart(version, number, is_fingerprint):
    ref = parse_ref(f"a/b/c@{version}")
    assert (ref.number, ref.is_fingerprint) == (number, is_fingerprint)


def test_modifiers_say_what_was_changed():
    named = name_dataset(
        "org/smollm2", "ud-ewt", "test", variant="random", seed=7, unit="words:50", form="words", limit=200
    )
    assert str(named) == "org--smollm2+random.7/ud-ewt+words50+joined/test+first200"
    assert str(name_dataset("m", "c", "s", **NAMING)) == "m/c/s"
    assert str(name_dataset("m", "c", "s", **{**NAMING, "unit": "document"})) == "m/c+document/s"


def test_settings_that_change_what_is_in_a_dataset_give_distinct_names():
    grid = list(
        product(
            [(None, None), ("random", 0), ("random", 1), ("half-random", 0)],
            ["sentence", "document", "words:5", "words:50"],
            ["original", "words"],
            [None, 1, 10],
            ["train", "dev"],
        )
    )
    names = {
        name_dataset("m", "c", split, variant=variant, seed=seed, unit=unit, form=form, limit=limit)
        for (variant, seed), unit, form, limit, split in grid
    }
    assert len(names) == len(grid)


@pytest.mark.parametrize("model", ["../evil", "..", "_work", "/etc", "a\n"])
def test_a_model_name_that_would_leave_the_store_is_refused(model):
    with pytest.raises(InvalidNameError):
        name_dataset(model, "c", "s", **NAMING)
