"""Text files and JSON lines -> samples."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.corpora.registry import open_corpus
from pipeline.corpora.units import read_samples
from storage_schema.errors import CorpusFormatError, InvalidNameError, UnknownCorpusError
from storage_schema.samples import Relation

CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\0\ufeff")
LINES = st.lists(st.text(CHARACTERS), min_size=1).filter(lambda lines: any(line.strip() for line in lines))
WORDS = st.lists(st.text(CHARACTERS, min_size=1).filter(lambda word: word.split() == [word]), min_size=1)
REUSE_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def read_bytes(folder, content, scheme="text", name="corpus.file"):
    path = folder / name
    path.write_bytes(content)
    return read_samples(open_corpus(f"{scheme}:{path}"), "all")


def read_json(folder, *records):
    return read_bytes(folder, "\n".join(map(json.dumps, records)).encode(), "jsonl")


def slice_words(sample):
    return tuple(sample.text[start:stop] for start, stop in sample.word_spans)


@REUSE_FOLDER
@given(lines=LINES)
def test_text_file_gives_each_line_as_it_stands_with_words_as_str_split_finds_them(tmp_path, lines):
    found = read_bytes(tmp_path, "".join(line + "\n" for line in lines).encode())
    assert [sample.text for sample in found.samples] == [line for line in lines if line.strip()]
    assert found.num_skipped_lines == sum(not line.strip() for line in lines)
    for sample in found.samples:
        assert sample.words == tuple(sample.text.split()) == slice_words(sample)


def test_only_newlines_end_a_line(tmp_path):
    found = read_bytes(tmp_path, "a\u2028b\x0bc\x85d\x0ce\rf\ng h\r\n".encode())
    assert [sample.text for sample in found.samples] == ["a\u2028b\x0bc\x85d\x0ce\rf", "g h"]
    assert found.samples[0].words == tuple("abcdef")


def test_surrounding_spaces_and_no_break_spaces_stay_in_the_text(tmp_path):
    sample = read_bytes(tmp_path, "  one\u00a0two \n".encode()).samples[0]
    assert sample.text == "  one\u00a0two "
    assert (sample.words, sample.word_spans) == (("one", "two"), ((2, 5), (6, 9)))


def test_byte_order_mark_is_dropped(tmp_path):
    assert read_bytes(tmp_path, b"\xef\xbb\xbfone\n").samples[0].text == "one"


def test_blank_lines_are_counted_also_without_a_last_newline(tmp_path):
    assert read_bytes(tmp_path, b"\n \t\r\none\n\ntwo").num_skipped_lines == 3


@pytest.mark.parametrize("scheme", ["text", "jsonl", "conllu"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no sample"),
        (b"\xef\xbb\xbf", "holds no sample"),
        (b"\n \n", "holds no sample"),
        (b"one\ntw\0o\n", r"corpus\.file:2: byte 0x00 at offset 6: this is a binary file"),
        (b"one\ntwo\nf\xfcnf\n", r"corpus\.file:3: byte 0xfc at offset 9 is not UTF-8"),
    ],
)
def test_unusable_content_is_refused_by_name(tmp_path, scheme, content, message):
    with pytest.raises(CorpusFormatError, match=message):
        read_bytes(tmp_path, content, scheme)


@pytest.mark.parametrize("scheme", ["text", "jsonl", "conllu"])
@pytest.mark.parametrize("file", ["absent.txt", "x" * 300, "", "nul\0.txt"])
def test_missing_file_is_unknown(scheme, file):
    with pytest.raises(UnknownCorpusError, match=f"no corpus file .*, named by {scheme}:FILE"):
        open_corpus(f"{scheme}:{file}")


def test_folder_is_no_corpus_file(tmp_path):
    with pytest.raises(CorpusFormatError, match="is a folder"):
        read_samples(open_corpus(f"text:{tmp_path}"), "all")


@pytest.mark.parametrize("name", ["a+b.txt", "a@b.txt", "-a.txt", "a b.txt", "naïve.txt", ".hidden"])
def test_file_whose_stem_may_not_stand_in_a_ref_is_to_be_renamed(tmp_path, name):
    with pytest.raises(InvalidNameError, match="rename it"):
        read_bytes(tmp_path, b"one\n", name=name)


def test_file_corpus_is_named_by_its_stem_and_has_the_split_all(tmp_path):
    (tmp_path / "my.notes-1.txt").write_text("one\n")
    corpus = open_corpus(f"text:{tmp_path / 'my.notes-1.txt'}")
    assert (corpus.name, corpus.splits) == ("my.notes-1", ("all",))
    with pytest.raises(UnknownCorpusError, match="no split 'train', only all"):
        read_samples(corpus, "train")


@REUSE_FOLDER
@given(sentences=st.lists(WORDS, min_size=1))
def test_jsonl_words_alone_are_joined_and_spans_slice_back(tmp_path, sentences):
    found = read_json(tmp_path, *({"words": words} for words in sentences))
    assert [list(sample.words) for sample in found.samples] == sentences
    for sample in found.samples:
        assert sample.text == " ".join(sample.words)
        assert slice_words(sample) == sample.words


@REUSE_FOLDER
@given(words=WORDS, gaps=st.lists(st.sampled_from(["", " ", " \u00a0", "\t"]), min_size=1))
def test_jsonl_words_are_found_in_the_text_in_order(tmp_path, words, gaps):
    text = "".join(word + gaps[index % len(gaps)] for index, word in enumerate(words))
    sample = read_json(tmp_path, {"text": text, "words": words}).samples[0]
    assert sample.text == text
    assert slice_words(sample) == tuple(words)


def test_jsonl_reads_every_annotation(tmp_path):
    record = {
        "text": "Ann sings.",
        "words": ["Ann", "sings", "."],
        "upos": ["PROPN", "VERB", "PUNCT"],
        "xpos": ["NNP", "VBZ", "."],
        "chunks": ["B-NP", "B-VP", "O"],
        "entities": ["B-PER", "O", "O"],
        "heads": [2, 0, 2],
        "deprels": ["nsubj", "root", "punct"],
        "relations": [{"first": [0, 1], "second": [1, 3], "label": "does"}],
        "label": "music",
        "document_id": "d1",
    }
    sample = read_json(tmp_path, record).samples[0]
    assert sample.relations == (Relation((0, 1), (1, 3), "does"),)
    for name in record.keys() - {"relations"}:
        value = record[name]
        assert getattr(sample, name) == (tuple(value) if isinstance(value, list) else value)


def test_jsonl_null_counts_as_absent(tmp_path):
    assert read_json(tmp_path, {"text": "one two", "words": None, "label": None}).samples[0].words == ("one", "two")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a", "pos": ["X"]}', "unknown key 'pos', expected some of text, words"),
        ('{"text": "a", "sample_id": "0"}', "unknown key 'sample_id'"),
        ('{"label": "a"}', "needs `text` or `words`"),
        ('{"text": ["a"]}', "`text` must be a string"),
        ('{"text": " "}', "this one is empty"),
        ('{"words": []}', "this one is empty"),
        ('{"words": ["a", " "]}', "blank word"),
        ('{"words": "a"}', "`words` must be a list of strings"),
        ('{"text": "a", "label": 1}', "`label` must be a string"),
        ('{"text": "a", "document_id": 1}', "`document_id` must be a string"),
        ('{"text": "a b", "upos": ["X"]}', "`upos` has 1 values for 2 words"),
        ('{"text": "a", "heads": [true]}', "`heads` must be a list of integers"),
        ('{"text": "a", "heads": [2]}', r"head 2, expected 0\.\.1"),
        ('{"text": "a b", "heads": [2, 1]}', "cycle"),
        ('{"text": "a", "relations": [{"first": [0, 1], "label": "x"}]}', "`relations` must be a list of"),
        ('{"text": "a", "relations": [{"first": [0], "second": [0, 1], "label": "x"}]}', "`relations` must be"),
        ('{"text": "a", "relations": [{"first": [0, 1], "second": [0, 2], "label": "x"}]}', "outside 0"),
        ('{"text": "a b", "words": ["b", "a"]}', r"word 'a' is not in the text.*words .*text 'a b'"),
        (r'{"text": "a \ud800"}', "half of a surrogate pair"),
        (r'{"text": "a", "entities": ["\udc00"]}', "half of a surrogate pair"),
        ('["a"]', "expected a JSON object"),
        ("{text: a}", "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
    ],
)
def test_jsonl_refuses_a_bad_line_by_file_and_line(tmp_path, line, message):
    content = '{"text": "fine"}\n\n' + line + "\n"
    with pytest.raises(CorpusFormatError, match=rf"corpus\.file:3: .*{message}"):
        read_bytes(tmp_path, content.encode(), "jsonl")


def test_jsonl_counts_blank_lines_and_reads_surrogate_pairs(tmp_path):
    found = read_bytes(tmp_path, b'\r\n{"text": "\\ud83d\\ude00"}\r\n\r\n', "jsonl")
    assert (found.samples[0].text, found.num_skipped_lines) == ("😀", 2)
