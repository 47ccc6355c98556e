"""Forms and units: sentences, documents, chunks of N words; ids and content hash."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.corpora.records import SplitRecords, join_words, make_sample
from pipeline.corpora.registry import Corpus
from pipeline.corpora.units import cut_document, join_sentences, read_samples
from storage_schema.errors import CorpusFormatError, InvalidRecipeError
from storage_schema.samples import Relation, Sample, check_sample

WORD = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4).filter(lambda w: w.split() == [w])


@st.composite
def annotated_samples(draw):
    """A sample whose neighboring words may share a span, with tags, a tree and a relation."""
    surfaces = draw(st.lists(st.tuples(WORD, st.integers(1, 3)), min_size=1, max_size=12))
    text, surface_spans = join_words([surface for surface, _ in surfaces])
    spans = tuple(span for span, (_, count) in zip(surface_spans, surfaces, strict=True) for _ in range(count))
    num_words = len(spans)
    return Sample(
        text=text,
        words=tuple(f"w{index}" for index in range(num_words)),
        word_spans=spans,
        upos=draw(st.none() | st.just(("X",) * num_words)),
        chunks=("B-NP", *("I-NP",) * (num_words - 1)),
        heads=(0, *draw(st.tuples(*(st.integers(0, index) for index in range(1, num_words))))),
        relations=(Relation((0, 1), (num_words - 1, num_words), "r"),),
        label=draw(st.sampled_from(["a", "b"])),
        document_id=draw(st.sampled_from([None, "d1", "d2"])),
    )


SAMPLES = st.lists(annotated_samples(), min_size=1, max_size=6)


def in_memory(samples):
    return Corpus("memory", ("all",), "none", lambda split: SplitRecords(samples))


def sentence(text, **fields):
    return make_sample({"text": text, **fields}, "test")


@given(samples=SAMPLES)
def test_words_form_joins_words_and_spans_slice_back(samples):
    for sample in read_samples(in_memory(samples), "all", form="words").samples:
        assert sample.text == " ".join(sample.words)
        assert tuple(sample.text[start:stop] for start, stop in sample.word_spans) == sample.words


@given(samples=SAMPLES, form=st.sampled_from(["original", "words"]))
def test_documents_keep_every_word_and_its_characters(samples, form):
    sentences = read_samples(in_memory(samples), "all", form=form).samples
    documents = read_samples(in_memory(samples), "all", "document", form).samples

    def characters(found):
        return [(w, s.text[start:stop]) for s in found for w, (start, stop) in zip(s.words, s.word_spans, strict=True)]

    assert characters(documents) == characters(sentences)
    assert " ".join(document.text for document in documents) == " ".join(sample.text for sample in sentences)
    for document in documents:
        check_sample(document, "document")


@given(document=annotated_samples(), num_words=st.integers(1, 9))
def test_chunks_partition_the_words_in_order(document, num_words):
    chunks = list(cut_document(document, num_words))
    whole = len(document.words) // num_words * num_words
    assert [word for chunk in chunks for word in chunk.words] == list(document.words[:whole])
    for index, chunk in enumerate(chunks):
        check_sample(chunk, "chunk")
        first = document.word_spans[index * num_words][0]
        assert chunk.text == document.text[first : first + len(chunk.text)]
        assert chunk.word_spans[0][0] == 0
        assert chunk.word_spans[-1][1] == len(chunk.text)
        assert chunk.chunks == ("B-NP", *("I-NP",) * (num_words - 1))
        assert (chunk.heads, chunk.deprels, chunk.relations) == (None, None, None)
        assert (chunk.label, chunk.document_id) == (document.label, document.document_id)


@given(samples=SAMPLES, num_words=st.integers(1, 4))
def test_dropped_words_and_chunk_words_add_up(samples, num_words):
    total = sum(len(sample.words) for sample in samples)
    try:
        found = read_samples(in_memory(samples), "all", f"words:{num_words}")
    except CorpusFormatError:
        return
    assert len(found.samples) * num_words + found.num_dropped_words == total


@given(samples=SAMPLES, unit=st.sampled_from(["sentence", "document", "words:1"]))
def test_equal_content_has_equal_ids_and_hash(samples, unit):
    first, second = (read_samples(in_memory(list(samples)), "all", unit) for _ in range(2))
    assert first == second
    assert len({sample.sample_id for sample in first.samples}) == len(first.samples)


@given(samples=SAMPLES, data=st.data())
def test_hash_changes_with_order_and_with_annotation(samples, data):
    content = read_samples(in_memory(samples), "all").content_sha256
    reordered = data.draw(st.permutations(samples))
    assert (read_samples(in_memory(reordered), "all").content_sha256 == content) == (reordered == samples)
    index = data.draw(st.integers(0, len(samples) - 1))
    change = data.draw(
        st.sampled_from([{"label": "c"}, {"document_id": "d3"}, {"relations": ()}, {"xpos": ("Z",) * 99}])
    )
    if "xpos" in change:
        change = {"xpos": ("Z",) * len(samples[index].words)}
    changed = [*samples[:index], replace(samples[index], **change), *samples[index + 1 :]]
    assert read_samples(in_memory(changed), "all").content_sha256 != content


def test_repetitions_are_numbered():
    ids = [sample.sample_id for sample in read_samples(in_memory([sentence("one")] * 3), "all").samples]
    assert ids == [ids[0], f"{ids[0]}-1", f"{ids[0]}-2"]


def test_ids_depend_on_unit_and_form():
    corpus = in_memory([sentence("one two")])
    recipes = [("sentence", "original"), ("document", "original"), ("words:2", "original"), ("sentence", "words")]
    assert len({read_samples(corpus, "all", *recipe).samples[0].sample_id for recipe in recipes}) == 4


def test_document_rebases_heads_relations_and_spans():
    relation = [{"first": [0, 1], "second": [1, 2], "label": "r"}]
    first = sentence("a b", heads=[2, 0], relations=relation, label="x", document_id="d", upos=["A", "B"])
    second = sentence("c  d", heads=[0, 1], relations=relation, label="x", document_id="d")
    document = join_sentences([first, second])
    assert (document.text, document.words) == ("a b c  d", ("a", "b", "c", "d"))
    assert document.word_spans == ((0, 1), (2, 3), (4, 5), (7, 8))
    assert document.heads == (2, 0, 0, 3)
    assert document.relations == (Relation((0, 1), (1, 2), "r"), Relation((2, 3), (3, 4), "r"))
    assert (document.upos, document.label, document.document_id) == (None, "x", "d")


def test_document_without_one_label_has_none():
    assert join_sentences([sentence("a", label="x"), sentence("b", label="y")]).label is None
    assert join_sentences([sentence("a", label="x"), sentence("b")]).label is None


def test_only_consecutive_sentences_of_one_id_make_a_document():
    ids = ["d1", "d1", None, None, "d2", "d1"]
    samples = [sentence(str(index), document_id=name) for index, name in enumerate(ids)]
    documents = read_samples(in_memory(samples), "all", "document").samples
    assert [document.text for document in documents] == ["0 1", "2", "3", "4", "5"]


def test_tag_cut_from_its_beginning_begins_anew():
    document = sentence("a b c d e", chunks=["B-NP", "I-NP", "I-NP", "O", "B-VP"], entities=["O"] * 5)
    chunks = list(cut_document(document, 2))
    assert [chunk.chunks for chunk in chunks] == [("B-NP", "I-NP"), ("B-NP", "O")]
    assert [chunk.text for chunk in chunks] == ["a b", "c d"]


def test_corpus_without_a_document_of_n_words_is_refused():
    with pytest.raises(CorpusFormatError, match="no document of memory/all has 3 words"):
        read_samples(in_memory([sentence("a b"), sentence("c")]), "all", "words:3")


@pytest.mark.parametrize("unit", ["words", "words:0", "words:-1", "words:050", "words:1.5", "words50", "paragraph", ""])
def test_unknown_unit_lists_the_units(unit):
    with pytest.raises(InvalidRecipeError, match="expected `sentence`, `document` or `words:N`"):
        read_samples(in_memory([sentence("a")]), "all", unit)


def test_unknown_form_lists_the_forms():
    with pytest.raises(InvalidRecipeError, match="text form 'raw', expected `original` or `words`"):
        read_samples(in_memory([sentence("a")]), "all", form="raw")
