"""The annotated sample table: one row a text, its words and its annotation, as Parquet.

Axis names: W words of a sample. Word positions are 0-based; character positions are Python string indexes.
This module computes no tokens: tokens belong to a model, samples to a corpus.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pyarrow as pa

from storage_schema.errors import CorpusFormatError

SAMPLE_TABLE_VERSION = 1

SPAN = pa.struct([("start", pa.int32()), ("stop", pa.int32())])
RELATION = pa.struct([("first", SPAN), ("second", SPAN), ("label", pa.string())])

SAMPLE_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("words", pa.list_(pa.string()), nullable=False),
        pa.field("word_spans", pa.list_(SPAN), nullable=False),
        pa.field("upos", pa.list_(pa.string())),
        pa.field("xpos", pa.list_(pa.string())),
        pa.field("chunks", pa.list_(pa.string())),
        pa.field("entities", pa.list_(pa.string())),
        pa.field("heads", pa.list_(pa.int32())),
        pa.field("deprels", pa.list_(pa.string())),
        pa.field("relations", pa.list_(RELATION)),
        pa.field("label", pa.string()),
        pa.field("document_id", pa.string()),
    ],
    metadata={"ola_sample_table": str(SAMPLE_TABLE_VERSION)},
)

WORD_ANNOTATIONS = ("upos", "xpos", "chunks", "entities", "heads", "deprels")
"""Fields with one value a word."""


@dataclass(frozen=True)
class Relation:
    """A labelled pair of word ranges `[start, stop)`; `first` and `second` are the label's e1 and e2."""

    first: tuple[int, int]
    second: tuple[int, int]
    label: str


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One text with its annotation. A field is None where the corpus has no such annotation."""

    text: str
    """The exact string that tokenizers see."""
    words: tuple[str, ...]
    word_spans: tuple[tuple[int, int], ...]
    """[start, stop) of each word in `text`, in order. None is empty; only words of one contraction may share a span."""
    upos: tuple[str, ...] | None = None
    """Universal part-of-speech tags."""
    xpos: tuple[str, ...] | None = None
    """The corpus's own (for English: Penn Treebank) part-of-speech tags."""
    chunks: tuple[str, ...] | None = None
    """BIO tags of base phrases, as in CoNLL-2000."""
    entities: tuple[str, ...] | None = None
    """BIO tags of named entities."""
    heads: tuple[int, ...] | None = None
    """Dependency heads as in UD: 1-based word number, 0 for a root."""
    deprels: tuple[str, ...] | None = None
    relations: tuple[Relation, ...] | None = None
    label: str | None = None
    """The class of the document that the text stands in."""
    document_id: str | None = None
    sample_id: str = ""
    """Stable content id; empty until `identify_samples` has seen the whole split."""


_CONTENT = tuple(field.name for field in fields(Sample) if field.name not in ("sample_id", "document_id"))


_BIO = re.compile(r"O|[BI]-\S+")


def check_sample(sample: Sample, where: str) -> Sample:
    """The sample itself, once it is consistent.

    Args:
        where: names file and line (or record) in the error.

    Raises:
        CorpusFormatError: the text is blank; a span is empty, outside the text or over its predecessor; an annotation
            has not one value a word; a chunk or entity is no BIO tag; a head is out of range or on a cycle; a
            relation's range is empty or out of range.
    """

    def refuse(rule: str) -> CorpusFormatError:
        return CorpusFormatError(f"{where}: {rule}")

    num_words = len(sample.words)
    if not sample.text.strip() or num_words == 0:
        raise refuse("a sample needs a text with at least one word, this one is empty")
    if len(sample.word_spans) != num_words:
        raise refuse(f"{num_words} words but {len(sample.word_spans)} character spans")
    previous = (0, 0)
    for word, span in zip(sample.words, sample.word_spans, strict=True):
        follows = span == previous or previous[1] <= span[0]
        if not (follows and span[0] < span[1] <= len(sample.text)):
            raise refuse(
                f"word {word!r} has span {span}, which is empty, outside the text or overlaps the word before it"
            )
        previous = span
    for name in WORD_ANNOTATIONS:
        values = getattr(sample, name)
        if values is not None and len(values) != num_words:
            raise refuse(f"`{name}` has {len(values)} values for {num_words} words; give one a word")
    for name in ("chunks", "entities"):
        for tag in getattr(sample, name) or ():
            if not _BIO.fullmatch(tag):
                raise refuse(f"`{name}` has the tag {tag!r}; expected O, B-TYPE or I-TYPE")
    if sample.heads is not None:
        _check_heads(sample.heads, refuse)
    for relation in sample.relations or ():
        for start, stop in (relation.first, relation.second):
            if not 0 <= start < stop <= num_words:
                raise refuse(f"relation {relation.label!r} has word range [{start}, {stop}) outside 0..{num_words}")
    return sample


def _check_heads(heads: Sequence[int], refuse: Any) -> None:
    for number, head in enumerate(heads, start=1):
        if not 0 <= head <= len(heads):
            raise refuse(f"word {number} has head {head}, expected 0..{len(heads)}")
    rooted: set[int] = {0}
    for word in range(1, len(heads) + 1):
        path: set[int] = set()
        while word not in rooted:
            if word in path:
                raise refuse(f"heads form a cycle through word {word}")
            path.add(word)
            word = heads[word - 1]  # noqa: PLW2901
        rooted |= path


def _content(sample: Sample) -> dict[str, Any]:
    values = {name: getattr(sample, name) for name in _CONTENT}
    if sample.relations is not None:
        values["relations"] = [{"first": r.first, "second": r.second, "label": r.label} for r in sample.relations]
    return values


def identify_samples(samples: Iterable[Sample], unit: str, form: str) -> list[Sample]:
    """The samples of one split, in order, each with its `sample_id`.

    The id is the first 16 hex digits of the SHA-256 over unit, form, text and annotation; the k-th repetition within
    the split gets `-k` appended. It depends on no model, tokenizer or length.
    """
    seen: Counter[str] = Counter()
    identified = []
    for sample in samples:
        content = json.dumps([unit, form, _content(sample)], sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        digest = hashlib.sha256(content.encode()).hexdigest()[:16]
        repetition = seen[digest]
        seen[digest] += 1
        identified.append(replace(sample, sample_id=f"{digest}-{repetition}" if repetition else digest))
    return identified


def split_sample_id(sample_id: str) -> tuple[int, int]:
    """The id as two integers, as the store keeps it: the 64 bits of its hash, and its repetition (0 for the first)."""
    digest, _, repetition = sample_id.partition("-")
    return int(digest, 16), int(repetition or 0)


def join_sample_id(digest: int, repetition: int) -> str:
    """The inverse of `split_sample_id`."""
    return f"{digest:016x}-{repetition}" if repetition else f"{digest:016x}"


def compute_content_hash(samples: Iterable[Sample]) -> str:
    """SHA-256 (64 hex digits) over a split's ids and document ids, in order; ids already cover text and annotation."""
    digest = hashlib.sha256(f"ola-samples-{SAMPLE_TABLE_VERSION}\n".encode())
    for sample in samples:
        digest.update(json.dumps([sample.sample_id, sample.document_id]).encode() + b"\n")
    return digest.hexdigest()


def to_table(samples: Sequence[Sample]) -> pa.Table:
    """The samples as an Arrow table of `SAMPLE_SCHEMA`."""

    def span(pair: tuple[int, int]) -> dict[str, int]:
        return {"start": pair[0], "stop": pair[1]}

    def row(sample: Sample) -> dict[str, Any]:
        values = {field.name: getattr(sample, field.name) for field in fields(sample)}
        values["word_spans"] = [span(pair) for pair in sample.word_spans]
        if sample.relations is not None:
            values["relations"] = [
                {"first": span(r.first), "second": span(r.second), "label": r.label} for r in sample.relations
            ]
        return values

    return pa.Table.from_pylist([row(sample) for sample in samples], schema=SAMPLE_SCHEMA)


def from_table(table: pa.Table) -> list[Sample]:
    """The inverse of `to_table`."""

    def pair(span: dict[str, int]) -> tuple[int, int]:
        return span["start"], span["stop"]

    def sample(row: dict[str, Any]) -> Sample:
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in row.items()
        }
        values["word_spans"] = tuple(pair(span) for span in row["word_spans"])
        if row["relations"] is not None:
            values["relations"] = tuple(
                Relation(pair(r["first"]), pair(r["second"]), r["label"]) for r in row["relations"]
            )
        return Sample(**values)

    return [sample(row) for row in table.to_pylist()]
