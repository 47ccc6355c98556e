"""CoNLL-U files: Universal Dependencies' format, with three additions for what UD does not annotate.

    # label = CLASS                    the class of the sentence's document
    # relation = LABEL FIRST SECOND    a labelled pair of word ranges, each `3-4` or `5`, 1-based and inclusive
    Chunk=TAG, Entity=TAG in MISC      BIO tags; a word without the key is `O` where any word of the file carries it

A file in which some sentence has a relation has relations everywhere (none for the other sentences). Bracketed `Entity`
values, as in GUM, are coreference and are ignored. Enhanced dependencies, features and lemmas are not read.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.corpora.records import Span, SplitRecords, find_word, iter_lines, join_words, read_text_file
from pipeline.corpora.records import require_samples as require
from storage_schema.errors import CorpusFormatError
from storage_schema.samples import Relation, Sample, check_sample

NUM_FIELDS = 10
ID, FORM, UPOS, XPOS, HEAD, DEPREL, MISC = 0, 1, 3, 4, 6, 7, 9
MISC_KEYS = {"Chunk": "chunks", "Entity": "entities"}
EMPTY_NODE = re.compile(r"[0-9]+\.[0-9]+")
BIO_TAG = re.compile(r"O|[BI]-\S+")
WORD_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


@dataclass
class _Sentence:
    """One block of the file as it is read; `where` strings are `FILE:LINE`."""

    document_id: str | None = None
    num_documents: int = 0
    text: str | None = None
    label: str | None = None
    rows: list[list[str]] = field(default_factory=list)
    row_places: list[str] = field(default_factory=list)
    ranges: dict[int, tuple[int, str, str]] = field(default_factory=dict)
    """0-based start of a multiword range -> its stop, form and where."""
    relations: list[tuple[Relation, str]] = field(default_factory=list)
    tags: dict[str, list[str | None]] = field(default_factory=lambda: {name: [] for name in MISC_KEYS.values()})


def read_conllu(path: Path) -> SplitRecords:
    """One sample a sentence.

    The text is `# text`, else the words joined by single spaces. Words are the lines with integer ids. The members of a
    multiword range have consecutive spans where their forms concatenate to the range's form, else all share its span.
    Empty nodes are left out. A field that is `_` for all words of a sentence is None. `# newdoc` opens a document.

    Raises:
        UnknownCorpusError: there is no such file.
        CorpusFormatError: the file is a folder, binary, not UTF-8, or has no sentence; a line has not ten fields; ids
            are not consecutive; a head is no integer, out of range or on a cycle; a range's bounds are wrong; a tag is
            not BIO; the words are not those of `# text`. Names `FILE:LINE`.
    """
    sentences = list(_iter_sentences(path, read_text_file(path)))
    carried = [name for name in MISC_KEYS.values() if any(any(sentence.tags[name]) for sentence in sentences)]
    has_relations = any(sentence.relations for sentence in sentences)
    return require([_make_sample(sentence, carried, has_relations) for sentence in sentences], path)


def _iter_sentences(path: Path, text: str) -> Iterator[_Sentence]:
    sentence = _Sentence()
    for number, line in iter_lines(text + "\n\n"):
        where = f"{path}:{number}"
        if line.startswith("#"):
            _read_comment(sentence, line, where)
        elif line.strip():
            _read_row(sentence, line.split("\t"), where)
        elif sentence.rows:
            _check_bounds(sentence)
            yield sentence
            sentence = _Sentence(sentence.document_id, sentence.num_documents)
        elif sentence.text is not None:
            raise CorpusFormatError(f"{where}: `# text` without words; give the sentence's words or remove the comment")


def _read_comment(sentence: _Sentence, line: str, where: str) -> None:
    key, _, value = line[1:].partition("=")
    key = key.strip()
    if key == "text":
        sentence.text = value.removeprefix(" ")
    elif key == "label":
        sentence.label = value.strip() or None
    elif key == "relation":
        sentence.relations.append((_parse_relation(value, where), where))
    elif key in ("newdoc", "newdoc id"):
        sentence.num_documents += 1
        sentence.document_id = value.strip() or f"newdoc-{sentence.num_documents}"


def _parse_relation(value: str, where: str) -> Relation:
    parts = value.rsplit(maxsplit=2)
    matches = [WORD_RANGE.fullmatch(part) for part in parts[1:]]
    if len(parts) != 3 or not matches[0] or not matches[1]:
        raise CorpusFormatError(f"{where}: expected `# relation = LABEL 3-4 5`, found {value.strip()!r}")
    bounds = [(int(match[1]) - 1, int(match[2] or match[1])) for match in matches if match]
    return Relation(bounds[0], bounds[1], parts[0].strip())


def _read_row(sentence: _Sentence, fields: list[str], where: str) -> None:
    if len(fields) != NUM_FIELDS:
        raise CorpusFormatError(f"{where}: expected {NUM_FIELDS} fields separated by tabs, found {len(fields)}")
    word_id, form = fields[ID], fields[FORM]
    if not form.strip():
        raise CorpusFormatError(f"{where}: the form of word {word_id!r} is blank")
    expected = len(sentence.rows) + 1
    if word_id == str(expected):
        sentence.rows.append(fields)
        sentence.row_places.append(where)
        for key, name in MISC_KEYS.items():
            sentence.tags[name].append(_find_tag(fields[MISC], key, where))
    elif not EMPTY_NODE.fullmatch(word_id):
        _read_range(sentence, word_id, form, where)


def _read_range(sentence: _Sentence, word_id: str, form: str, where: str) -> None:
    expected = len(sentence.rows) + 1
    match = WORD_RANGE.fullmatch(word_id)
    if not match or not match[2] or int(match[1]) != expected:
        raise CorpusFormatError(f"{where}: word id {word_id!r}, expected {expected} (ids are consecutive from 1)")
    covered = max((stop for stop, _, _ in sentence.ranges.values()), default=0)
    if int(match[2]) <= expected or covered >= expected:
        raise CorpusFormatError(f"{where}: range {word_id!r} must cover two words or more, none of another range")
    sentence.ranges[expected - 1] = (int(match[2]), form, where)


def _find_tag(misc: str, key: str, where: str) -> str | None:
    if f"{key}=" not in misc:
        return None
    for item in misc.split("|"):
        name, _, value = item.partition("=")
        if name == key and not (key == "Entity" and re.search(r"[()]", value)):
            if not BIO_TAG.fullmatch(value):
                raise CorpusFormatError(f"{where}: {item!r} is no BIO tag, expected {key}=O, {key}=B-X or {key}=I-X")
            return value
    return None


def _check_bounds(sentence: _Sentence) -> None:
    num_words = len(sentence.rows)
    for start, (stop, form, where) in sentence.ranges.items():
        if stop > num_words:
            raise CorpusFormatError(f"{where}: range {start + 1}-{stop} ({form!r}) of a sentence of {num_words} words")
    for relation, where in sentence.relations:
        for start, stop in (relation.first, relation.second):
            if not 0 <= start < stop <= num_words:
                raise CorpusFormatError(f"{where}: word range {start + 1}-{stop}, expected one in 1-{num_words}")


def _make_sample(sentence: _Sentence, carried: list[str], has_relations: bool) -> Sample:
    words = tuple(row[FORM] for row in sentence.rows)
    text, spans = join_words(words) if sentence.text is None else (sentence.text, _align(sentence, sentence.text))
    sample = Sample(
        text=text,
        words=words,
        word_spans=spans,
        upos=_read_column(sentence, UPOS),
        xpos=_read_column(sentence, XPOS),
        heads=_read_heads(sentence),
        deprels=_read_column(sentence, DEPREL),
        relations=tuple(relation for relation, _ in sentence.relations) if has_relations else None,
        label=sentence.label,
        document_id=sentence.document_id,
    )
    tags: dict[str, Any] = {name: tuple(tag or "O" for tag in sentence.tags[name]) for name in carried}
    return check_sample(replace(sample, **tags) if tags else sample, sentence.row_places[0])


def _read_column(sentence: _Sentence, column: int) -> tuple[str, ...] | None:
    values = tuple(row[column] for row in sentence.rows)
    return None if all(value == "_" for value in values) else values


def _read_heads(sentence: _Sentence) -> tuple[int, ...] | None:
    values = _read_column(sentence, HEAD)
    if values is None:
        return None
    for value, where in zip(values, sentence.row_places, strict=True):
        if not (value.isascii() and value.isdigit() and len(value) < 10) or int(value) > len(values):
            raise CorpusFormatError(f"{where}: head {value!r}, expected an integer in 0..{len(values)}")
    return tuple(map(int, values))


def _align(sentence: _Sentence, text: str) -> tuple[Span, ...]:
    """The span of each word in `text`, which must consist of the sentence's surface forms and whitespace only."""
    words = [row[FORM] for row in sentence.rows]
    spans: list[Span] = []
    position = 0
    while len(spans) < len(words):
        first = len(spans)
        stop, form, where = sentence.ranges.get(first, (first + 1, words[first], sentence.row_places[first]))
        span = find_word(text, form, position)
        if span is None or text[position : span[0]].strip():
            raise CorpusFormatError(
                f"{where}: word {form!r} does not come next in `# text`; words {words!r:.300}, text {text!r:.300}"
            )
        spans.extend(_place_members(text, span, words[first:stop]))
        position = span[1]
    if text[position:].strip():
        raise CorpusFormatError(
            f"{sentence.row_places[-1]}: `# text` goes on after the last word; words {words!r:.300}, text {text!r:.300}"
        )
    return tuple(spans)


def _place_members(text: str, span: Span, members: list[str]) -> list[Span]:
    if len(members) == 1 or "".join(members) != text[span[0] : span[1]]:
        return [span] * len(members)
    _, spaced = join_words(members)
    return [(span[0] + start - index, span[0] + stop - index) for index, (start, stop) in enumerate(spaced)]
