"""CoNLL-2000, SemEval-2010 task 8 and WNUT-17 -> samples, and the dev split that two of them lack."""

from functools import cache

import pytest

from pipeline.corpora.registry import open_corpus, split_dev
from pipeline.corpora.units import read_samples
from storage_schema.errors import CorpusFormatError, UnknownCorpusError
from storage_schema.samples import Relation

CONLL = "He PRP B-NP\nran VBD B-VP\n. . O\n\n"
SEMEVAL = '1\t"The <e1>big child</e1> is in the<e2>cradle</e2>, asleep."\r\nOther\r\nComment: x\r\n\r\n'


@pytest.fixture(scope="module")
def read_real(corpus_folder):
    """Reads a split of a registry corpus from the reference data, once."""

    @cache
    def read(name, split):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OLA_DATA", str(corpus_folder(name).parent))
            return open_corpus(name).read(split).samples

    return read


@pytest.fixture
def write_corpus(tmp_path, monkeypatch):
    """Writes the upstream files of a registry corpus and opens it."""

    def write(name, **files):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        for file, content in files.items():
            (folder / file).write_bytes(content.encode())
        monkeypatch.setenv("OLA_DATA", str(tmp_path))
        return open_corpus(name)

    return write


def test_conll2000_words_are_joined_and_carry_tags_and_chunks(write_corpus):
    (sample,) = read_samples(write_corpus("conll2000", **{"test.txt": CONLL}), "test").samples
    assert sample.text == "He ran ."
    assert (sample.words, sample.xpos, sample.chunks) == (
        ("He", "ran", "."),
        ("PRP", "VBD", "."),
        ("B-NP", "B-VP", "O"),
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (CONLL + "He PRP\n", r"test\.txt:5: expected 3 fields \(words, xpos, chunks\), found 'He PRP'"),
        (CONLL + "He PRP NP\n", r"test\.txt:5: 'NP' is no BIO tag"),
    ],
)
def test_conll2000_refuses_a_bad_line_by_file_and_line(write_corpus, content, message):
    with pytest.raises(CorpusFormatError, match=message):
        read_samples(write_corpus("conll2000", **{"test.txt": content}), "test")


def test_upstream_file_missing_from_a_present_folder_is_named(write_corpus):
    with pytest.raises(UnknownCorpusError, match=r"no corpus file .*train\.txt"):
        read_samples(write_corpus("conll2000", **{"test.txt": CONLL}), "dev")


def test_wnut17_messages_end_at_lines_of_whitespace(write_corpus):
    content = "@x\tO\nin\tO\nNew\tB-location\nYork\tI-location\n\t\nok\tO\n\n"
    first, second = read_samples(write_corpus("wnut17", **{"wnut17train.conll": content}), "train").samples
    assert (first.text, first.entities) == ("@x in New York", ("O", "O", "B-location", "I-location"))
    assert second.words == ("ok",)


@pytest.mark.parametrize("line", ["word", "word\t", "\tO", "word\tO\tO"])
def test_wnut17_refuses_a_line_without_word_and_tag(write_corpus, line):
    with pytest.raises(CorpusFormatError, match=r"wnut17train\.conll:2: expected 2 fields"):
        read_samples(write_corpus("wnut17", **{"wnut17train.conll": f"a\tO\n{line}\n"}), "train")


def test_semeval_relation_covers_the_words_that_overlap_the_tags(write_corpus):
    (sample,) = read_samples(write_corpus("semeval2010-task8", **{"TEST_FILE_FULL.TXT": SEMEVAL}), "test").samples
    assert sample.text == "The big child is in thecradle, asleep."
    assert sample.words == ("The", "big", "child", "is", "in", "thecradle", ",", "asleep", ".")
    assert sample.relations == (Relation((1, 3), (5, 6), "Other"),)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<e2>", "", r"TXT:1: expected .*<e1>"),
        ("Other", "Cause", r"TXT:2: label 'Cause'"),
        ("Comment: x\r\n", "", r"TXT:1: .*found 2 lines"),
        ("<e2>cradle</e2>", "<e2> </e2>", r"TXT:1: no word between the tags"),
    ],
)
def test_semeval_refuses_a_bad_record_by_file_and_line(write_corpus, old, new, message):
    corpus = write_corpus("semeval2010-task8", **{"TEST_FILE_FULL.TXT": SEMEVAL.replace(old, new)})
    with pytest.raises(CorpusFormatError, match=message):
        read_samples(corpus, "test")


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("conll2000", {"train": 8076, "dev": 860, "test": 2012}),
        ("semeval2010-task8", {"train": 7210, "dev": 790, "test": 2717}),
        ("wnut17", {"train": 3394, "dev": 1009, "test": 1287}),
    ],
)
def test_every_upstream_sample_reads_and_spans_slice_back_to_words(read_real, name, counts):
    found = {split: read_real(name, split) for split in counts}
    assert {split: len(samples) for split, samples in found.items()} == counts
    for sample in (sample for samples in found.values() for sample in samples):
        assert tuple(sample.text[start:stop] for start, stop in sample.word_spans) == sample.words


def test_every_semeval_sentence_has_one_relation_of_the_nineteen_classes(read_real):
    relations = [s.relations for split in ("train", "dev", "test") for s in read_real("semeval2010-task8", split)]
    assert {len(found) for found in relations} == {1}
    assert len({found[0].label for found in relations}) == 19


@pytest.mark.parametrize("name", ["conll2000", "semeval2010-task8"])
def test_made_dev_split_shares_no_sample_with_train(read_real, name):
    train, dev = set(read_real(name, "train")), set(read_real(name, "dev"))
    assert not train & dev
    assert 0.08 < len(dev) / len(train | dev) < 0.12


@pytest.mark.parametrize(("unit", "form"), [("document", "original"), ("words:5", "words")])
def test_made_dev_split_has_the_same_sentences_in_every_unit_and_form(write_corpus, unit, form):
    sentences = "".join(f"a{index} X O\nb X O\nc X O\nd X O\ne X O\n\n" for index in range(50))
    corpus = write_corpus("conll2000", **{"train.txt": sentences})
    texts = [sample.text for sample in read_samples(corpus, "dev").samples]
    assert 0 < len(texts) < 50
    assert [sample.text for sample in read_samples(corpus, "dev", unit, form).samples] == texts


def test_made_dev_split_is_stable_when_the_corpus_grows(read_real):
    samples = read_real("conll2000", "test")
    train, dev = split_dev(samples[:1500])
    longer_train, longer_dev = split_dev(samples)
    assert longer_train[: len(train)] == train
    assert longer_dev[: len(dev)] == dev
    assert len(train) + len(dev) == 1500


def test_repetitions_fall_on_one_side_of_the_made_dev_split(read_real):
    samples = read_real("conll2000", "test")
    once_train, once_dev = split_dev(samples)
    assert split_dev(samples * 2) == (once_train * 2, once_dev * 2)
