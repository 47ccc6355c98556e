"""A local directory is identified by its content, from memory the second time; a bad one is refused by name."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from pipeline.ola.identity import identify_model
from storage_schema.errors import InvalidNameError, OlaError, UnknownModelError, UnsupportedModelError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OLA_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tiny_bert, tmp_path):
    """A copy of a tiny BERT that a test may change."""
    return shutil.copytree(tiny_bert, tmp_path / "tiny")


def flip_byte(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_directory_has_its_base_name_and_a_revision_of_its_own(folder):
    identity = identify_model(str(folder))
    assert (identity.name, identity.path) == ("tiny", folder)
    assert (identity.num_layers, identity.max_positions) == (3, 64)
    kind, _, digest = identity.revision.partition(":")
    assert (kind, len(digest), len(identity.tokenizer_sha256)) == ("sha256", 64, 64)
    assert identify_model(str(folder)) == identity


@pytest.mark.parametrize("spelling", ["./tiny", "tiny/", "../{parent}/tiny", "~/tiny"])
def test_spellings_of_one_directory_are_one_model(folder, monkeypatch, spelling):
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    assert identify_model(spelling.format(parent=folder.parent.name)) == identify_model(str(folder))


def test_copies_of_one_model_have_one_revision(folder, tmp_path):
    copied = identify_model(str(shutil.copytree(folder, tmp_path / "elsewhere" / "tiny")))
    here = identify_model(str(folder))
    assert (copied.name, copied.revision, copied.tokenizer_sha256) == (here.name, here.revision, here.tokenizer_sha256)


def test_one_changed_byte_of_the_weights_changes_the_revision_alone(folder):
    before = identify_model(str(folder))
    flip_byte(folder / "model.safetensors", -5)
    after = identify_model(str(folder))
    assert after.revision != before.revision
    assert after.tokenizer_sha256 == before.tokenizer_sha256


def test_a_changed_tokenizer_changes_its_hash_alone(folder):
    before = identify_model(str(folder))
    edit_json(folder / "tokenizer.json", version="1.1")
    after = identify_model(str(folder))
    assert after.tokenizer_sha256 != before.tokenizer_sha256
    assert after.revision == before.revision


@pytest.mark.parametrize("changes", [{"num_attention_heads": 2}, {"layer_norm_eps": 0.5}, {"hidden_act": "relu"}])
def test_a_config_that_computes_something_else_changes_the_identity(folder, changes):
    before = identify_model(str(folder))
    edit_json(folder / "config.json", **changes)
    after = identify_model(str(folder))
    assert (after.revision, after.tokenizer_sha256) != (before.revision, before.tokenizer_sha256)


def test_a_changed_config_is_not_answered_from_memory(folder):
    assert identify_model(str(folder)).max_positions == 64
    edit_json(folder / "config.json", max_position_embeddings=48)
    assert identify_model(str(folder)).max_positions == 48


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"weights_sha256": "x"}'])
def test_a_damaged_memory_is_made_anew(folder, tmp_path, content):
    identity = identify_model(str(folder))
    (remembered,) = (tmp_path / "cache" / "facts").iterdir()
    remembered.write_bytes(content)
    assert identify_model(str(folder)) == identity
    assert json.loads(remembered.read_bytes())["num_layers"] == 3


def test_asking_again_imports_neither_torch_nor_transformers(folder):
    code = f"""
import sys
from pipeline.ola.identity import identify_model
print(identify_model({str(folder)!r}).revision)
print([name for name in ("torch", "transformers", "huggingface_hub") if name in sys.modules])
"""
    first = identify_model(str(folder))
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [first.revision, "[]"]


def remove(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def write(name, content):
    return lambda folder: (folder / name).write_text(content)


def keep_pickle_only(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def set_config(**changes):
    return lambda folder: edit_json(folder / "config.json", **changes)


TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove("config.json"), "tiny: no config.json in .*/tiny"),
        (write("config.json", "{"), r"tiny: config\.json in .* is not a JSON object"),
        (write("config.json", ""), r"tiny: config\.json in .* is not a JSON object"),
        (write("config.json", "[1]"), r"tiny: config\.json in .* is not a JSON object"),
        (remove("model.safetensors"), r"tiny: no \*\.safetensors weights in .*/tiny$"),
        (keep_pickle_only, r"no \*\.safetensors .*pytorch_model\.bin is pickled, which is never read: convert it"),
        (remove(*TOKENIZER), r"tiny: no tokenizer in .* save one there \(tokenizer\.json\)"),
        (set_config(model_type="nonsense"), "tiny: transformers cannot read its config.json: .*nonsense"),
        (set_config(model_type=None), "tiny: transformers cannot read its config.json"),
        (set_config(model_type=["bert"]), "tiny: .*config.json"),
        (set_config(model_type="rwkv"), "tiny is a rwkv model, which has no attention matrices"),
        (set_config(model_type="mamba"), "tiny is a mamba model, which has no attention matrices"),
        (set_config(model_type="mamba2"), "tiny is a mamba2 model, which has no attention matrices"),
        (write("config.json", '{"model_type": "bart"}'), r"tiny is an encoder-decoder \(bart\)"),
        (write("config.json", '{"model_type": "t5"}'), r"tiny is an encoder-decoder \(t5\)"),
        (set_config(num_hidden_layers=0), r"tiny \(bert\): its config names no attention layers"),
        (set_config(hidden_size="wide"), "tiny: .*config.json.*hidden_size"),
        (set_config(model_type="roberta", pad_token_id=None), r"tiny.*pad_token_id"),
    ],
)
def test_a_directory_that_is_no_model_of_ours_says_what_is_wrong(folder, change, message):
    change(folder)
    with pytest.raises(UnsupportedModelError, match=f"(?s){message}"):
        identify_model(str(folder))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{folder}/config.json", "is a file; a local model is a directory"),
        ("./missing", "there is no model directory ./missing"),
        ("{folder}/missing", "there is no model directory .*/missing"),
        ("~/missing", "there is no model directory ~/missing"),
        ("../missing", "there is no model directory ../missing"),
        ("missing", "unknown model 'missing': expected a registry name .* or a local directory"),
        ("a/b/c", "unknown model 'a/b/c'"),
        ("org/name@main", "unknown model 'org/name@main'"),
        ("org/name@0123abc", "unknown model 'org/name@0123abc'"),
        ("org/", "unknown model 'org/'"),
        ("org/na me", "unknown model 'org/na me'"),
        ("a/..", r"a/\.\."),
        ("-x/y", "-x/y"),
        ("org/na--me", "org/na--me"),
        ("org/name.git", "org/name.git"),
        ("org/模型", "org/模型"),
        ("", "unknown model ''"),
    ],
)
def test_a_name_of_nothing_says_what_a_model_may_be(folder, monkeypatch, model, message):
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.setenv("HF_HOME", str(folder.parent / "hub"))
    with pytest.raises(UnknownModelError, match=message):
        identify_model(model.format(folder=folder))


@pytest.mark.parametrize("name", ["my model", ".hidden", "_tiny", "tiny+x", "tiny@v1", "模型", "tiny\n"])
def test_a_directory_whose_base_name_may_not_stand_in_a_ref_is_refused(folder, tmp_path, name):
    renamed = folder.rename(tmp_path / name)
    with pytest.raises(InvalidNameError, match=r"model name .* is not allowed: use letters"):
        identify_model(str(renamed))


def test_a_cache_that_cannot_be_written_is_refused_by_name(folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OLA_CACHE", str(tmp_path / "file"))
    with pytest.raises(OlaError, match=r"OLA_CACHE|cache"):
        identify_model(str(folder))
