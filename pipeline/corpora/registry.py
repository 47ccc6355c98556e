"""The corpora that have a name, and how a specification on the command line becomes a corpus.

Files of registry corpora keep their upstream names and lie in `OLA_DATA/<name>/` (by default `../shared/data`, seen
from the project's root); those of `sample` come with the package.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.corpora.columns import read_conll2000, read_wnut17
from pipeline.corpora.conllu import read_conllu
from pipeline.corpora.hub import convert_dataset, load_hub_dataset, parse_address
from pipeline.corpora.lines import read_jsonl, read_text
from pipeline.corpora.records import SplitRecords
from pipeline.corpora.semeval2010 import read_semeval2010
from storage_schema.errors import UnknownCorpusError
from storage_schema.paths import expand_home
from storage_schema.refs import check_name
from storage_schema.samples import Sample, identify_samples, split_sample_id

SAMPLE_FOLDER = Path(__file__).resolve().parent / "sample"
PROJECT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Corpus:
    """A corpus that can be read, split by split."""

    name: str
    """As it stands in refs."""
    splits: tuple[str, ...]
    licence: str
    read: Callable[[str], SplitRecords]
    """Split name -> its sentence-level samples in corpus order, without ids."""


@dataclass(frozen=True)
class CorpusEntry:
    """A corpus of the registry, whether or not its files are here."""

    name: str
    splits: tuple[str, ...]
    annotations: tuple[str, ...]
    """Fields of `Sample` that it fills."""
    licence: str
    source: str
    """Where its files come from."""
    files: Mapping[str, str]
    """Split -> upstream file name. A corpus without a file for `dev` has its dev split made from train."""
    read_file: Callable[[Path], SplitRecords]


FILE_READERS: dict[str, Callable[[Path], SplitRecords]] = {
    "text": read_text,
    "jsonl": read_jsonl,
    "conllu": read_conllu,
}
SPLITS = ("train", "dev", "test")
TREES = ("upos", "xpos", "heads", "deprels")
REGISTRY = {
    entry.name: entry
    for entry in (
        CorpusEntry(
            name="sample",
            splits=SPLITS,
            annotations=(*TREES, "chunks", "entities", "relations", "label", "document_id"),
            licence="CC0-1.0",
            source="written for this project, part of the package",
            files={split: f"{split}.conllu" for split in SPLITS},
            read_file=read_conllu,
        ),
        CorpusEntry(
            name="ud-ewt",
            splits=SPLITS,
            annotations=(*TREES, "document_id"),
            licence="CC BY-SA 4.0 (annotation); underlying texts various",
            source="https://github.com/UniversalDependencies/UD_English-EWT",
            files={split: f"en_ewt-ud-{split}.conllu" for split in SPLITS},
            read_file=read_conllu,
        ),
        CorpusEntry(
            name="conll2000",
            splits=SPLITS,
            annotations=("xpos", "chunks"),
            licence="none stated (Penn Treebank text, free for the shared task); check before redistributing",
            source="https://www.clips.uantwerpen.be/conll2000/chunking/",
            files={"train": "train.txt", "test": "test.txt"},
            read_file=read_conll2000,
        ),
        CorpusEntry(
            name="semeval2010-task8",
            splits=SPLITS,
            annotations=("relations",),
            licence="CC BY 3.0",
            source="https://github.com/roomylee/entity-aware-relation-classification",
            files={"train": "TRAIN_FILE.TXT", "test": "TEST_FILE_FULL.TXT"},
            read_file=read_semeval2010,
        ),
        CorpusEntry(
            name="wnut17",
            splits=SPLITS,
            annotations=("entities",),
            licence="CC BY 4.0",
            source="https://github.com/leondz/emerging_entities_17",
            files={"train": "wnut17train.conll", "dev": "emerging.dev.conll", "test": "emerging.test.annotated"},
            read_file=read_wnut17,
        ),
    )
}


def list_corpora() -> list[CorpusEntry]:
    """The registry, whether or not the files are here."""
    return list(REGISTRY.values())


def open_corpus(spec: str) -> Corpus:
    """The corpus that `spec` names; its samples are read when `read` is called (hub data sets are fetched here).

    Args:
        spec: a registry name, `text:FILE`, `jsonl:FILE`, `conllu:FILE`, or `hf:ORG/NAME[@REVISION][:CONFIG]`.

    Raises:
        UnknownCorpusError: no such registry name, folder, file or hub data set.
        InvalidNameError: the file's stem or the hub name may not stand in a ref.
        CorpusFormatError: the file is a folder.
    """
    scheme, colon, rest = spec.partition(":")
    if colon and scheme in FILE_READERS:
        return _open_file(scheme, rest)
    if colon and scheme == "hf":
        return _open_hub(rest)
    if spec not in REGISTRY:
        known = ", ".join(REGISTRY)
        raise UnknownCorpusError(
            f"no corpus {spec!r}; expected one of {known}, or text:FILE, jsonl:FILE, conllu:FILE, hf:ORG/NAME[:CONFIG]"
        )
    return _open_entry(REGISTRY[spec])


def split_dev(samples: list[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Train and dev, both in corpus order, of a corpus whose upstream has no dev split.

    Dev are the samples whose content hash (of the sentence as it is read, whatever unit and form are asked for) lies in
    the last tenth of the 64-bit range. So repetitions fall on one side, and a longer corpus moves nothing. It is for
    corpora without documents: there every sentence is its own document, so that no unit mixes the two sides.
    """
    sides: tuple[list[Sample], list[Sample]] = ([], [])
    for sample, identified in zip(samples, identify_samples(samples, "sentence", "original"), strict=True):
        digest, _ = split_sample_id(identified.sample_id)
        sides[digest * 10 >= 9 * 2**64].append(sample)
    return sides


def _open_entry(entry: CorpusEntry) -> Corpus:
    data = Path(os.environ.get("OLA_DATA") or PROJECT.parent / "shared" / "data")
    folder = SAMPLE_FOLDER if entry.name == "sample" else data / entry.name
    if not folder.is_dir():
        files = ", ".join(entry.files.values())
        raise UnknownCorpusError(
            f"corpus {entry.name}: no folder {folder}; put {files} from {entry.source} there, or set OLA_DATA to the "
            f"folder that holds {entry.name}/"
        )

    def read(split: str) -> SplitRecords:
        return entry.read_file(folder / entry.files[split])

    return _with_dev(Corpus(entry.name, tuple(entry.files), entry.licence, read))


def _with_dev(corpus: Corpus) -> Corpus:
    if "train" not in corpus.splits or {"dev", "validation"} & set(corpus.splits):
        return corpus

    def read(split: str) -> SplitRecords:
        if split not in ("train", "dev"):
            return corpus.read(split)
        upstream = corpus.read("train")
        train, dev = split_dev(upstream.samples)
        return SplitRecords(train if split == "train" else dev, upstream.num_skipped_lines)

    train = corpus.splits.index("train") + 1
    return replace(corpus, splits=(*corpus.splits[:train], "dev", *corpus.splits[train:]), read=read)


def _open_file(scheme: str, file: str) -> Corpus:
    path = expand_home(file)
    try:
        exists = bool(file) and path.exists()
    except OSError:
        exists = False
    if not exists:
        raise UnknownCorpusError(f"no corpus file {file!r}, named by {scheme}:FILE; check the path")
    name = check_name(path.stem, f"file {path.name!r} gives a corpus its name; rename it: corpus")

    def read(split: str) -> SplitRecords:
        return FILE_READERS[scheme](path)

    return Corpus(name, ("all",), "not stated (a local file)", read)


def _open_hub(address: str) -> Corpus:
    repository, revision, config = parse_address(address)
    parts = [*repository.split("/"), *([config] if config else [])]
    name = "--".join(check_name(part, "hub data set (export it and pass jsonl:FILE)") for part in parts)
    splits, licence = load_hub_dataset(repository, revision, config)

    def read(split: str) -> SplitRecords:
        return convert_dataset(splits[split], f"hf:{repository} {split}")

    return _with_dev(Corpus(name, tuple(splits), licence, read))
