"""Files of one sample a line: plain text, and JSON lines."""

import json
from pathlib import Path
from typing import Any

from pipeline.corpora.records import SplitRecords, iter_lines, make_sample, read_text_file, require_samples
from storage_schema.errors import CorpusFormatError


def read_text(path: Path) -> SplitRecords:
    r"""One sample a line, its text exactly as it stands there; blank lines are skipped and counted.

    Only `\n` and `\r\n` end a line. Words are the whitespace-separated pieces, as `str.split` finds them.

    Raises:
        UnknownCorpusError: there is no such file.
        CorpusFormatError: the file is a folder, binary, not UTF-8, or has no text.
    """
    samples = []
    num_skipped = 0
    for number, line in iter_lines(read_text_file(path)):
        if line.strip():
            samples.append(make_sample({"text": line}, f"{path}:{number}"))
        else:
            num_skipped += 1
    return require_samples(samples, path, num_skipped)


def read_jsonl(path: Path) -> SplitRecords:
    """One sample a line, a JSON object of the fields that `make_sample` takes; blank lines are skipped and counted.

    Raises:
        UnknownCorpusError: there is no such file.
        CorpusFormatError: the file is a folder, binary, not UTF-8, or has no object; a line is no JSON object, holds a
            lone surrogate, or is refused by `make_sample`; names `FILE:LINE`.
    """
    samples = []
    num_skipped = 0
    for number, line in iter_lines(read_text_file(path)):
        if line.strip():
            where = f"{path}:{number}"
            samples.append(make_sample(_parse_object(line, where), where))
        else:
            num_skipped += 1
    return require_samples(samples, path, num_skipped)


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return values


def _parse_object(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line, object_pairs_hook=_refuse_repeats)
    except (ValueError, RecursionError) as error:
        raise CorpusFormatError(f"{where}: not a JSON object ({error}); write one object a line") from None
    if not isinstance(record, dict):
        raise CorpusFormatError(f"{where}: expected a JSON object, found {line:.80}; write one object a line")
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        escape = f"\\u{ord(error.object[error.start]):04x}"
        raise CorpusFormatError(f"{where}: {escape} is half of a surrogate pair, no character; remove it") from None
    return record
