"""SemEval-2010 task 8: sentences with two tagged nominals and the relation between them."""

import re
from pathlib import Path

from pipeline.corpora.records import Span, SplitRecords, iter_lines, read_text_file, require_samples
from storage_schema.errors import CorpusFormatError
from storage_schema.samples import Relation, Sample, check_sample

SENTENCE = re.compile(r'[0-9]+\t"(.*)"')
TAGGED = re.compile(r"(.*)<e1>(.+)</e1>(.*)<e2>(.+)</e2>(.*)")
LABEL = re.compile(r"Other|[A-Za-z-]+\((?:e1,e2|e2,e1)\)")
WORD = re.compile(r"\w+|[^\w\s]")


def read_semeval2010(path: Path) -> SplitRecords:
    r"""One sample a sentence with one relation; `first` is e1, `second` is e2, each the words that overlap its tags.

    The text has neither the tags nor the quotes around the sentence; words are matches of `\w+|[^\w\s]`. Where upstream
    lost the space before a tag (`doves<e2>moles</e2>`), the word runs across the tag.

    Raises:
        UnknownCorpusError: there is no such file.
        CorpusFormatError: the file is unreadable or empty, or a record is not: number, tab, quoted sentence with e1
            before e2; a label; `Comment:`; a blank line.
    """
    samples = []
    block: list[tuple[int, str]] = []
    for number, line in iter_lines(read_text_file(path) + "\n\n"):
        if line.strip():
            block.append((number, line))
        elif block:
            samples.append(_make_sample(block, path))
            block = []
    return require_samples(samples, path)


def _make_sample(block: list[tuple[int, str]], path: Path) -> Sample:
    where = f"{path}:{block[0][0]}"
    if len(block) != 3 or not block[2][1].startswith("Comment:"):
        raise CorpusFormatError(
            f"{where}: expected a sentence, a label and a `Comment:` line, found {len(block)} lines"
        )
    sentence = SENTENCE.fullmatch(block[0][1])
    tagged = TAGGED.fullmatch(sentence[1]) if sentence else None
    if tagged is None or re.search(r"</?e[12]>", "".join(tagged.groups())):
        raise CorpusFormatError(
            f'{where}: expected `ID<TAB>"sentence with <e1>..</e1> and then <e2>..</e2>"`, found {block[0][1]!r:.200}'
        )
    label = block[1][1].strip()
    if not LABEL.fullmatch(label):
        raise CorpusFormatError(
            f"{path}:{block[1][0]}: label {label!r}, expected `Other` or like `Cause-Effect(e1,e2)`"
        )
    before, first, between, second, after = tagged.groups()
    text = before + first + between + second + after
    spans = tuple(match.span() for match in WORD.finditer(text))
    start = len(before) + len(first) + len(between)
    ranges = [
        _find_words(spans, (len(before), len(before) + len(first)), where),
        _find_words(spans, (start, start + len(second)), where),
    ]
    words = tuple(text[begin:end] for begin, end in spans)
    relation = Relation(ranges[0], ranges[1], label)
    return check_sample(Sample(text=text, words=words, word_spans=spans, relations=(relation,)), where)


def _find_words(spans: tuple[Span, ...], tagged: Span, where: str) -> Span:
    """The range of words that overlap the tagged characters."""
    inside = [index for index, (start, stop) in enumerate(spans) if start < tagged[1] and stop > tagged[0]]
    if not inside:
        raise CorpusFormatError(f"{where}: no word between the tags at characters {tagged[0]} to {tagged[1]}")
    return inside[0], inside[-1] + 1
