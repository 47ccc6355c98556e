"""IRNL and ALTI equal their definitions, spelled out in float64 with one vector a pair of tokens."""

import numpy as np
import pytest
import torch
from transformers import AutoModel

from pipeline.ola import blocks
from pipeline.ola.attention import reading_attention, run_model
from pipeline.ola.baselines import CONTRIBUTIONS, compute_alti, reconstruct_output
from pipeline.ola.blocks import Decomposition, reading_blocks
from pipeline.ola.identity import identify_model
from pipeline.ola.load import load_model
from storage_schema.errors import UnsupportedModelError

GROUPED = {"num_key_value_heads": 2}
BERT_LIKE = {
    "bert": {},
    "roberta": {"pad_token_id": 1},
    "xlm-roberta": {"pad_token_id": 1},
    "electra": {"embedding_size": 16},
}
LLAMA_LIKE = {"llama": GROUPED, "qwen2": GROUPED, "mistral": GROUPED, "gemma": {"head_dim": 8, **GROUPED}}
GEMMA_LIKE = {
    "gemma2": {"head_dim": 8, "attn_logit_softcapping": 1.0, "sliding_window": 4, **GROUPED},
    "gemma3_text": {"head_dim": 8, "sliding_window": 4, **GROUPED},
}
FAMILIES = BERT_LIKE | LLAMA_LIKE | GEMMA_LIKE
LENGTHS = (12, 1, 7)


@pytest.fixture(scope="module")
def load_tiny(build_model, tmp_path_factory):
    loaded = {}

    def load(family):
        if family not in loaded:
            folder = tmp_path_factory.mktemp("models") / family
            build_model(folder, family, initializer_range=0.2, **FAMILIES[family])
            _randomize_norms(folder)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("OLA_CACHE", str(tmp_path_factory.mktemp("cache")))
                identity = identify_model(str(folder))
            loaded[family] = (identity, load_model(identity, maps=("irnl", "alti"), device="cpu"))
        return loaded[family]

    return load


def _randomize_norms(folder):
    """Gains and biases as trained models have them: fresh ones hide what is scaled by what."""
    model = AutoModel.from_pretrained(folder)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name.lower() or name.endswith("bias"):
                weight.add_(0.5 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)


def make_batch(pad_token_id):
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(3, 300, (length,), generator=generator) for length in LENGTHS]
    input_ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=pad_token_id)
    return input_ids, (torch.arange(input_ids.shape[1]) < torch.tensor(LENGTHS)[:, None]).long(), texts


@torch.inference_mode()
def transform_by_definition(identity, text):
    """Each layer's transformed vectors t_ij [T, T, D] and real block outputs y_i [T, D], in float64."""
    model = AutoModel.from_pretrained(identity.path, attn_implementation="eager").double().eval()
    is_bert = hasattr(model, "encoder")
    layers = model.encoder.layer if is_bert else model.layers
    inputs, outputs = {}, {}
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda _, args, number=number: inputs.update({number: args[0][0]}))
        if is_bert:
            layer.attention.register_forward_hook(
                lambda _, args, out, number=number: outputs.update({number: out[0][0]})
            )
        else:
            after = getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm)
            after.register_forward_pre_hook(lambda _, args, number=number: outputs.update({number: args[0][0]}))
    attentions = model(input_ids=text[None], output_attentions=True).attentions
    found = []
    for number, layer in enumerate(layers):
        probabilities, x, y = attentions[number][0], inputs[number], outputs[number]
        if is_bert:
            attention = layer.attention
            values, dense, norm = attention.self.value(x), attention.output.dense, attention.output.LayerNorm
        else:
            values, dense = layer.self_attn.v_proj(layer.input_layernorm(x)), layer.self_attn.o_proj
            norm = layer.post_attention_layernorm if hasattr(layer, "pre_feedforward_layernorm") else None
        num_heads, size = len(probabilities), dense.in_features // len(probabilities)
        values = values.view(len(text), -1, size)
        transformed = torch.zeros(len(text), len(text), dense.out_features, dtype=torch.float64)
        for head in range(num_heads):
            shared = values[:, head * values.shape[1] // num_heads]
            projected = shared @ dense.weight[:, head * size : (head + 1) * size].T
            transformed += probabilities[head][:, :, None] * projected[None]
        own = torch.eye(len(text), dtype=torch.float64)[:, :, None] * x[None]
        before = transformed.sum(1) + (0 if dense.bias is None else dense.bias)
        if norm is None:
            transformed = transformed + own
        elif is_bert:
            total = before + x
            centered = (transformed + own) - (transformed + own).mean(-1, keepdim=True)
            transformed = centered / (total.var(-1, unbiased=False) + norm.eps).sqrt()[:, None, None] * norm.weight
        else:
            scale = (before.square().mean(-1) + norm.eps).rsqrt()[:, None, None]
            transformed = transformed * scale * (1 + norm.weight) + own
        found.append((transformed, y))
    return found


def multiply_by_definition(name, layers):
    product = torch.eye(layers[0][1].shape[0], dtype=torch.float64)
    for transformed, output in layers:
        if name == "irnl":
            scores = transformed.norm(dim=-1)
        else:
            scores = (output.abs().sum(-1)[:, None] - (output[:, None] - transformed).abs().sum(-1)).clamp_min(0)
        scores.diagonal()[scores.sum(-1) == 0] = 1.0
        product = scores / scores.sum(-1, keepdim=True) @ product
    return product


@pytest.mark.parametrize("tile_cells", [1, 1 << 22])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_padded_batch_equals_the_definition_one_text_at_a_time(load_tiny, monkeypatch, family, tile_cells):
    monkeypatch.setattr(blocks, "TILE_CELLS", tile_cells)
    identity, loaded = load_tiny(family)
    input_ids, mask, texts = make_batch(loaded.model.config.pad_token_id)
    found = loaded.compute_maps(input_ids, mask, ("alti", "irnl"))
    for text, (alti, irnl) in zip(texts, found, strict=True):
        layers, length = transform_by_definition(identity, text), len(text)
        for name, product in (("alti", alti), ("irnl", irnl)):
            expected = multiply_by_definition(name, layers)
            np.testing.assert_allclose(product[:length, :length], expected, rtol=0, atol=2e-5, err_msg=name)
            assert not product[length:].any()
            assert not product[:, length:].any()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_rows_sum_to_one_and_causal_maps_are_exactly_lower_triangular(load_tiny, family):
    _, loaded = load_tiny(family)
    input_ids, mask, _ = make_batch(loaded.model.config.pad_token_id)
    found = loaded.compute_maps(input_ids, mask, ("alti", "irnl"))
    np.testing.assert_allclose(found.sum(-1), mask[:, None].expand(-1, 2, -1), rtol=0, atol=1e-5)
    assert bool(found.triu(1).any()) == (family in BERT_LIKE)
    assert (found >= 0).all()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_parts_sum_to_each_blocks_real_output(load_tiny, family):
    _, loaded = load_tiny(family)
    input_ids, mask, _ = make_batch(loaded.model.config.pad_token_id)
    rows = []

    def compare(row, block):
        rows.append(row)
        torch.testing.assert_close(reconstruct_output(block), block.output, rtol=1e-4, atol=1e-5)

    with (
        torch.inference_mode(),
        reading_blocks(loaded.model, list(LENGTHS), compare) as read_call,
        reading_attention(loaded.model, lambda mean: None, read_call),
    ):
        run_model(loaded.model, input_ids, mask)
    assert rows == [0, 1, 2] * loaded.num_layers


def test_a_row_that_no_vector_comes_near_to_is_its_own():
    block = Decomposition(
        query=torch.zeros(1, 2, 4),
        key=torch.zeros(1, 2, 4),
        value=torch.zeros(1, 2, 3),
        mask=None,
        scaling=1.0,
        softcap=None,
        projection=torch.zeros(1, 3, 5),
        inverse_scale=torch.ones(2),
        residual=torch.stack([torch.ones(5), -torch.ones(5)]),
        bias=torch.stack([torch.zeros(5), 2 * torch.ones(5)]),
        output=torch.ones(2, 5),
    )
    assert torch.equal(compute_alti(block), torch.eye(2))
    torch.testing.assert_close(reconstruct_output(block), block.output)


def test_baselines_beside_orders_change_none_of_them(load_tiny):
    _, loaded = load_tiny("llama")
    input_ids, mask, _ = make_batch(0)
    alone = loaded.compute_maps(input_ids, mask, (1, 2, "rollout"))
    beside = loaded.compute_maps(input_ids, mask, (1, 2, "alti", "irnl", "rollout"))
    assert torch.equal(alone, beside[:, [0, 1, 4]])


def test_hooks_are_gone_afterwards_also_after_an_exception(load_tiny):
    _, loaded = load_tiny("bert")
    input_ids, mask, _ = make_batch(0)

    def count():
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in loaded.model.modules())

    before = count()
    loaded.compute_maps(input_ids, mask, ("irnl",))
    assert count() == before

    def fail(row, block):
        raise RuntimeError("in the middle")

    with (
        pytest.raises(RuntimeError, match="in the middle"),
        reading_blocks(loaded.model, list(LENGTHS), fail) as read_call,
        reading_attention(loaded.model, lambda mean: None, read_call),
    ):
        run_model(loaded.model, input_ids, mask)
    assert count() == before


@pytest.mark.parametrize("architecture", ["gpt2", "bloom", "modernbert", "granite"])
def test_a_model_that_cannot_be_taken_apart_is_refused_for_baselines_only(
    build_model, tmp_path, monkeypatch, architecture
):
    monkeypatch.setenv("OLA_CACHE", str(tmp_path / "cache"))
    changes = GROUPED | {"residual_multiplier": 0.5} if architecture == "granite" else {}
    identity = identify_model(str(build_model(tmp_path / "tiny", architecture, initializer_range=0.2, **changes)))
    assert load_model(identity, maps=(1, "rollout"), device="cpu").num_layers == 3
    with pytest.raises(UnsupportedModelError, match=rf"tiny \({architecture}\).*irnl and alti"):
        load_model(identity, maps=(1, "irnl"), device="cpu")


@pytest.mark.parametrize("name", ["minilm-l6", "smollm2-135m"])
def test_real_blocks_are_the_sum_of_their_parts(name):
    loaded = load_model(identify_model(name), maps=tuple(CONTRIBUTIONS), device="cpu")
    input_ids = torch.arange(1000, 1024).reshape(2, 12)
    found = loaded.compute_maps(input_ids, torch.ones_like(input_ids), ("alti", "irnl"))
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 2, 12), rtol=0, atol=1e-5)
