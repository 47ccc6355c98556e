"""The longest text that a model takes is known before its weights are loaded, and a text of that length runs."""

import shutil
from pathlib import Path

import pytest
import torch

from pipeline.ola.identity import ModelIdentity, identify_model
from pipeline.ola.load import load_model
from storage_schema.errors import InvalidRecipeError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OLA_CACHE", str(tmp_path / "cache"))


def make_identity(max_positions):
    return ModelIdentity("tiny", Path("tiny"), "sha256:0", "0", max_positions, 3, "none")


@pytest.mark.parametrize(
    ("architecture", "changes", "max_positions"),
    [
        ("bert", {}, 64),
        ("roberta", {"pad_token_id": 1}, 62),
        ("xlm-roberta", {"pad_token_id": 1}, 62),
        ("mpnet", {"pad_token_id": 1}, 62),
        ("mpnet", {"pad_token_id": 0}, 62),
        ("esm", {"pad_token_id": 1}, 62),
        ("roberta", {"pad_token_id": 0}, 63),
        ("gpt2", {}, 64),
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}, 64),
        ("llama", {"max_position_embeddings": 4096}, 4096),
        ("bloom", {}, None),
    ],
)
def test_positions_are_those_that_a_text_can_use(build_model, tmp_path, architecture, changes, max_positions):
    folder = build_model(tmp_path / "tiny", architecture, **changes)
    assert identify_model(str(folder)).max_positions == max_positions


def test_xlnet_has_no_limit(tiny_bert, tmp_path):
    folder = shutil.copytree(tiny_bert, tmp_path / "tiny")
    (folder / "config.json").write_text('{"model_type": "xlnet", "n_layer": 3, "d_model": 32, "n_head": 4}')
    identity = identify_model(str(folder))
    assert (identity.max_positions, identity.resolve_max_length(None)) == (None, 512)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("bert", {}), ("roberta", {"pad_token_id": 1}), ("gpt2", {}), ("esm", {"pad_token_id": 1})],
)
def test_a_text_of_all_positions_runs_beside_a_short_one(build_model, tmp_path, architecture, changes):
    identity = identify_model(str(build_model(tmp_path / "tiny", architecture, **changes)))
    length = identity.resolve_max_length(identity.max_positions)
    input_ids = torch.randint(3, 300, (2, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(input_ids)
    input_ids[1, 2:], mask[1, 2:] = changes.get("pad_token_id", 0), 0
    maps = load_model(identity, device="cpu").compute_maps(input_ids, mask, (1, 2))
    torch.testing.assert_close(maps[0].sum(-1), torch.ones(2, length), rtol=0, atol=1e-5)
    torch.testing.assert_close(maps.sum(-1)[1], mask[1].expand(2, -1).float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("max_positions", "resolved"), [(None, 512), (64, 64), (512, 512), (513, 512), (8192, 512)])
def test_the_default_is_the_smaller_of_512_and_the_positions(max_positions, resolved):
    assert make_identity(max_positions).resolve_max_length(None) == resolved


@pytest.mark.parametrize(
    ("max_positions", "requested"), [(62, 62), (62, 1), (8192, 8192), (8192, 700), (None, 100_000)]
)
def test_what_the_model_can_take_is_taken_as_requested(max_positions, requested):
    assert make_identity(max_positions).resolve_max_length(requested) == requested


@pytest.mark.parametrize("requested", [63, 512, 10**9])
def test_more_than_the_positions_is_refused_naming_both(requested):
    with pytest.raises(InvalidRecipeError, match=rf"length {requested} is over the 62 positions of tiny.*at most 62"):
        make_identity(62).resolve_max_length(requested)


@pytest.mark.parametrize("requested", [0, -1])
@pytest.mark.parametrize("max_positions", [None, 62])
def test_less_than_one_token_is_refused(max_positions, requested):
    with pytest.raises(InvalidRecipeError, match=f"maximum length {requested} is too small; give 1 or more"):
        make_identity(max_positions).resolve_max_length(requested)
