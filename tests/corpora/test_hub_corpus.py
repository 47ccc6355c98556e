"""Hub data sets: conversion of columns, and what is said without a hub."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pipeline.corpora.hub import convert_dataset, parse_address
from pipeline.corpora.registry import open_corpus
from storage_schema.errors import CorpusFormatError, InvalidNameError, UnknownCorpusError
from storage_schema.samples import Relation

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def datasets():
    return pytest.importorskip("datasets")


def tags(datasets, *names):
    return datasets.List(datasets.ClassLabel(names=list(names)))


def test_class_labels_become_their_names(datasets):
    features = datasets.Features(
        tokens=datasets.List(datasets.Value("string")),
        ner_tags=tags(datasets, "O", "B-PER"),
        pos_tags=tags(datasets, "NNP", "VBZ"),
        chunk_tags=tags(datasets, "B-NP", "B-VP"),
        label=datasets.ClassLabel(names=["dull", "fine"]),
        url=datasets.Value("string"),
    )
    rows = {
        "tokens": [["Ann", "sings"], ["Ann"]],
        "ner_tags": [[1, 0], [1]],
        "pos_tags": [[0, 1], [0]],
        "chunk_tags": [[0, 1], [0]],
        "label": [1, -1],
        "url": ["x", "y"],
    }
    first, second = convert_dataset(datasets.Dataset.from_dict(rows, features), "hf:a/b train").samples
    assert (first.text, first.words) == ("Ann sings", ("Ann", "sings"))
    assert (first.entities, first.xpos, first.chunks) == (("B-PER", "O"), ("NNP", "VBZ"), ("B-NP", "B-VP"))
    assert (first.label, second.label) == ("fine", None)


def test_columns_of_our_names_are_read_and_columns_of_other_types_ignored(datasets):
    rows = {
        "sentence": ["Ann sings.", "Bo"],
        "words": [["Ann", "sings", "."], ["Bo"]],
        "heads": [[2, 0, 2], [0]],
        "relations": [[{"first": [0, 1], "second": [1, 2], "label": "r"}], []],
        "label": [0.5, 0.1],
        "upos": ["X", "X"],
        "document_id": ["d", "d"],
    }
    first, second = convert_dataset(datasets.Dataset.from_dict(rows), "hf:a/b train").samples
    assert first.word_spans == ((0, 3), (4, 9), (9, 10))
    assert (first.heads, first.document_id, first.label, first.upos) == ((2, 0, 2), "d", None, None)
    assert (first.relations, second.relations) == ((Relation((0, 1), (1, 2), "r"),), ())


def test_blank_rows_are_skipped_and_counted(datasets):
    records = convert_dataset(datasets.Dataset.from_dict({"text": ["", "one two", " \n", None]}), "hf:a/b train")
    assert ([sample.text for sample in records.samples], records.num_skipped_lines) == (["one two"], 3)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"body": ["x"]}, "hf:a/b train has no column .* only body"),
        ({"text": [1]}, "has no column of strings"),
        ({"text": [" "]}, "holds no sample"),
        ({"text": ["a", "b c"], "upos": [["X"], ["X"]]}, "hf:a/b train, row 1: `upos` has 1 values for 2 words"),
    ],
)
def test_unusable_rows_are_refused_by_name(datasets, rows, message):
    with pytest.raises(CorpusFormatError, match=message):
        convert_dataset(datasets.Dataset.from_dict(rows), "hf:a/b train")


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("a/b", ("a/b", None, None)),
        ("a/b:c", ("a/b", None, "c")),
        (f"a/b@{REVISION}", ("a/b", REVISION, None)),
        (f"a/b@{REVISION}:c", ("a/b", REVISION, "c")),
    ],
)
def test_address_holds_repository_revision_and_configuration(address, parts):
    assert parse_address(address) == parts


@pytest.mark.parametrize("spec", ["hf:", "hf:name", "hf:a/b/c", "hf:a/b@main", "hf:a/b:", "hf:a/b@0123:c"])
def test_malformed_address_says_the_form(spec):
    with pytest.raises(UnknownCorpusError, match=r"expected hf:ORG/NAME\[@REVISION\]"):
        open_corpus(spec)


def test_names_that_may_not_stand_in_a_ref_are_refused():
    with pytest.raises(InvalidNameError, match="jsonl:FILE"):
        open_corpus("hf:../name")


def test_folder_that_would_be_read_instead_of_the_hub_is_named(tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownCorpusError, match="local folder"):
        open_corpus("hf:org/name")


FILES = {
    "README.md": b"---\nlicense: mit\n---\n",
    "train.jsonl": b'{"text": "one two", "label": "x"}\n',
    "validation.jsonl": b'{"text": "three", "label": "y"}\n',
}


class Hub(BaseHTTPRequestHandler):
    """A hub with the one public data set `org/data` at REVISION, and the gated one `org/gated`."""

    def log_message(self, *arguments):
        pass

    def answer(self, body, status=200, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        path = self.path.partition("?")[0]
        file = path.rpartition("/")[2]
        if path.startswith("/api/datasets/org/gated"):
            self.answer(b"{}", 403, X_Error_Code="GatedRepo")
        elif "/org/data" not in path:
            self.answer(b"{}", 404, X_Error_Code="RepoNotFound")
        elif "/revision/" in path and file != REVISION:
            self.answer(b"{}", 404, X_Error_Code="RevisionNotFound")
        elif "/tree/" in path:
            rows = [{"type": "file", "path": name, "oid": name, "size": len(body)} for name, body in FILES.items()]
            self.answer(json.dumps(rows).encode())
        elif path.startswith("/api/"):
            siblings = [{"rfilename": name} for name in FILES]
            card = {"id": "org/data", "sha": REVISION, "cardData": {"license": "mit"}, "siblings": siblings}
            self.answer(json.dumps(card).encode(), Content_Type="application/json")
        elif file in FILES:
            self.answer(FILES[file], ETag=f'"{file}"', X_Repo_Commit=REVISION)
        else:
            self.answer(b"{}", 404, X_Error_Code="EntryNotFound")

    do_HEAD = do_GET  # noqa: N815


def open_elsewhere(spec, **settings):
    """Opens a corpus in a fresh process, since the hub's address is read once a process; prints what it found."""
    code = f"""
from pipeline.corpora.registry import open_corpus
corpus = open_corpus({spec!r})
print(corpus.name, corpus.splits, corpus.licence, [corpus.read(split).samples[0].text for split in corpus.splits])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | settings, capture_output=True, text=True, check=False
    )
    return (done.stdout or done.stderr).strip().splitlines()[-1]


@pytest.fixture
def open_on_hub(tmp_path):
    """`open_elsewhere` with a hub on the loopback interface."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        yield lambda spec: open_elsewhere(spec, HF_ENDPOINT=endpoint, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0")
        server.shutdown()


@pytest.mark.parametrize("spec", ["hf:org/data", f"hf:org/data@{REVISION}"])
def test_hub_data_set_is_read_with_its_own_splits_and_licence(open_on_hub, spec):
    assert open_on_hub(spec) == "org--data ('train', 'validation') mit ['one two', 'three']"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hf:org/none", "the hub knows no data set org/none"),
        (f"hf:org/data@{'f' * 40}", f"hf:org/data has no revision {'f' * 40}"),
        ("hf:org/data:nope", "hf:org/data: BuilderConfig 'nope' not found. Available: ['default']"),
        ("hf:org/gated", "accept its licence at https://huggingface.co/datasets/org/gated and set HF_TOKEN"),
    ],
)
def test_what_the_hub_has_not_is_unknown(open_on_hub, spec, message):
    found = open_on_hub(spec)
    assert "UnknownCorpusError" in found
    assert message in found


@pytest.mark.parametrize("settings", [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}])
def test_without_a_hub_the_error_offers_a_local_file(settings):
    found = open_elsewhere("hf:no-such-org/no-such-data", **settings)
    assert "UnknownCorpusError: hf:no-such-org/no-such-data: the hub cannot be reached" in found
    assert "jsonl:FILE" in found
