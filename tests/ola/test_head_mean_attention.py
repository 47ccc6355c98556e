"""Head-mean attention equals plain attention in float64, and leaves every model as it was."""

import copy
import threading

import pytest
import torch
from transformers import AutoConfig, AutoModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pipeline.ola import attention
from pipeline.ola.attention import (
    IMPLEMENTATION,
    build_mask,
    compute_head_mean_attention,
    hide_keys,
    reading_attention,
    run_model,
)
from pipeline.ola.check import check_model
from pipeline.ola.eager import reading_eager_attention
from pipeline.ola.extract import Access, compute_maps

LOWEST = torch.finfo(torch.float32).min


def draw_heads(*, shared=1, groups=2, head_size=8, value_size=None, dtype=torch.float32, queries=5, keys=5):
    generator = torch.Generator().manual_seed(shared + groups)
    query = torch.randn(2, groups * shared, queries, head_size, generator=generator)
    key = torch.randn(2, groups, keys, head_size, generator=generator)
    value = torch.randn(2, groups, keys, value_size or head_size, generator=generator)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def compute_reference(query, key, value, mask, scaling, softcap=None):
    """The same in float64, one query head at a time."""
    shared = query.shape[1] // key.shape[1]
    outputs, probabilities = [], []
    for head in range(query.shape[1]):
        scores = query[:, head].double() @ key[:, head // shared].double().mT * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            scores = scores + mask[:, 0].double()
        probabilities.append(torch.softmax(scores, dim=-1))
        outputs.append(probabilities[-1] @ value[:, head // shared].double())
    return torch.stack(outputs, dim=2), torch.stack(probabilities).mean(0)


def causal_mask(size=5, padded_from=3):
    mask = torch.triu(torch.full((size, size), LOWEST), 1).repeat(2, 1, 1, 1)
    mask[1, :, :, padded_from:] = LOWEST
    return mask


@pytest.mark.parametrize("query_block", [1, 2, 64])
@pytest.mark.parametrize("score_cells", [1, 60, 4 * 1024 * 1024])
@pytest.mark.parametrize("mask", [None, causal_mask()], ids=["unmasked", "causal"])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(("shared", "groups"), [(1, 3), (2, 3), (4, 2), (4, 1)])
def test_output_and_mean_equal_float64_however_heads_are_grouped(
    monkeypatch, query_block, score_cells, mask, softcap, shared, groups
):
    monkeypatch.setitem(attention.SCORE_CELLS, "cpu", score_cells)
    monkeypatch.setitem(attention.QUERY_BLOCK, "cpu", query_block)
    heads = draw_heads(shared=shared, groups=groups)
    output, mean = compute_head_mean_attention(*heads, mask, 0.35, softcap)
    expected_output, expected_mean = compute_reference(*heads, mask, 0.35, softcap)
    torch.testing.assert_close(output.double(), expected_output, rtol=0, atol=2e-6)
    torch.testing.assert_close(mean.double(), expected_mean, rtol=0, atol=1e-6)


def test_the_mask_leaves_exact_zeros_and_rows_that_sum_to_one():
    _, mean = compute_head_mean_attention(*draw_heads(shared=2), causal_mask(), 0.35)
    assert not mean.triu(1).any()
    assert not mean[1, :, 3:].any()
    torch.testing.assert_close(mean.sum(-1), torch.ones(2, 5), rtol=0, atol=1e-6)


def test_value_heads_may_have_a_size_of_their_own():
    heads = draw_heads(shared=2, value_size=3)
    output, mean = compute_head_mean_attention(*heads, None, 0.35)
    expected_output, expected_mean = compute_reference(*heads, None, 0.35)
    assert output.shape == (2, 5, 4, 3)
    torch.testing.assert_close(output.double(), expected_output, rtol=0, atol=2e-6)
    torch.testing.assert_close(mean.double(), expected_mean, rtol=0, atol=1e-6)


def test_more_keys_than_queries_are_read_as_they_are():
    heads = draw_heads(queries=2, keys=5)
    mask = causal_mask()[:, :, 3:]
    _, mean = compute_head_mean_attention(*heads, mask, 0.35)
    torch.testing.assert_close(mean.double(), compute_reference(*heads, mask, 0.35)[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_half_precision_inputs_keep_a_float32_mean_and_their_own_output_dtype(dtype, error):
    heads = draw_heads(shared=2, dtype=dtype)
    output, mean = compute_head_mean_attention(*heads, causal_mask().to(dtype), 0.35, 20.0)
    expected_output, expected_mean = compute_reference(*heads, causal_mask(), 0.35, 20.0)
    assert (output.dtype, mean.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(mean.double(), expected_mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(output.double(), expected_output, rtol=0, atol=error)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [5, 70])
def test_no_score_wins_over_the_mask(dtype, size):
    """float16's least number is -65504, and scores of float32 go beyond it."""
    query, key, value = draw_heads(shared=2, dtype=dtype, queries=size, keys=size)
    hidden = torch.triu(torch.ones(size, size, dtype=torch.bool), 1).repeat(2, 1, 1, 1)
    hidden[1, :, :, 3:] = True
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
    hiding = hide_keys(mask, 2, size, size)
    _, mean = compute_head_mean_attention(query * 300, key * 300, value, hiding, 1.0)
    assert not mean[hidden[:, 0]].any()
    assert not mask.isinf().any(), "the model's own mask is changed"
    torch.testing.assert_close(mean.sum(-1), torch.ones(2, size), rtol=0, atol=1e-5)


def test_a_query_that_sees_nothing_stays_finite():
    mask = causal_mask()
    mask[1, :, 3:] = LOWEST
    output, mean = compute_head_mean_attention(*draw_heads(), hide_keys(mask, 2, 5, 5), 0.35)
    assert output.isfinite().all()
    assert mean.isfinite().all()
    assert not mean[1, :3, 3:].any()


def test_a_mask_of_one_row_or_one_text_holds_for_all_queries_and_texts():
    mask = torch.zeros(1, 1, 1, 70)
    mask[..., 30:] = LOWEST
    hiding = hide_keys(mask, 2, 70, 70)
    assert hiding.shape == (2, 1, 70, 70)
    _, mean = compute_head_mean_attention(*draw_heads(queries=70, keys=70), hiding, 0.35)
    assert not mean[..., 30:].any()
    torch.testing.assert_close(mean.sum(-1), torch.ones(2, 70), rtol=0, atol=1e-5)


@pytest.mark.parametrize("score_cells", [1, 4 * 1024 * 1024])
def test_heads_may_have_masks_of_their_own(monkeypatch, score_cells):
    monkeypatch.setitem(attention.SCORE_CELLS, "cpu", score_cells)
    query, key, value = draw_heads(shared=2, queries=70, keys=70)
    mask = torch.randn(2, 4, 70, 70, generator=torch.Generator().manual_seed(1))
    mask[:, 0, :, 9:] = LOWEST
    mask[:, 1:, :, 40:] = LOWEST
    output, mean = compute_head_mean_attention(query, key, value, hide_keys(mask, 2, 70, 70), 0.35)
    scores = query.double() @ key.double().repeat_interleave(2, dim=1).mT * 0.35 + mask.double()
    probabilities = scores.softmax(-1)
    torch.testing.assert_close(mean.double(), probabilities.mean(1), rtol=0, atol=1e-6)
    mixed = probabilities @ value.double().repeat_interleave(2, dim=1)
    torch.testing.assert_close(output.double(), mixed.transpose(1, 2), rtol=0, atol=2e-6)


def test_scores_beyond_float16_do_not_overflow():
    query, key, value = draw_heads(dtype=torch.float16)
    _, mean = compute_head_mean_attention(query * 100, key * 100, value, None, 1.0)
    expected = compute_reference(query * 100, key * 100, value, None, 1.0)[1]
    torch.testing.assert_close(mean.double(), expected, rtol=0, atol=1e-4)


def test_the_name_switches_on_no_other_backend_and_has_a_float_mask():
    assert not any(other in IMPLEMENTATION for other in ("sdpa", "flash_attention", "flex_attention"))
    assert IMPLEMENTATION in ALL_ATTENTION_FUNCTIONS.valid_keys()
    assert ALL_MASK_ATTENTION_FUNCTIONS[IMPLEMENTATION] is build_mask


def make_model(architecture="llama", implementation="sdpa"):
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        architecture,
        hidden_size=32,
        num_attention_heads=4,
        num_hidden_layers=3,
        intermediate_size=48,
        vocab_size=300,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    return AutoModel.from_config(config, attn_implementation=implementation).eval()


INPUT_IDS = torch.arange(10, 34).reshape(2, 12)
MASK = torch.ones_like(INPUT_IDS)
MASK[1, 7:] = 0


@torch.inference_mode()
def run(model):
    return model(input_ids=INPUT_IDS, attention_mask=MASK).last_hidden_state


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama", "gemma3_text"])
def test_a_model_gives_bitwise_its_outputs_after_it_was_read(architecture, implementation):
    model = make_model(architecture, implementation)
    before, config = run(model), copy.deepcopy(model.config)
    compute_maps(model, Access(3, "full"), INPUT_IDS, MASK, (1, 2))
    assert model.config._attn_implementation == implementation
    assert model.config.to_dict() == config.to_dict()
    assert torch.equal(run(model), before)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("architecture", ["bloom", "mpnet", "deberta-v2", "falcon"])
def test_an_eager_model_gives_bitwise_its_outputs_after_it_was_read(architecture, fails):
    model = make_model(architecture, "eager")
    before, hooks = run(model), count_hooks(model)
    access = check_model(model, "tiny", 1e-5)
    if fails:
        with pytest.raises(RuntimeError, match="in the middle"), reading_eager_attention(model, access.sites, fail):
            run_model(model, INPUT_IDS, MASK, output_attentions=True)
    else:
        compute_maps(model, access, INPUT_IDS, MASK, (1, 2))
    assert count_hooks(model) == hooks == 0
    assert torch.equal(run(model), before)
    assert torch.equal(run(make_model(architecture, "eager")), before)


def fail(mean):
    raise RuntimeError("in the middle")


def count_hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_a_fresh_model_of_a_class_that_was_read_is_bitwise_unchanged(architecture):
    before = run(make_model(architecture))
    compute_maps(make_model(architecture), Access(3, "full"), INPUT_IDS, MASK, (1,))
    fresh = make_model(architecture)
    assert fresh.config._attn_implementation == "sdpa"
    assert torch.equal(run(fresh), before)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_comes_back_after_an_exception_in_the_middle_of_a_pass(implementation):
    model = make_model(implementation=implementation)
    before, means = run(model), []

    def fail_at_the_second_layer(mean):
        means.append(mean)
        if len(means) == 2:
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"), reading_attention(model, fail_at_the_second_layer):
        run_model(model, INPUT_IDS, MASK)
    assert model.config._attn_implementation == implementation
    assert torch.equal(run(model), before)
    assert torch.equal(run(make_model(implementation=implementation)), before)
    run(model)
    assert len(means) == 2


def test_models_of_one_class_made_inside_keep_their_own_attention():
    model, means = make_model(), []
    before = run(model)
    with reading_attention(model, means.append):
        assert torch.equal(run(make_model()), before)
        assert not means
        run(model)
        assert len(means) == 3


def test_nested_readers_each_get_their_own_models_layers():
    outer, inner = make_model(), make_model("bert")
    outer_means, inner_means = [], []
    with reading_attention(outer, outer_means.append):
        run(outer)
        with reading_attention(inner, inner_means.append):
            run(inner)
        assert (len(outer_means), len(inner_means)) == (3, 3)
        run(outer)
    assert (len(outer_means), len(inner_means)) == (6, 3)
    assert outer_means[0].triu(1).any() == torch.tensor(False)
    assert inner_means[0].triu(1).any()


@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_reading_leaves_the_models_own_output_unchanged(architecture):
    model = make_model(architecture, "eager")
    before = run(model)
    with reading_attention(model, lambda mean: None):
        torch.testing.assert_close(run(model), before, rtol=0, atol=1e-5)


def test_threads_read_their_own_models_only():
    found = {}

    def read(name):
        means = []
        model = make_model()
        barrier.wait(timeout=60)
        with reading_attention(model, means.append):
            for _ in range(5):
                run(model)
        found[name] = len(means)

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=read, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"one": 15, "two": 15}
