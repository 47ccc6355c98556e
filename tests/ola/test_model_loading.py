"""Loading refuses, by name, every model whose attention or weights are not the genuine ones."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

from pipeline.ola import attention
from pipeline.ola.check import check_model
from pipeline.ola.identity import identify_model
from pipeline.ola.load import load_model
from storage_schema.errors import InvalidRecipeError, NonFiniteMapError, UnsupportedModelError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OLA_CACHE", str(tmp_path / "cache"))


def load(folder, **settings):
    return load_model(identify_model(str(folder)), device="cpu", **settings)


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in (config | changes).items() if value is not ...}))
    return folder


@pytest.mark.parametrize(("architecture", "calls"), [("recurrent_gemma", "1 of its 3")])
def test_a_model_whose_attention_cannot_be_read_is_refused(build_model, tmp_path, architecture, calls):
    folder = build_model(tmp_path / f"tiny-{architecture}", architecture)
    with pytest.raises(UnsupportedModelError, match=rf"tiny-{architecture} \({architecture}\) sent {calls} layers"):
        load(folder)


@pytest.mark.parametrize(("architecture", "changes"), [("convbert", {"embedding_size": 16}), ("nystromformer", {})])
def test_a_model_whose_attention_depends_on_padding_is_refused(build_model, tmp_path, architecture, changes):
    folder = build_model(tmp_path / "tiny", architecture, **changes)
    with pytest.raises(UnsupportedModelError, match=rf"tiny \({architecture}\), layer \d: padding changes a text's"):
        load(folder)


def test_blocks_with_norms_of_their_own_kind_are_refused_for_baselines_only(build_model, tmp_path):
    folder = build_model(tmp_path / "tiny", "mobilebert")
    assert load(folder).num_layers == 3
    with pytest.raises(UnsupportedModelError, match=r"tiny \(mobilebert\).*irnl and alti"):
        load(folder, maps=("irnl",))


def test_a_weight_that_is_not_in_the_file_is_refused_instead_of_made_up(build_model, tmp_path):
    folder = build_model(tmp_path / "tiny", "bert")
    weights = load_file(folder / "model.safetensors")
    del weights["encoder.layer.1.attention.self.key.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UnsupportedModelError, match=r"tiny: 1 weights .*encoder\.layer\.1\.attention\.self\.key\.weight"
    ):
        load(folder)


def test_a_pooler_may_be_missing_since_no_attention_follows_it(build_model, tmp_path):
    folder = build_model(tmp_path / "tiny", "bert")
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if "pooler" not in name}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    assert load(folder).num_layers == 3


def test_weights_saved_with_a_head_give_the_same_maps_as_those_without(build_model, tmp_path):
    plain = build_model(tmp_path / "plain", "bert")
    headed = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(plain))
    headed.bert.load_state_dict(load_file(plain / "model.safetensors"), strict=False)
    headed.save_pretrained(build_model(tmp_path / "headed", "bert"))
    input_ids = torch.arange(10, 22)[None]
    found = [
        load(tmp_path / name).compute_maps(input_ids, torch.ones_like(input_ids), (1, 2))
        for name in ("plain", "headed")
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 64},
        {"num_attention_heads": 5},
        {"num_attention_heads": 0},
        {"num_hidden_layers": 4},
        {"vocab_size": 301},
    ],
)
def test_a_config_that_does_not_fit_the_weights_is_refused(build_model, tmp_path, changes):
    folder = edit_config(build_model(tmp_path / "tiny", "bert"), **changes)
    with pytest.raises(UnsupportedModelError, match=r"^tiny: "):
        load(folder)


@pytest.mark.parametrize("content", ["truncated", "garbage", "empty"])
def test_a_damaged_weight_file_is_refused_by_name(build_model, tmp_path, content):
    folder = build_model(tmp_path / "tiny", "bert")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes({"truncated": whole[: len(whole) // 2], "garbage": b"garbage!" * 9, "empty": b""}[content])
    with pytest.raises(UnsupportedModelError, match=r"^tiny: transformers cannot load it"):
        load(folder)


def test_nan_in_the_weights_is_refused_naming_the_layer(build_model, tmp_path):
    folder = build_model(tmp_path / "tiny", "bert")
    weights = load_file(folder / "model.safetensors")
    weights["encoder.layer.1.attention.self.query.weight"][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises((UnsupportedModelError, NonFiniteMapError), match=r"layer 1.*NaN or infinity; its weights hold"):
        load(folder)


def test_sparse_blocks_are_refused_before_transformers_switches_them_off(build_model, tmp_path):
    folder = build_model(tmp_path / "tiny", "big_bird", block_size=4)
    with pytest.raises(UnsupportedModelError, match=r"tiny \(big_bird\).*'block_sparse'.*original_full"):
        load(folder)
    assert load(edit_config(folder, attention_type="original_full")).num_layers == 3


def test_a_mask_of_one_row_is_read_for_texts_longer_than_a_block(build_model, tmp_path):
    folder = build_model(tmp_path / "tiny", "layoutlm", max_position_embeddings=200)
    input_ids = torch.arange(10, 160)[None]
    loaded = load(folder)
    found = loaded.compute_maps(input_ids, torch.ones_like(input_ids), (1,))
    with torch.inference_mode():
        layers = [layer[0].mean(0) for layer in loaded.model(input_ids=input_ids, output_attentions=True).attentions]
    torch.testing.assert_close(found[0, 0], torch.stack(layers).mean(0), rtol=0, atol=1e-6)


def test_masks_of_single_heads_are_read(build_model, tmp_path):
    """Doge hides other keys in each head, so a block of queries sees what any head sees."""
    folder = build_model(tmp_path / "tiny", "doge", keep_window_size=8, num_key_value_heads=4)
    weights = load_file(folder / "model.safetensors")
    for layer in range(3):  # as they are drawn, all keys are equally good
        weights[f"layers.{layer}.self_attn.A"] = torch.tensor([0.3, -0.5, 0.8, -1.0])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    loaded = load(folder)
    input_ids = torch.arange(10, 70)[None]
    found = loaded.compute_maps(input_ids, torch.ones_like(input_ids), (1,))
    with torch.inference_mode():
        layers = [layer[0].mean(0) for layer in loaded.model(input_ids=input_ids, output_attentions=True).attentions]
    torch.testing.assert_close(found[0, 0], torch.stack(layers).mean(0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("factor", [20, 200])
def test_sharp_attention_in_a_narrow_dtype_is_held_to_its_formula(build_model, tmp_path, dtype, factor):
    """Eager attention rounds scores to the dtype, and overflows in float16 (transformers#33317); ours does not."""
    folder = build_model(tmp_path / "tiny", "llama", initializer_range=0.2)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if "q_proj" in name or "k_proj" in name:
            weights[name] *= factor
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    loaded = load(folder, compute_dtype=dtype)
    input_ids = torch.arange(10, 60)[None]
    (order,) = loaded.compute_maps(input_ids, torch.ones_like(input_ids), (1,))[0]
    assert not order.triu(1).any()
    torch.testing.assert_close(order.sum(-1), torch.ones(50), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_wrong_scores_in_a_narrow_dtype_are_still_refused(build_model, tmp_path, monkeypatch, dtype):
    folder = build_model(tmp_path / "tiny", "llama", initializer_range=0.2)
    genuine = attention.compute_head_mean_attention

    def scale(query, *rest):
        return genuine(query * 1.1, *rest)

    monkeypatch.setattr(attention, "compute_head_mean_attention", scale)
    with pytest.raises(UnsupportedModelError, match=r"tiny \(llama\), layer 0: .*from its formula by"):
        load(folder, compute_dtype=dtype)


def test_more_layers_than_tensors_are_refused_before_they_are_built(build_model, tmp_path):
    folder = edit_config(build_model(tmp_path / "tiny", "llama"), num_hidden_layers=10**9)
    with pytest.raises(UnsupportedModelError, match=r"names 1000000000 layers, its weight files hold \d+ tensors"):
        load(folder)


def test_a_library_s_whole_reason_is_shown_on_one_line(build_model, tmp_path):
    folder = edit_config(build_model(tmp_path / "tiny", "llama"), num_hidden_layers="many")
    with pytest.raises(UnsupportedModelError, match=r"num_hidden_layers.*'many'") as refusal:
        load(folder)
    assert "\n" not in str(refusal.value)


def test_weights_of_another_shape_are_named_with_both_shapes(build_model, tmp_path):
    folder = edit_config(build_model(tmp_path / "tiny", "bert"), vocab_size=301)
    with pytest.raises(UnsupportedModelError, match=r"word_embeddings\.weight is \(300, 32\), expected \(301, 32\)"):
        load(folder)


def test_a_model_that_its_caller_loaded_for_another_attention_is_checked_all_the_same(tiny_bert):
    model = AutoModel.from_pretrained(tiny_bert, attn_implementation="sdpa").eval()
    assert check_model(model, "tiny", 1e-5).num_layers == 3
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("architecture", ["t5", "bart"])
def test_an_encoder_decoder_whose_config_does_not_say_so_is_refused_as_one(build_model, tmp_path, architecture):
    folder = edit_config(build_model(tmp_path / "tiny", architecture), is_encoder_decoder=...)
    with pytest.raises(UnsupportedModelError, match=rf"tiny .*encoder-decoder.*\({architecture}\)"):
        load(folder)


def test_a_model_whose_own_pass_fails_is_refused_by_name(build_model, tmp_path):
    folder = build_model(tmp_path / "tiny", "xmod", pad_token_id=1)
    with pytest.raises(UnsupportedModelError, match=r"tiny \(xmod\)|tiny: "):
        load(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"return_dict": False},
        {"output_attentions": True},
        {"output_hidden_states": True},
        {"use_cache": False},
        {"tie_word_embeddings": False},
    ],
)
@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_output_options_left_in_a_config_do_not_matter(build_model, tmp_path, architecture, changes):
    folder = edit_config(build_model(tmp_path / "tiny", architecture), **changes)
    loaded = load(folder)
    input_ids = torch.arange(10, 22)[None]
    found = loaded.compute_maps(input_ids, torch.ones_like(input_ids), (1,))
    torch.testing.assert_close(found.sum(-1), torch.ones(1, 1, 12), rtol=0, atol=1e-5)


def test_a_vocabulary_of_eight_tokens_is_enough(build_model, tmp_path):
    assert load(build_model(tmp_path / "tiny", "bert", vocab_size=8)).num_layers == 3


def test_a_causal_variant_of_a_bidirectional_architecture_is_packed_as_its_lower_triangle(build_model, tmp_path):
    assert load(build_model(tmp_path / "tiny", "bert", is_decoder=True)).packing == "lower"


@pytest.mark.parametrize("device", ["nonsense", "meta", "cuda:99"])
def test_a_device_that_cannot_compute_here_is_refused(tiny_bert, device):
    with pytest.raises(InvalidRecipeError, match=f"device '{device}'"):
        load_model(identify_model(str(tiny_bert)), device=device)


@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_attention_that_differs_from_eager_is_refused_naming_the_layer(
    build_model, tmp_path, monkeypatch, architecture
):
    model = load(build_model(tmp_path / "tiny", architecture, initializer_range=0.2)).model
    layers = model.encoder.layer if architecture == "bert" else model.layers
    attention = layers[1].attention.self if architecture == "bert" else layers[1].self_attn
    genuine = attention.forward

    def scale_when_read(*arguments, **options):
        scaling = attention.scaling
        if model.config._attn_implementation != "eager":
            attention.scaling = scaling * 2
        try:
            return genuine(*arguments, **options)
        finally:
            attention.scaling = scaling

    monkeypatch.setattr(attention, "forward", scale_when_read)
    with pytest.raises(UnsupportedModelError, match=rf"tiny \({architecture}\), layer 1: .* differs from eager"):
        check_model(model, "tiny", 1e-5)


def test_the_random_state_of_the_caller_is_left_alone(tiny_bert):
    torch.manual_seed(11)
    before = torch.get_rng_state()
    load(tiny_bert)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_model_is_ready_for_inference_and_without_dropout(tiny_bert):
    model = load(tiny_bert).model
    assert not any(module.training for module in model.modules())
    assert model.config._attn_implementation == "eager"
