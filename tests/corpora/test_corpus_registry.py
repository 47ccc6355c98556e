"""Names, specifications and remedies of corpora, and the corpus that comes with the package."""

import pytest

from pipeline.corpora.registry import PROJECT, list_corpora, open_corpus
from pipeline.corpora.units import read_samples
from storage_schema.errors import UnknownCorpusError
from storage_schema.samples import check_sample

ANNOTATIONS = ("upos", "xpos", "chunks", "entities", "heads", "deprels", "relations", "label", "document_id")


def test_registry_lists_every_corpus_with_licence_and_source():
    entries = {entry.name: entry for entry in list_corpora()}
    assert list(entries) == ["sample", "ud-ewt", "conll2000", "semeval2010-task8", "wnut17"]
    assert all(entry.splits == ("train", "dev", "test") and entry.source for entry in entries.values())
    assert entries["sample"].licence == "CC0-1.0"
    assert entries["ud-ewt"].licence.startswith("CC BY-SA 4.0")


@pytest.mark.parametrize("spec", ["ud_ewt", "", "sample/..", "csv:file", "trees.conllu", "../sample"])
def test_unknown_name_lists_the_registry_and_the_schemes(spec):
    with pytest.raises(UnknownCorpusError, match=r"expected one of sample, ud-ewt, .* or text:FILE"):
        open_corpus(spec)


def test_absent_folder_names_the_files_and_where_they_go(tmp_path, monkeypatch):
    monkeypatch.setenv("OLA_DATA", str(tmp_path))
    with pytest.raises(UnknownCorpusError, match=r"put wnut17train\.conll.*set OLA_DATA"):
        open_corpus("wnut17")


def test_default_data_folder_is_beside_the_project(monkeypatch):
    monkeypatch.delenv("OLA_DATA", raising=False)
    if (PROJECT.parent / "shared" / "data" / "wnut17").is_dir():
        assert open_corpus("wnut17").name == "wnut17"
    else:
        with pytest.raises(UnknownCorpusError, match=r"shared.data.wnut17"):
            open_corpus("wnut17")


def test_unknown_split_lists_the_splits():
    with pytest.raises(UnknownCorpusError, match="no split 'all', only train, dev, test"):
        read_samples(open_corpus("sample"), "all")


def test_sample_corpus_ignores_the_data_folder_and_has_every_annotation(tmp_path, monkeypatch):
    monkeypatch.setenv("OLA_DATA", str(tmp_path))
    corpus = open_corpus("sample")
    sets = {split: read_samples(corpus, split) for split in ("train", "dev", "test")}
    samples = [sample for found in sets.values() for sample in found.samples]
    assert 80 <= len(samples) <= 150
    assert all(len(found.samples) >= 10 for found in sets.values())
    for sample in samples:
        check_sample(sample, sample.text)
        assert not [name for name in ANNOTATIONS if getattr(sample, name) is None], sample.text


def test_sample_corpus_has_fifty_word_chunks_in_every_split():
    corpus = open_corpus("sample")
    assert all(len(read_samples(corpus, split, unit="words:50").samples) >= 2 for split in corpus.splits)


def test_sample_corpus_trains_every_class_it_tests():
    corpus = open_corpus("sample")
    relations, labels = {}, {}
    for split in corpus.splits:
        samples = read_samples(corpus, split).samples
        relations[split] = {relation.label for sample in samples for relation in sample.relations}
        labels[split] = {sample.label for sample in samples}
    assert len(relations["train"]) >= 2
    assert len(labels["train"]) >= 2
    assert relations["train"] >= relations["dev"] | relations["test"]
    assert labels["train"] >= labels["dev"] | labels["test"]
    assert relations["dev"]
    assert relations["test"]
