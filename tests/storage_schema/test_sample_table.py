"""Sample ids depend on content alone, and the sample table keeps every field."""

import re
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage_schema.errors import CorpusFormatError
from storage_schema.samples import (
    SAMPLE_SCHEMA,
    SAMPLE_TABLE_VERSION,
    WORD_ANNOTATIONS,
    Relation,
    Sample,
    check_sample,
    compute_content_hash,
    from_table,
    identify_samples,
    join_sample_id,
    split_sample_id,
    to_table,
)

PLAIN = Sample(text="Ada wrote it.", words=("Ada", "wrote", "it", "."), word_spans=((0, 3), (4, 9), (10, 12), (12, 13)))
FULL = replace(
    PLAIN,
    upos=("PROPN", "VERB", "PRON", "PUNCT"),
    xpos=("NNP", "VBD", "PRP", "."),
    chunks=("B-NP", "B-VP", "B-NP", "O"),
    entities=("B-PER", "O", "O", "O"),
    heads=(2, 0, 2, 2),
    deprels=("nsubj", "root", "obj", "punct"),
    relations=(Relation((0, 1), (2, 3), "made"),),
    label="history",
    document_id="doc-1",
)


def identify(sample: Sample, unit: str = "sentence", form: str = "original") -> str:
    return identify_samples([sample], unit, form)[0].sample_id


def test_the_id_of_a_literal_sample_never_changes():
    assert (identify(PLAIN), identify(FULL)) == ("b1539b132c5408f1", "4f418f203a998185")


def test_ids_are_16_hex_digits_and_repetitions_are_counted():
    other = replace(PLAIN, label="x")
    ids = [sample.sample_id for sample in identify_samples([PLAIN, other, PLAIN, PLAIN, other], "sentence", "original")]
    first, second = ids[:2]
    assert re.fullmatch("[0-9a-f]{16}", first)
    assert first != second
    assert ids == [first, second, f"{first}-1", f"{first}-2", f"{second}-1"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("text", "Ada wrote it!"),
        ("words", ("Ada", "wrote", "it", "?")),
        ("word_spans", ((0, 3), (4, 9), (10, 11), (12, 13))),
        ("upos", ("NOUN", "VERB", "PRON", "PUNCT")),
        ("xpos", None),
        ("chunks", ("B-NP", "B-VP", "I-NP", "O")),
        ("entities", ("O",) * 4),
        ("heads", (2, 0, 2, 3)),
        ("deprels", ("nsubj", "root", "iobj", "punct")),
        ("relations", (Relation((2, 3), (0, 1), "made"),)),
        ("relations", (Relation((0, 1), (2, 3), "found"),)),
        ("relations", ()),
        ("label", "fiction"),
        ("label", None),
    ],
)
def test_the_id_depends_on_text_and_each_annotation(name, value):
    assert identify(replace(FULL, **{name: value})) != identify(FULL)


def test_the_id_depends_on_unit_and_form_but_not_on_the_document():
    ids = {identify(FULL, unit, form) for unit in ("sentence", "document", "words:5") for form in ("original", "words")}
    assert len(ids) == 6
    assert identify(replace(FULL, document_id="doc-2")) == identify(replace(FULL, document_id=None)) == identify(FULL)


def test_the_content_hash_covers_ids_documents_and_order():
    samples = identify_samples([PLAIN, FULL], "sentence", "original")
    moved = [samples[0], replace(samples[1], document_id="doc-2")]
    hashes = {compute_content_hash(rows) for rows in (samples, samples[::-1], moved, samples[:1], [])}
    assert len(hashes) == 5
    assert compute_content_hash(identify_samples([PLAIN, FULL], "sentence", "original")) == compute_content_hash(
        samples
    )


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6))
@settings(deadline=None, max_examples=50)
def test_ids_go_through_numbers_and_back(digest, repetition):
    joined = join_sample_id(digest, repetition)
    assert re.fullmatch(r"[0-9a-f]{16}(-[1-9][0-9]*)?", joined)
    assert split_sample_id(joined) == (digest, repetition)


@st.composite
def annotated_rows(draw):
    words = draw(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6), min_size=1))
    starts = [sum(len(word) + 1 for word in words[:index]) for index in range(len(words))]
    values = {name: draw(st.none() | st.just(tuple(words))) for name in WORD_ANNOTATIONS if name != "heads"}
    return dict(
        text=" ".join(words),
        words=tuple(words),
        word_spans=tuple((start, start + len(word)) for start, word in zip(starts, words, strict=True)),
        heads=draw(st.none() | st.just(tuple(range(len(words))))),
        relations=draw(st.none() | st.just(()) | st.just(((0, 1), (0, len(words)), words[0]))),
        label=draw(st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=3)),
        document_id=draw(st.none() | st.just("d")),
        sample_id="0" * 16,
        **values,
    )


@given(st.lists(annotated_rows(), max_size=4))
@settings(deadline=None, max_examples=50)
def test_samples_come_back_from_their_table(rows):
    samples = []
    for row in rows:
        relations = row.pop("relations")
        samples.append(Sample(**row, relations=(Relation(*relations),) if relations else relations))
    table = to_table(samples)
    assert table.schema.equals(SAMPLE_SCHEMA, check_metadata=True)
    assert from_table(table) == samples


def test_the_table_says_its_version():
    assert to_table([FULL]).schema.metadata == {b"ola_sample_table": str(SAMPLE_TABLE_VERSION).encode()}


def test_fields_without_annotation_are_null():
    row = to_table([PLAIN]).to_pylist()[0]
    filled = {name for name, value in row.items() if value is not None}
    assert filled == {"sample_id", "text", "words", "word_spans"}
    assert pa.types.is_string(SAMPLE_SCHEMA.field("text").type)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": ""}, "text with at least one word"),
        ({"text": " \t\n"}, "text with at least one word"),
        ({"words": (), "word_spans": ()}, "text with at least one word"),
        ({"word_spans": ((0, 3),)}, "4 words but 1 character spans"),
        ({"word_spans": ((0, 3), (4, 4), (10, 12), (12, 13))}, "'wrote' has span .4, 4., which is empty"),
        ({"word_spans": ((0, 3), (4, 9), (10, 12), (12, 14))}, "'.' has span .12, 14.*outside the text"),
        ({"word_spans": ((0, 3), (2, 9), (10, 12), (12, 13))}, "'wrote' has span .2, 9.*overlaps"),
        ({"word_spans": ((4, 9), (0, 3), (10, 12), (12, 13))}, "'wrote' has span .0, 3.*overlaps"),
        ({"word_spans": ((-1, 3), (4, 9), (10, 12), (12, 13))}, "'Ada' has span .-1, 3."),
        *(({name: (2, 0, 2) if name == "heads" else ("O",) * 3}, f"`{name}` has 3 values for 4 words")
          for name in WORD_ANNOTATIONS),
        ({"heads": (2, 0, 2, 5)}, "word 4 has head 5, expected 0..4"),
        ({"heads": (2, 0, 2, -1)}, "word 4 has head -1, expected 0..4"),
        ({"heads": (2, 1, 0, 3)}, "heads form a cycle through word"),
        ({"heads": (1, 0, 2, 2)}, "heads form a cycle through word 1"),
        ({"relations": (Relation((0, 1), (2, 5), "r"),)}, r"relation 'r' has word range \[2, 5\) outside 0..4"),
        ({"relations": (Relation((1, 1), (2, 3), "r"),)}, r"relation 'r' has word range \[1, 1\)"),
        ({"relations": (Relation((-1, 1), (2, 3), "r"),)}, r"relation 'r' has word range \[-1, 1\)"),
    ],
)  # fmt: skip
def test_an_inconsistent_sample_is_refused_with_its_place(changes, message):
    with pytest.raises(CorpusFormatError, match=f"^file, line 7: .*{message}"):
        check_sample(replace(FULL, **changes), "file, line 7")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"word_spans": ((0, 3), (4, 9), (4, 9), (12, 13))},
        {"heads": (0, 0, 0, 0)},
        {"heads": (2, 3, 4, 0)},
        {"relations": (Relation((0, 4), (0, 1), "nested"),)},
    ],
)
def test_a_consistent_sample_passes_unchanged(changes):
    sample = replace(FULL, **changes)
    assert check_sample(sample, "here") is sample
