"""Hub models: what is asked of a hub, what is never downloaded, and what is said without one."""

import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

REVISION = "0123456789abcdef0123456789abcdef01234567"
OLDER = "89abcdef0123456789abcdef0123456789abcdef"
PICKLES = (
    "pytorch_model.bin",
    "training_args.bin",
    "model.pkl",
    "model.pt",
    "model.ckpt",
    "rust_model.ot",
    "tf_model.h5",
)
CONFIGURATION = """
from transformers import BertConfig
class OwnConfig(BertConfig):
    model_type = "own"
"""
MODELING = """
from transformers import BertModel
from .configuration_own import OwnConfig
class OwnModel(BertModel):
    config_class = OwnConfig
"""


class Hub(BaseHTTPRequestHandler):
    """Serves the models in `server.folder` at REVISION and OLDER, and notes each path asked in `server.asked`."""

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
        self.server.asked.append(path)
        parts = path.removeprefix("/api/models").strip("/").split("/")
        folder, rest = self.server.folder / parts[1], parts[2:]
        if parts[1] == "gated-everywhere" or (parts[1] == "gated" and rest[0] == "resolve"):
            self.answer(b"{}", 403 if self.headers.get("Authorization") else 401, X_Error_Code="GatedRepo")
        elif parts[1] == "broken":
            self.answer(b"{}", 500)
        elif not folder.is_dir():
            self.answer(b"{}", 401, X_Error_Code="RepoNotFound")
        elif len(rest) > 1 and rest[1] not in (REVISION, OLDER, "main"):
            self.answer(b"{}", 404, X_Error_Code="RevisionNotFound")
        elif not path.startswith("/api/"):
            self.answer_file(folder / "/".join(rest[2:]), rest[1])
        elif rest[0] == "tree":
            files = [
                {"type": "file", "path": file.name, "oid": file.name, "size": file.stat().st_size}
                for file in folder.iterdir()
            ]
            self.answer(json.dumps(files).encode(), Content_Type="application/json")
        else:
            siblings = [{"rfilename": file.name} for file in folder.iterdir()]
            card = {"id": "/".join(parts[:2]), "sha": REVISION, "siblings": siblings}
            self.answer(json.dumps(card).encode(), Content_Type="application/json")

    def answer_file(self, file, revision):
        if file.is_file():
            self.answer(file.read_bytes(), ETag=f'"{file.parent.name}-{file.name}"', X_Repo_Commit=revision)
        else:
            self.answer(b"{}", 404, X_Error_Code="EntryNotFound")

    do_HEAD = do_GET  # noqa: N815


@pytest.fixture(scope="module")
def hub(tiny_bert, tmp_path_factory):
    """A hub on the loopback interface with the models of `org`."""
    folder = tmp_path_factory.mktemp("hub")
    tiny = shutil.copytree(tiny_bert, folder / "tiny")
    shutil.copytree(tiny_bert, folder / "gated")
    for name in PICKLES:
        (tiny / name).write_bytes(b"\x80\x04.")
    pickled = shutil.copytree(tiny_bert, folder / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    own = shutil.copytree(tiny_bert, folder / "own")
    (own / "configuration_own.py").write_text(CONFIGURATION)
    (own / "modeling_own.py").write_text(MODELING)
    config = json.loads((own / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "configuration_own.OwnConfig", "AutoModel": "modeling_own.OwnModel"},
    }
    (own / "config.json").write_text(json.dumps(config))
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.folder, server.asked = folder, []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def identify_elsewhere(model, home, *, trust=False, code="", **settings):
    """The last line of a fresh process, since the hub's address is read once a process: the identity or the error."""
    script = f"""
from pipeline.ola.identity import identify_model
identity = identify_model({model!r}, trust_remote_code={trust})
print(identity.name, identity.revision, identity.num_layers, identity.licence, sep="|")
{code}
"""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_HOME": str(home), "OLA_CACHE": str(home / "cache"), **settings}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    return (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1]


@pytest.fixture
def identify_on_hub(hub, tmp_path):
    """`identify_elsewhere` with the loopback hub and a cache of its own."""
    hub.asked.clear()
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    return lambda model, home=tmp_path, **settings: identify_elsewhere(
        model, home, **{"HF_ENDPOINT": endpoint, **settings}
    )


def test_a_hub_model_is_its_commit_without_pickles_and_then_needs_no_network(hub, identify_on_hub, tmp_path):
    code = (
        "from pipeline.ola.load import load_model; print(identity.revision, load_model(identity, device='cpu').packing)"
    )
    assert identify_on_hub("org/tiny", code=code) == f"commit:{REVISION} full"
    files = {path.rpartition("/")[2] for path in hub.asked if "/resolve/" in path}
    assert "model.safetensors" in files
    assert not files & set(PICKLES)
    assert not [path for path in tmp_path.rglob("*") if path.name in PICKLES]
    for settings in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        assert identify_on_hub("org/tiny", **settings).startswith(f"org/tiny|commit:{REVISION}|3|")


def test_a_commit_pins_the_revision_and_leaves_the_name(identify_on_hub):
    assert identify_on_hub(f"org/tiny@{OLDER}").startswith(f"org/tiny|commit:{OLDER}|3|")


@pytest.mark.parametrize(
    ("model", "settings", "messages"),
    [
        ("org/none", {}, ("UnknownModelError: the hub knows no model org/none", "HF_TOKEN", "ola models")),
        (f"org/tiny@{'f' * 40}", {}, (f"UnknownModelError: the hub knows no model org/tiny@{'f' * 40}",)),
        ("org/pickled", {}, ("UnsupportedModelError: org/pickled", "no safetensors", "pickled ones are never read")),
        ("org/broken", {}, ("UnknownModelError: org/broken", "--model path/to/model")),
        *(
            (
                model,
                settings,
                (f"UnknownModelError: {model} is gated", f"licence at https://huggingface.co/{model}", "set HF_TOKEN"),
            )
            for model in ("org/gated", "org/gated-everywhere")
            for settings in ({}, {"HF_TOKEN": "hf_not_a_secret"})
        ),
    ],
)
def test_what_the_hub_does_not_give_is_said_by_name(identify_on_hub, model, settings, messages):
    found = identify_on_hub(model, **settings)
    assert [message for message in messages if message not in found] == []
    assert "hf_not_a_secret" not in found


def test_a_gated_registry_model_names_its_licence_page(hub, identify_on_hub, monkeypatch):
    shutil.copytree(hub.folder / "gated", hub.folder / "Llama-3.2-3B-Instruct", dirs_exist_ok=True)
    monkeypatch.setattr(Hub, "answer_file", lambda self, *_: self.answer(b"{}", 403, X_Error_Code="GatedRepo"))
    found = identify_on_hub("llama-3.2-3b")
    assert "UnknownModelError: meta-llama/Llama-3.2-3B-Instruct is gated" in found
    assert "https://huggingface.co/meta-llama/Llama-3.2-3B-Instruct" in found
    assert "HF_TOKEN" in found


@pytest.mark.parametrize("settings", [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}])
def test_without_a_network_the_error_says_so_and_how_to_pass_a_directory(tmp_path, settings):
    found = identify_elsewhere("no-such-org/no-such-model", tmp_path, **settings)
    assert "UnknownModelError: no-such-org/no-such-model" in found
    assert "the hub cannot be reached" in found
    assert "--model path/to/model" in found


def test_without_a_network_a_gated_registry_model_names_its_licence_page_too(tmp_path):
    found = identify_elsewhere("gemma-2-2b", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert "google/gemma-2-2b-it" in found
    assert "https://ai.google.dev/gemma/terms" in found
    assert "HF_TOKEN" in found


def test_code_of_a_directory_runs_where_the_user_trusts_it(hub, identify_on_hub):
    folder = str(hub.folder / "own")
    code = "from pipeline.ola.load import load_model; print(type(load_model(identity, device='cpu').model).__name__)"
    assert identify_on_hub(folder, trust=True, code=code) == "OwnModel"


def test_code_of_a_hub_model_is_downloaded_only_where_the_user_trusts_it(hub, identify_on_hub):
    assert "UnsupportedModelError: org/own" in identify_on_hub("org/own")
    assert not [path for path in hub.asked if path.endswith(".py")]
    assert identify_on_hub("org/own", trust=True).startswith(f"org/own|commit:{REVISION}|3|")


def test_a_fetch_that_was_cut_off_is_completed_by_the_next(hub, identify_on_hub, tmp_path, monkeypatch):
    genuine = Hub.answer_file

    def drop_weights(self, file, revision):
        if file.suffix == ".safetensors":
            self.close_connection = True
            self.connection.close()
        else:
            genuine(self, file, revision)

    monkeypatch.setattr(Hub, "answer_file", drop_weights)
    assert "UnknownModelError: org/tiny" in identify_on_hub("org/tiny")
    assert "UnknownModelError: org/tiny" in identify_on_hub("org/tiny", HF_HUB_OFFLINE="1")
    monkeypatch.setattr(Hub, "answer_file", genuine)
    assert identify_on_hub("org/tiny").startswith(f"org/tiny|commit:{REVISION}|3|")
    assert not list(Path(tmp_path).rglob("*.incomplete"))
