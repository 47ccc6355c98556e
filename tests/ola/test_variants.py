"""Controls have the weights that they claim, by their seed, and never those of the genuine model."""

import copy
import re

import pytest
import torch
from transformers import AutoModel

from pipeline.ola.identity import identify_model
from pipeline.ola.load import load_model
from pipeline.ola.variants import make_variant
from storage_schema.errors import UnsupportedModelError
from storage_schema.recipe import VARIANTS

INPUT_IDS = torch.arange(10, 34).reshape(2, 12)
MASK = torch.ones_like(INPUT_IDS)
NUM_LAYERS = 6


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OLA_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module", params=["bert", "llama", "gpt2"])
def folder(request, build_model, tmp_path_factory):
    folder = build_model(tmp_path_factory.mktemp("models") / request.param, request.param, num_hidden_layers=NUM_LAYERS)
    model = AutoModel.from_pretrained(folder)
    with torch.no_grad():  # a trained model's gains and biases are not those of a fresh one
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(weight))))
    model.save_pretrained(folder)
    return folder


def load(folder, variant=None, seed=None, **settings):
    return load_model(identify_model(str(folder)), variant=variant, seed=seed, device="cpu", **settings)


def list_layers(model):
    stack = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    return [dict(layer.named_parameters()) for layer in stack]


def is_same(one, other):
    return all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_seed_decides_a_control_whatever_the_state_of_the_generator(folder, variant):
    torch.manual_seed(1)
    one = load(folder, variant, 3)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    two, other = load(folder, variant, 3), load(folder, variant, 4)
    assert torch.equal(torch.get_rng_state(), state)
    weights = [dict(loaded.model.named_parameters()) for loaded in (one, two, other)]
    assert is_same(weights[0], weights[1])
    assert not is_same(weights[0], weights[2])


def test_random_keeps_no_genuine_matrix(folder):
    genuine, control = load(folder).model, load(folder, "random", 0).model
    matrices = [name for name, weight in genuine.named_parameters() if weight.dim() == 2]
    drawn = dict(control.named_parameters())
    for name, weight in genuine.named_parameters():
        if name in matrices:
            assert not (weight == drawn[name]).all(), name


def test_half_random_replaces_half_of_the_layers_and_nothing_else(folder):
    genuine, control = load(folder).model, load(folder, "half-random", 0).model
    kept = [is_same(*pair) for pair in zip(list_layers(genuine), list_layers(control), strict=True)]
    assert kept.count(True) == NUM_LAYERS // 2
    inside = {id(weight) for layer in list_layers(control) for weight in layer.values()}
    for (name, weight), (_, other) in zip(genuine.named_parameters(), control.named_parameters(), strict=True):
        assert id(other) in inside or torch.equal(weight, other), name


def test_shuffled_layers_are_the_genuine_ones_in_another_order(folder):
    genuine, control = list_layers(load(folder).model), list_layers(load(folder, "shuffled-layers", 0).model)
    order = [next(place for place, layer in enumerate(genuine) if is_same(layer, found)) for found in control]
    assert sorted(order) == list(range(NUM_LAYERS))
    assert order != sorted(order)


@pytest.mark.parametrize("seed", range(8))
def test_two_layers_are_never_left_in_their_order(build_model, tmp_path, seed):
    folder = build_model(tmp_path / "tiny", "bert", num_hidden_layers=2)
    genuine, control = list_layers(load(folder).model), list_layers(load(folder, "shuffled-layers", seed).model)
    assert is_same(genuine[0], control[1])
    assert is_same(genuine[1], control[0])


def test_a_layer_that_no_other_is_like_keeps_its_place(build_model, tmp_path):
    folder = build_model(tmp_path / "tiny", "modernbert", num_hidden_layers=4, local_attention=8)
    genuine, control = list_layers(load(folder).model), list_layers(load(folder, "shuffled-layers", 0).model)
    assert genuine[0].keys() != genuine[1].keys()
    assert is_same(genuine[0], control[0])
    order = [next(place for place in (1, 2, 3) if is_same(genuine[place], found)) for found in control[1:]]
    assert sorted(order) == [1, 2, 3]
    assert order != sorted(order)
    kept = [is_same(*pair) for pair in zip(genuine, list_layers(load(folder, "half-random", 5).model), strict=True)]
    assert kept.count(True) == 2


@pytest.mark.parametrize("variant", ["half-random", "shuffled-layers"])
def test_all_parts_of_a_layer_go_with_it_where_a_model_keeps_them_in_lists_of_their_own(build_model, tmp_path, variant):
    folder = build_model(
        tmp_path / "tiny", "xlm", emb_dim=32, n_heads=4, n_layers=4, n_words=300, num_hidden_layers=4, pad_token_id=0
    )
    genuine, control = (dict(load(folder, *chosen).model.named_parameters()) for chosen in ((), (variant, 5)))

    def find_changed(part):
        pattern = re.compile(rf"(?:.*\.)?{part}\.(\d+)\.")
        names = [name for name in genuine if pattern.match(name) and genuine[name].dim() == 2]
        assert names
        return {pattern.match(name)[1] for name in names if not torch.equal(genuine[name], control[name])}

    assert find_changed("attentions") == find_changed("ffns")
    assert len(find_changed("ffns")) >= 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_maps_of_a_control_are_maps_and_not_the_genuine_ones(folder, variant):
    genuine, control = load(folder), load(folder, variant, 0)
    found, expected = (loaded.compute_maps(INPUT_IDS, MASK, (1, 2)) for loaded in (control, genuine))
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 2, 12), rtol=0, atol=1e-5)
    assert (found - expected).abs().max() > 1e-3
    assert control.packing == genuine.packing


def test_a_dtype_narrows_the_same_draw(folder):
    wide, narrow = load(folder, "random", 5).model, load(folder, "random", 5, compute_dtype="bfloat16").model
    for one, other in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert torch.equal(one.bfloat16(), other)


@pytest.mark.parametrize(("architecture", "num_layers"), [("albert", 3), ("bert", 1)])
@pytest.mark.parametrize("variant", ["half-random", "shuffled-layers"])
def test_a_model_without_two_layers_of_its_own_is_refused(build_model, tmp_path, architecture, num_layers, variant):
    folder = build_model(tmp_path / "tiny", architecture, embedding_size=16, num_hidden_layers=num_layers)
    with pytest.raises(UnsupportedModelError, match=rf"tiny \({architecture}\) has no stack of two"):
        load(folder, variant, 0)
    assert load(folder, "random", 0).num_layers == num_layers


def test_the_files_of_the_model_are_left_alone(folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    model = load(folder).model
    make_variant(copy.deepcopy(model), "random", 0, "tiny")
    load(folder, "shuffled-layers", 0)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
