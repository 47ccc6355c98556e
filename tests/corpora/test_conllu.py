"""CoNLL-U -> samples."""

import pytest

from pipeline.corpora.registry import open_corpus
from pipeline.corpora.units import read_samples
from storage_schema.errors import CorpusFormatError
from storage_schema.samples import Relation


def row(number, form, head=0, misc="_", upos="X", xpos="x", deprel="dep"):
    return "\t".join([str(number), form, "_", upos, xpos, "_", str(head), deprel, "_", misc])


def read(folder, *lines, form="original"):
    path = folder / "trees.conllu"
    path.write_text("\n".join(lines) + "\n")
    return read_samples(open_corpus(f"conllu:{path}"), "all", form=form).samples


def slice_words(sample):
    return [sample.text[start:stop] for start, stop in sample.word_spans]


def test_text_comment_is_the_text_and_words_are_aligned_to_it(tmp_path):
    lines = "# text = Hi , there!", row(1, "Hi", 3), row(2, ",", 1), row(3, "there"), row(4, "!", 3)
    (sample,) = read(tmp_path, *lines)
    assert sample.text == "Hi , there!"
    assert slice_words(sample) == list(sample.words) == ["Hi", ",", "there", "!"]
    assert (sample.heads, sample.upos, sample.xpos) == ((3, 1, 0, 3), ("X",) * 4, ("x",) * 4)
    assert (sample.label, sample.document_id, sample.relations, sample.chunks) == (None, None, None, None)


def test_without_text_comment_words_are_joined_by_single_spaces_whatever_misc_says(tmp_path):
    (sample,) = read(tmp_path, row(1, "Hi", misc="SpaceAfter=No"), row(2, "!", 1))
    assert sample.text == "Hi !"


def test_members_of_a_range_that_concatenates_get_consecutive_spans(tmp_path):
    lines = (
        "# text = I don't.",
        row(1, "I"),
        row("2-3", "don't", "_"),
        row(2, "do", 1),
        row(3, "n't", 1),
        row(4, ".", 1),
    )
    (sample,) = read(tmp_path, *lines)
    assert sample.word_spans == ((0, 1), (2, 4), (4, 7), (7, 8))
    (spaced,) = read(tmp_path, *lines, form="words")
    assert (spaced.text, slice_words(spaced)) == ("I do n't .", ["I", "do", "n't", "."])


def test_members_of_another_range_share_its_span(tmp_path):
    lines = "# text = va al bar", row(1, "va"), row("2-3", "al", "_"), row(2, "a", 4), row(3, "el", 4), row(4, "bar", 1)
    (sample,) = read(tmp_path, *lines)
    assert sample.word_spans == ((0, 2), (3, 5), (3, 5), (6, 9))
    (spaced,) = read(tmp_path, *lines, form="words")
    assert (spaced.text, slice_words(spaced)) == ("va a el bar", ["va", "a", "el", "bar"])


def test_whitespace_inside_a_form_matches_any_whitespace(tmp_path):
    (sample,) = read(tmp_path, "# text = 1\u00a0000 and 1 000", row(1, "1 000"), row(2, "and", 1), row(3, "1 000", 1))
    assert sample.word_spans == ((0, 5), (6, 9), (10, 15))


def test_empty_nodes_are_left_out(tmp_path):
    (sample,) = read(tmp_path, row("0.1", "so", "_"), row(1, "a"), row("1.1", "b", "_"), row(2, "c", 1))
    assert (sample.words, sample.heads) == (("a", "c"), (0, 1))


def test_fields_without_values_are_none(tmp_path):
    bare, full = read(tmp_path, row(1, "a", "_", upos="_", xpos="_", deprel="_"), "", row(1, "_"), row(2, "b", 1))
    assert (bare.upos, bare.xpos, bare.heads, bare.deprels) == (None, None, None, None)
    assert (full.words, full.heads) == (("_", "b"), (0, 1))


def test_forest_with_several_roots_is_accepted(tmp_path):
    assert read(tmp_path, row(1, "a"), row(2, "b"))[0].heads == (0, 0)


def test_documents_labels_and_relations_come_from_comments(tmp_path):
    samples = read(
        tmp_path,
        row(1, "zero"),
        "",
        "# newdoc id = d1",
        "# label = news",
        "# relation = Cause-Effect(e1,e2) 2-3 1",
        *(row(1, "a"), row(2, "b", 1), row(3, "c", 1)),
        "",
        row(1, "d"),
        "",
        "# newdoc",
        row(1, "e"),
    )
    assert [sample.document_id for sample in samples] == [None, "d1", "d1", "newdoc-2"]
    assert [sample.label for sample in samples] == [None, "news", None, None]
    assert samples[1].relations == (Relation((1, 3), (0, 1), "Cause-Effect(e1,e2)"),)
    assert samples[2].relations == ()


def test_chunk_and_entity_tags_come_from_misc_where_any_word_of_the_file_has_them(tmp_path):
    tagged = row(1, "a", misc="SpaceAfter=No|Chunk=B-NP"), row(2, "b", 1, misc="Chunk=I-NP")
    first, second = read(tmp_path, *tagged, "", row(1, "c"))
    assert (first.chunks, second.chunks) == (("B-NP", "I-NP"), ("O",))
    assert (first.entities, second.entities) == (None, None)


def test_bracketed_coreference_is_no_entity_tag(tmp_path):
    assert read(tmp_path, row(1, "a", misc="Entity=(1-person-giv:act-1-ana)"))[0].entities is None


@pytest.mark.parametrize(
    ("lines", "number", "message"),
    [
        ([row(1, "a"), "2\tb"], 2, "expected 10 fields separated by tabs, found 2"),
        ([row(1, "a").replace("\t", " ")], 1, "expected 10 fields"),
        ([row(1, "a"), row(3, "b")], 2, "word id '3', expected 2"),
        ([row(2, "a")], 1, "word id '2', expected 1"),
        ([row(1, "a"), row("x", "b")], 2, "word id 'x'"),
        ([row("01", "a")], 1, "word id '01'"),
        ([row(1, " ")], 1, "form of word '1' is blank"),
        ([row(1, "a"), row(2, "b", "x")], 2, r"head 'x', expected an integer in 0\.\.2"),
        ([row(1, "a"), row(2, "b", "_")], 2, "head '_'"),
        ([row(1, "a", 3), row(2, "b")], 1, r"head '3', expected an integer in 0\.\.2"),
        ([row(1, "a", -1)], 1, "head '-1'"),
        (["", "# text = a b", row(1, "a", 2), row(2, "b", 1)], 3, "heads form a cycle"),
        ([row("1-3", "ab", "_"), row(1, "a"), row(2, "b")], 1, r"range 1-3 \('ab'\) of a sentence of 2 words"),
        ([row(1, "a"), row("2-1", "b", "_"), row(2, "b")], 2, "range '2-1' must cover two words or more"),
        (
            [row("1-2", "x", "_"), row(1, "a"), row("2-3", "y", "_"), row(2, "b"), row(3, "c")],
            3,
            "none of another range",
        ),
        ([row(1, "a"), row("1-2", "ab", "_")], 2, "word id '1-2', expected 2"),
        (["# text = a c", row(1, "a"), row(2, "b", 1)], 3, r"word 'b' does not come next.*\['a', 'b'\].*'a c'"),
        (["# text = a x b", row(1, "a"), row(2, "b", 1)], 3, "word 'b' does not come next"),
        (["# text = a b", row(1, "a")], 2, "goes on after the last word"),
        (["# text = a", "", row(1, "a")], 2, "`# text` without words"),
        (["# relation = x 1", row(1, "a")], 1, "expected `# relation = LABEL 3-4 5`"),
        (["# relation = x 1 2", row(1, "a")], 1, "word range 2-2, expected one in 1-1"),
        (["# relation = x 0 1", row(1, "a")], 1, "word range 0-0, expected one in 1-1"),
        ([row(1, "a"), row(2, "b", 1, misc="Chunk=NP")], 2, "'Chunk=NP' is no BIO tag"),
    ],
)
def test_broken_file_is_refused_by_file_and_line(tmp_path, lines, number, message):
    with pytest.raises(CorpusFormatError, match=rf"trees\.conllu:{number}: .*{message}"):
        read(tmp_path, *lines)


@pytest.fixture(scope="module")
def ud_ewt(corpus_folder):
    """The samples of each split of ud-ewt, as sentences."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OLA_DATA", str(corpus_folder("ud-ewt").parent))
        corpus = open_corpus("ud-ewt")
        return {split: read_samples(corpus, split).samples for split in corpus.splits}


def test_every_sentence_of_ud_ewt_reads_and_spans_slice_back_to_words(ud_ewt):
    assert {split: len(samples) for split, samples in ud_ewt.items()} == {"train": 12544, "dev": 2001, "test": 2077}
    for sample in (sample for samples in ud_ewt.values() for sample in samples):
        assert slice_words(sample) == list(sample.words)
        assert None not in (sample.upos, sample.xpos, sample.heads, sample.deprels, sample.document_id)


def test_repeated_sentences_of_ud_ewt_are_numbered(ud_ewt):
    samples = ud_ewt["train"]
    assert len({sample.sample_id for sample in samples}) == len(samples)
    assert len(samples) - len({sample.text for sample in samples}) == 809
    assert sum("-" in sample.sample_id for sample in samples) == 787  # the other 22 differ in words or annotation


def test_fifty_word_chunks_of_ud_ewt_test_stay_within_documents(corpus_folder, monkeypatch):
    monkeypatch.setenv("OLA_DATA", str(corpus_folder("ud-ewt").parent))
    chunks = read_samples(open_corpus("ud-ewt"), "test", unit="words:50")
    assert (len(chunks.samples), chunks.num_dropped_words) == (361, 7044)
