"""What every source shares: reading text files, finding words in texts, and one record of plain values -> one sample.

Positions in text are Python string indexes. This module knows no format of a file and computes no sample ids.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage_schema.errors import CorpusFormatError, UnknownCorpusError
from storage_schema.samples import Relation, Sample, check_sample

Span = tuple[int, int]

STRING_LISTS = ("words", "upos", "xpos", "chunks", "entities", "deprels")
STRINGS = ("text", "label", "document_id")
RECORD_FIELDS = ("text", *STRING_LISTS, "heads", "relations", "label", "document_id")


@dataclass(frozen=True)
class SplitRecords:
    """The sentence-level samples of one split in corpus order, without ids, and how many blank lines were skipped."""

    samples: list[Sample]
    num_skipped_lines: int = 0


def read_text_file(path: Path) -> str:
    """The file's text, without a byte order mark at its start.

    Raises:
        UnknownCorpusError: there is no such file, or it may not be read.
        CorpusFormatError: it is a folder, holds a NUL byte, or is not UTF-8.
    """
    if path.is_dir():
        raise CorpusFormatError(f"{path} is a folder; a corpus file is expected, name one file inside it")
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UnknownCorpusError(f"no corpus file {path}; check the path") from None
    except (OSError, ValueError) as error:
        raise UnknownCorpusError(f"corpus file {path} cannot be read: {error}") from error

    def place(offset: int) -> str:
        line = content.count(b"\n", 0, offset) + 1
        return f"{path}:{line}: byte {content[offset]:#04x} at offset {offset}"

    if (offset := content.find(b"\0")) >= 0:
        raise CorpusFormatError(f"{place(offset)}: this is a binary file; a corpus file is UTF-8 text")
    try:
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise CorpusFormatError(f"{place(error.start)} is not UTF-8; convert the file to UTF-8") from None


def iter_lines(text: str) -> Iterator[tuple[int, str]]:
    r"""The 1-based number and content of each line; only `\n` and `\r\n` end a line."""
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, start=1):
        yield number, line.removesuffix("\r")


def require_samples(samples: list[Sample], path: Path, num_skipped_lines: int = 0) -> SplitRecords:
    """The records of one file.

    Raises:
        CorpusFormatError: there are none.
    """
    if not samples:
        raise CorpusFormatError(f"{path} is empty: it holds no sample")
    return SplitRecords(samples, num_skipped_lines)


def split_words(text: str) -> tuple[tuple[str, ...], tuple[Span, ...]]:
    """The whitespace-separated pieces of a text, as `str.split` finds them, and their spans."""
    pieces = [(match.group(), match.span()) for match in re.finditer(r"\S+", text)]
    return tuple(word for word, _ in pieces), tuple(span for _, span in pieces)


def join_words(words: Sequence[str]) -> tuple[str, tuple[Span, ...]]:
    """The words joined by single spaces, and their spans."""
    spans = []
    start = 0
    for word in words:
        spans.append((start, start + len(word)))
        start += len(word) + 1
    return " ".join(words), tuple(spans)


def find_word(text: str, word: str, start: int) -> Span | None:
    """The span of the first occurrence of `word` from `start`, or None; whitespace inside matches any whitespace."""
    pieces = word.split()
    if len(pieces) == 1:
        found = text.find(pieces[0], start)
        return None if found < 0 else (found, found + len(pieces[0]))
    match = re.compile(r"\s*".join(map(re.escape, pieces))).search(text, start) if pieces else None
    return match.span() if match else None


def make_sample(record: Mapping[str, Any], where: str) -> Sample:
    """The sample that a record of plain values describes.

    Without `words` they are the whitespace-separated pieces of `text`; without `text` it is the words joined by single
    spaces; with both, the words are found in the text in order. A value of None counts as absent.

    Args:
        record: some of `RECORD_FIELDS`; a relation is `{"first": [start, stop], "second": [...], "label": ...}`.
        where: names file and line in the error.

    Raises:
        CorpusFormatError: an unknown field, a wrong type, neither text nor words, a word that is not in the text, or
            values that `check_sample` refuses.
    """
    values = {name: value for name, value in record.items() if value is not None}
    if unknown := sorted(values.keys() - set(RECORD_FIELDS)):
        raise CorpusFormatError(f"{where}: unknown key {unknown[0]!r}, expected some of {', '.join(RECORD_FIELDS)}")
    for name in STRINGS:
        if not isinstance(values.get(name, ""), str):
            raise _wrong_type(where, name, "a string", values[name])
    for name in STRING_LISTS:
        if name in values:
            values[name] = _read_list(values[name], str, where, name, "a list of strings")
    if "heads" in values:
        values["heads"] = _read_list(values["heads"], int, where, "heads", "a list of integers")
    if "relations" in values:
        values["relations"] = _read_relations(values["relations"], where)
    return check_sample(Sample(**_place_words(values, where)), where)


def _place_words(values: dict[str, Any], where: str) -> dict[str, Any]:
    if "words" not in values:
        if "text" not in values:
            raise CorpusFormatError(f"{where}: a record needs `text` or `words`, this one has {sorted(values)}")
        words, spans = split_words(values["text"])
        return {**values, "words": words, "word_spans": spans}
    words = values["words"]
    if not all(word.strip() for word in words):
        raise CorpusFormatError(f"{where}: `words` has a blank word; leave it out, with its annotation")
    if "text" not in values:
        text, spans = join_words(words)
        return {**values, "text": text, "word_spans": spans}
    found: list[Span] = []
    for word in words:
        span = find_word(values["text"], word, found[-1][1] if found else 0)
        if span is None:
            raise CorpusFormatError(
                f"{where}: word {word!r} is not in the text after its predecessor; words {words!r:.300}, "
                f"text {values['text']!r:.300}; correct either, or leave `text` out"
            )
        found.append(span)
    return {**values, "word_spans": tuple(found)}


def _wrong_type(where: str, name: str, expected: str, value: Any) -> CorpusFormatError:
    return CorpusFormatError(f"{where}: `{name}` must be {expected}, found {value!r:.100}")


def _read_list(value: Any, kind: type, where: str, name: str, expected: str) -> tuple[Any, ...]:
    if not isinstance(value, list) or not all(type(item) is kind for item in value):
        raise _wrong_type(where, name, expected, value)
    return tuple(value)


def _read_relations(value: Any, where: str) -> tuple[Relation, ...]:
    expected = 'a list of {"first": [start, stop], "second": [start, stop], "label": string}'
    if not isinstance(value, list):
        raise _wrong_type(where, "relations", expected, value)
    relations = []
    for item in value:
        if not isinstance(item, dict) or item.keys() != {"first", "second", "label"}:
            raise _wrong_type(where, "relations", expected, item)
        ranges = [_read_list(item[side], int, where, "relations", expected) for side in ("first", "second")]
        if not isinstance(item["label"], str) or any(len(bounds) != 2 for bounds in ranges):
            raise _wrong_type(where, "relations", expected, item)
        relations.append(Relation(ranges[0], ranges[1], item["label"]))
    return tuple(relations)
