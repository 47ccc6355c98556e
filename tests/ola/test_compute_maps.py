"""Maps of tiny models of many architectures equal those from their own eager attentions, one text at a time."""

from itertools import combinations

import numpy as np
import pytest
import torch
from transformers import AutoModel

from pipeline.ola.attention import reading_attention, run_model
from pipeline.ola.extract import Access, compute_maps
from pipeline.ola.identity import identify_model
from pipeline.ola.load import load_model
from pipeline.ola.registry import EAGER_ARCHITECTURES, FUSED_ARCHITECTURES
from storage_schema.errors import NonFiniteMapError, UnsupportedModelError

TOLERANCE = 1e-5
WINDOW = 4
GROUPED = {"num_key_value_heads": 2}
FUSED_FULL = {
    "bert": {},
    "roberta": {"pad_token_id": 1},
    "xlm-roberta": {"pad_token_id": 1},
    "electra": {"embedding_size": 16},
    "distilbert": {},
    "albert": {"embedding_size": 16},
    "modernbert": {"local_attention": 8, "num_hidden_layers": 4},
}
FUSED_LOWER = {
    "gpt2": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_neox": {},
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": {"head_dim": 16, **GROUPED},
    "mistral": {"sliding_window": WINDOW, **GROUPED},
    "gemma": {"head_dim": 8, "num_key_value_heads": 1},
    "gemma2": {"sliding_window": WINDOW, "head_dim": 8, "attn_logit_softcapping": 1.0, **GROUPED},
    "gemma3_text": {"sliding_window": WINDOW, "head_dim": 8, "num_hidden_layers": 7, "num_key_value_heads": 1},
    "phi3": GROUPED,
    "olmo2": GROUPED,
    "granite": GROUPED | {"residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "smollm3": GROUPED,
}
EAGER_FULL = {
    "mpnet": {"pad_token_id": 1},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 16},
}
EAGER_LOWER = {
    "bloom": {},
    "falcon": {"multi_query": True},
    "falcon-alibi": {"alibi": True, "new_decoder_architecture": False, "multi_query": False},
}
EAGER = EAGER_FULL | EAGER_LOWER
LOWER = FUSED_LOWER | EAGER_LOWER
ARCHITECTURES = FUSED_FULL | FUSED_LOWER | EAGER
LENGTHS = (40, 1, 7, 23, 2, 12, 40, 5)
"""A text of one token beside one of 40."""


@pytest.fixture(scope="module")
def load_tiny(build_model, tmp_path_factory):
    """A function from an architecture to its tiny model, loaded and checked, built once."""
    loaded = {}

    def load(architecture):
        if architecture not in loaded:
            folder = tmp_path_factory.mktemp("models") / architecture.replace("_", "-")
            name = architecture.removesuffix("-alibi")
            build_model(folder, name, initializer_range=0.2, **ARCHITECTURES[architecture])
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("OLA_CACHE", str(tmp_path_factory.mktemp("cache")))
                identity = identify_model(str(folder))
            loaded[architecture] = (identity, load_model(identity, device="cpu"))
        return loaded[architecture]

    return load


@pytest.fixture(params=sorted(ARCHITECTURES))
def architecture(request):
    return request.param


def draw_texts(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 300, (length,), generator=generator) for length in lengths]


def pad(texts, pad_token_id):
    input_ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=pad_token_id)
    lengths = torch.tensor([len(text) for text in texts])
    return input_ids, (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()


@torch.inference_mode()
def read_eager(model, text):
    """Each layer's head-mean attention [N, T, T] in float64, as the model itself gives it."""
    attentions = model(input_ids=text[None], output_attentions=True).attentions
    return torch.stack([attention[0].double().mean(0) for attention in attentions])


def enumerate_maps(layers, maps):
    found = []
    for name in maps:
        if name == "rollout":
            seen = torch.eye(layers.shape[-1], dtype=torch.float64)
            for layer in layers:
                seen = (layer @ seen + seen) / 2
        else:
            products = [
                torch.linalg.multi_dot([layers[layer] for layer in reversed(choice)]) if name > 1 else layers[choice[0]]
                for choice in combinations(range(len(layers)), name)
            ]
            seen = torch.stack(products).mean(0)
        found.append(seen)
    return torch.stack(found)


def test_a_padded_batch_equals_eager_attentions_one_text_at_a_time(load_tiny, architecture):
    identity, loaded = load_tiny(architecture)
    eager = AutoModel.from_pretrained(identity.path, attn_implementation="eager").eval()
    maps, texts = (2, "rollout", 1, 3), draw_texts()
    batch = loaded.compute_maps(*pad(texts, loaded.model.config.pad_token_id), maps)
    assert batch.shape == (len(texts), 4, 40, 40)
    assert batch.dtype == torch.float32
    for text, found in zip(texts, batch, strict=True):
        expected, length = enumerate_maps(read_eager(eager, text), maps), len(text)
        np.testing.assert_allclose(found[:, :length, :length], expected, rtol=0, atol=TOLERANCE)


def test_padding_is_exactly_zero_and_rows_of_texts_sum_to_one(load_tiny, architecture):
    _, loaded = load_tiny(architecture)
    input_ids, mask = pad(draw_texts(), loaded.model.config.pad_token_id)
    found = loaded.compute_maps(input_ids, mask, (1, 2, "rollout"))
    real = mask.bool()
    inside = (real[:, None, :, None] & real[:, None, None, :]).expand_as(found)
    assert not found[~inside].any()
    assert found.isfinite().all()
    np.testing.assert_allclose(found.sum(-1), real[:, None].expand(-1, 3, -1), rtol=0, atol=TOLERANCE)


def test_a_batch_of_one_equals_a_batch_of_eight(load_tiny, architecture):
    _, loaded = load_tiny(architecture)
    texts, pad_token_id = draw_texts(), loaded.model.config.pad_token_id
    batch = loaded.compute_maps(*pad(texts, pad_token_id), (1, 2))
    for text, found in zip(texts, batch, strict=True):
        alone = loaded.compute_maps(*pad([text], pad_token_id), (1, 2))[0]
        np.testing.assert_allclose(found[:, : len(text), : len(text)], alone, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama", "gemma3_text"])
def test_what_stands_on_padding_decides_nothing(load_tiny, architecture):
    _, loaded = load_tiny(architecture)
    input_ids, mask = pad(draw_texts(), 0)
    others = input_ids.masked_fill(mask == 0, 7)
    one, other = (loaded.compute_maps(ids, mask, (1, 2)) for ids in (input_ids, others))
    np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE)


def test_the_registrys_lists_are_the_architectures_tested_here():
    assert set(FUSED_ARCHITECTURES) == set(FUSED_FULL | FUSED_LOWER)
    assert set(EAGER_ARCHITECTURES) == {name.removesuffix("-alibi") for name in EAGER}


def test_layers_and_packing_are_found(load_tiny, architecture):
    identity, loaded = load_tiny(architecture)
    assert loaded.num_layers == identity.num_layers == ARCHITECTURES[architecture].get("num_hidden_layers", 3)
    assert loaded.packing == ("lower" if architecture in LOWER else "full")
    assert loaded.access.path == ("eager" if architecture in EAGER else "fused")


@pytest.mark.parametrize("architecture", sorted(LOWER))
def test_causal_maps_are_exactly_lower_triangular(load_tiny, architecture):
    _, loaded = load_tiny(architecture)
    found = loaded.compute_maps(*pad(draw_texts(), loaded.model.config.pad_token_id), (1, 2, "rollout"))
    assert not found.triu(1).any()


@pytest.mark.parametrize(
    ("architecture", "windowed"),
    [("mistral", (0, 1, 2)), ("gemma2", (0, 2)), ("gemma3_text", (0, 1, 2, 3, 4, 6))],
)
def test_windowed_layers_are_exactly_zero_beyond_the_window(load_tiny, architecture, windowed):
    _, loaded = load_tiny(architecture)
    layers = []
    input_ids, mask = pad(draw_texts((40,)), 0)
    with torch.inference_mode(), reading_attention(loaded.model, layers.append):
        run_model(loaded.model, input_ids, mask)
    for number, layer in enumerate(layers):
        beyond = layer[0].tril(-WINDOW)
        assert bool(beyond.any()) == (number not in windowed)
        assert layer[0].diagonal(1 - WINDOW).all()


def test_order_one_of_a_windowed_model_is_exactly_zero_beyond_the_window(load_tiny):
    _, loaded = load_tiny("mistral")
    first, second = loaded.compute_maps(*pad(draw_texts(), 0), (1, 2))[0]
    assert not first.tril(-WINDOW).any()
    assert second.tril(-WINDOW).any()
    assert not second.tril(-2 * WINDOW + 1).any()


@pytest.mark.parametrize(("compute_dtype", "error"), [("bfloat16", 2e-2), ("float16", 3e-3)])
@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_half_precision_weights_give_float32_maps_near_the_exact_ones(load_tiny, architecture, compute_dtype, error):
    identity, loaded = load_tiny(architecture)
    half = load_model(identity, compute_dtype=compute_dtype, device="cpu")
    assert half.model.dtype == getattr(torch, compute_dtype)
    batch = pad(draw_texts(), 0)
    found, exact = half.compute_maps(*batch, (1, 2)), loaded.compute_maps(*batch, (1, 2))
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found, exact, rtol=0, atol=error)
    np.testing.assert_allclose(found.sum(-1), exact.sum(-1), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_attention_that_is_not_finite_names_sample_and_layer(build_model, tmp_path, monkeypatch, poison):
    monkeypatch.setenv("OLA_CACHE", str(tmp_path / "cache"))
    loaded = load_model(identify_model(str(build_model(tmp_path / "tiny", "bert"))), device="cpu")
    with torch.no_grad():
        loaded.model.encoder.layer[1].attention.self.query.weight[0, 0] = poison
    with pytest.raises(NonFiniteMapError, match="attention of layer 1 holds NaN or infinity") as raised:
        loaded.compute_maps(*pad(draw_texts(), 0), (1, 2))
    assert (raised.value.row, raised.value.layer) == (0, 1)


def test_the_one_sample_that_is_not_finite_is_named(build_model, tmp_path, monkeypatch):
    monkeypatch.setenv("OLA_CACHE", str(tmp_path / "cache"))
    loaded = load_model(identify_model(str(build_model(tmp_path / "tiny", "bert"))), device="cpu")
    texts = draw_texts((9, 6, 4))
    texts[0][:], texts[1][2], texts[2][:] = 20, 299, 20
    with torch.no_grad():
        loaded.model.embeddings.word_embeddings.weight[299] = float("nan")
    with pytest.raises(NonFiniteMapError) as raised:
        loaded.compute_maps(*pad(texts, 0), (1,))
    assert (raised.value.row, raised.value.layer) == (1, 0)


def test_another_number_of_attention_calls_is_refused(load_tiny):
    _, loaded = load_tiny("bert")
    with pytest.raises(UnsupportedModelError, match="BertModel made 3 attention calls in a pass, expected 4"):
        compute_maps(loaded.model, Access(4, "full"), *pad(draw_texts(), 0), (1,))
