"""Sentence-level samples -> the text form and text unit that a recipe asks for, with ids.

Heads are 1-based word numbers, word ranges 0-based [start, stop).
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from pipeline.corpora.records import join_words
from pipeline.corpora.registry import Corpus
from storage_schema.errors import CorpusFormatError, InvalidRecipeError, UnknownCorpusError
from storage_schema.samples import WORD_ANNOTATIONS, Relation, Sample, compute_content_hash, identify_samples

SLICED = ("upos", "xpos", "chunks", "entities")
BIO_FIELDS = ("chunks", "entities")


@dataclass(frozen=True)
class SampleSet:
    """The samples of one split in one unit and form."""

    samples: list[Sample]
    """In corpus order, with `sample_id`."""
    content_sha256: str
    num_skipped_lines: int
    """Blank lines (hub: rows) of the source."""
    num_dropped_words: int
    """Words of the incomplete last chunks under `words:N`."""


def read_samples(corpus: Corpus, split: str, unit: str = "sentence", form: str = "original") -> SampleSet:
    """The samples of a split, in corpus order, with ids and content hash.

    Args:
        corpus: as `open_corpus` gives it.
        split: one of `corpus.splits`.
        unit: `sentence` as the corpus has them; `document`: the consecutive sentences of one document joined by single
            spaces; `words:N`: each document cut into chunks of exactly N words, an incomplete last one dropped. A
            sentence without a document is a document of its own.
        form: `original`, or `words`: each sentence's text is its words joined by single spaces.

    Raises:
        InvalidRecipeError: another unit or form.
        UnknownCorpusError: the corpus has no such split, or its files are missing.
        CorpusFormatError: a file breaks its format, or no document has N words.
    """
    num_words = parse_unit(unit)
    if form not in ("original", "words"):
        raise InvalidRecipeError(f"text form {form!r}, expected `original` or `words`")
    if split not in corpus.splits:
        raise UnknownCorpusError(f"corpus {corpus.name} has no split {split!r}, only {', '.join(corpus.splits)}")
    records = corpus.read(split)
    samples = records.samples
    if form == "words":
        samples = [_use_words_form(sample) for sample in samples]
    num_dropped = 0
    if unit != "sentence":
        samples = [join_sentences(sentences) for sentences in _iter_documents(samples)]
    if num_words is not None:
        chunks = [chunk for document in samples for chunk in cut_document(document, num_words)]
        if not chunks:
            raise CorpusFormatError(f"no document of {corpus.name}/{split} has {num_words} words; take a smaller unit")
        num_dropped = sum(len(document.words) % num_words for document in samples)
        samples = chunks
    if not samples:
        raise CorpusFormatError(f"{corpus.name}/{split} holds no sample")
    identified = identify_samples(samples, unit, form)
    return SampleSet(identified, compute_content_hash(identified), records.num_skipped_lines, num_dropped)


def parse_unit(unit: str) -> int | None:
    """N of `words:N`, None for `sentence` and `document`.

    Raises:
        InvalidRecipeError: another unit.
    """
    if unit in ("sentence", "document"):
        return None
    if match := re.fullmatch(r"words:([1-9][0-9]{0,8})", unit):
        return int(match[1])
    raise InvalidRecipeError(f"text unit {unit!r}, expected `sentence`, `document` or `words:N` with N at least 1")


def join_sentences(sentences: list[Sample]) -> Sample:
    """The sentences of one document as one sample, their texts joined by single spaces.

    Heads and relations are re-based; a field that any sentence lacks is None, and so is a label they do not share.
    """
    if len(sentences) == 1:
        return sentences[0]
    spans: list[tuple[int, int]] = []
    values: dict[str, list[Any]] = {
        name: [] for name in (*WORD_ANNOTATIONS, "relations") if all(getattr(s, name) is not None for s in sentences)
    }
    words: list[str] = []
    num_characters = 0
    for sentence in sentences:
        num_words = len(words)
        for name, joined in values.items():
            joined.extend(_shift_values(name, getattr(sentence, name), num_words))
        spans.extend((start + num_characters, stop + num_characters) for start, stop in sentence.word_spans)
        words.extend(sentence.words)
        num_characters += len(sentence.text) + 1
    annotation: dict[str, Any] = {name: tuple(joined) for name, joined in values.items()}
    labels = {sentence.label for sentence in sentences}
    return Sample(
        text=" ".join(sentence.text for sentence in sentences),
        words=tuple(words),
        word_spans=tuple(spans),
        label=labels.pop() if len(labels) == 1 else None,
        document_id=sentences[0].document_id,
        **annotation,
    )


def cut_document(document: Sample, num_words: int) -> Iterator[Sample]:
    """The consecutive chunks of exactly `num_words` words; an incomplete last one is left out.

    A chunk's text runs from its first word's start to its last word's end. An `I-` tag at a cut becomes `B-`. Trees and
    relations are cut, so that heads, deprels and relations are None.
    """
    for first in range(0, len(document.words) - num_words + 1, num_words):
        words = slice(first, first + num_words)
        spans = document.word_spans[words]
        offset = spans[0][0]
        tags: dict[str, Any] = {}
        for name in SLICED:
            if (values := getattr(document, name)) is not None:
                tags[name] = values[words]
                if first and name in BIO_FIELDS and tags[name][0].startswith("I-"):
                    tags[name] = ("B-" + tags[name][0][2:], *tags[name][1:])
        yield Sample(
            text=document.text[offset : spans[-1][1]],
            words=document.words[words],
            word_spans=tuple((start - offset, stop - offset) for start, stop in spans),
            label=document.label,
            document_id=document.document_id,
            **tags,
        )


def _use_words_form(sample: Sample) -> Sample:
    text, spans = join_words(sample.words)
    return replace(sample, text=text, word_spans=spans)


def _iter_documents(samples: list[Sample]) -> Iterator[list[Sample]]:
    for document_id, sentences in groupby(samples, key=lambda sample: sample.document_id):
        if document_id is None:
            yield from ([sentence] for sentence in sentences)
        else:
            yield list(sentences)


def _shift_values(name: str, values: Iterable[Any], num_words: int) -> Iterable[Any]:
    if name == "heads":
        return [head and head + num_words for head in values]
    if name == "relations":
        return [
            Relation(
                (r.first[0] + num_words, r.first[1] + num_words),
                (r.second[0] + num_words, r.second[1] + num_words),
                r.label,
            )
            for r in values
        ]
    return values
