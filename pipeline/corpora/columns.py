"""Corpora of one word a line with its tags, blank lines between sentences: CoNLL-2000 and WNUT-17.

Both give words only, so that the text is the words joined by single spaces.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from pipeline.corpora.records import SplitRecords, iter_lines, make_sample, read_text_file, require_samples
from storage_schema.errors import CorpusFormatError

BIO_TAG = re.compile(r"O|[BI]-\S+")


def read_conll2000(path: Path) -> SplitRecords:
    """One sample a sentence, from lines of `word xpos chunk` separated by single spaces.

    Raises:
        UnknownCorpusError: there is no such file.
        CorpusFormatError: the file is unreadable or empty; a line has not three fields, or its last is no BIO tag.
    """
    return _read_columns(path, " ", ("words", "xpos", "chunks"))


def read_wnut17(path: Path) -> SplitRecords:
    """One sample a message, from lines of `word TAB entity`.

    A line of whitespace alone ends a message: upstream's train file ends each with a lone tab.

    Raises:
        UnknownCorpusError: there is no such file.
        CorpusFormatError: the file is unreadable or empty; a line has not two fields, or its last is no BIO tag.
    """
    return _read_columns(path, "\t", ("words", "entities"))


def _read_columns(path: Path, separator: str, names: tuple[str, ...]) -> SplitRecords:
    samples = []
    for where, rows in _iter_sentences(path, separator, names):
        columns = [list(column) for column in zip(*rows, strict=True)]
        samples.append(make_sample(dict(zip(names, columns, strict=True)), where))
    return require_samples(samples, path)


def _iter_sentences(path: Path, separator: str, names: tuple[str, ...]) -> Iterator[tuple[str, list[list[str]]]]:
    rows: list[list[str]] = []
    where = ""
    for number, line in iter_lines(read_text_file(path) + "\n\n"):
        if not line.strip():
            if rows:
                yield where, rows
            rows = []
            continue
        fields = line.split(separator)
        place = f"{path}:{number}"
        if len(fields) != len(names) or not all(value.strip() for value in fields):
            raise CorpusFormatError(f"{place}: expected {len(names)} fields ({', '.join(names)}), found {line!r:.100}")
        if not BIO_TAG.fullmatch(fields[-1]):
            raise CorpusFormatError(f"{place}: {fields[-1]!r} is no BIO tag, expected O, B-X or I-X")
        where = where if rows else place
        rows.append(fields)
