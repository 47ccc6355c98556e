"""The Triton kernels equal the torch path: on a GPU where there is one, else in Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModel

pytest.importorskip("triton", reason="Triton is not installed")

from pipeline.ola import attention, kernels
from pipeline.ola.extract import Access, compute_maps
from tests.conftest import PROJECT

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOWEST = torch.finfo(torch.float32).min
SIZE, PADDED_FROM = 21, 13


def draw_heads(shared=1, groups=2, size=8, value_size=None, queries=SIZE, keys=SIZE, dtype=torch.float32):
    generator = torch.Generator().manual_seed(shared + groups)
    query = torch.randn(2, queries, groups * shared, size, generator=generator).transpose(1, 2)
    key = torch.randn(2, keys, groups, size, generator=generator).transpose(1, 2)
    value = torch.randn(2, keys, groups, value_size or size, generator=generator).transpose(1, 2)
    return tuple(heads.to(DEVICE, dtype) for heads in (query, key, value))


def make_mask(kind, size=SIZE):
    if kind == "none":
        return None
    hidden = torch.zeros(2, 1, size, size, dtype=torch.bool)
    if kind in ("causal", "window"):
        hidden |= torch.ones(size, size, dtype=torch.bool).triu(1)
    if kind == "window":
        hidden |= torch.ones(size, size, dtype=torch.bool).tril(-5)
    if kind == "two-sided window":
        hidden |= torch.ones(size, size, dtype=torch.bool).tril(-5) | torch.ones(size, size, dtype=torch.bool).triu(5)
    hidden[1, :, :, PADDED_FROM:] = True
    return torch.zeros(hidden.shape).masked_fill(hidden, LOWEST).to(DEVICE)


def compare(heads, mask, softcap, output_error, mean_error, block=16):
    output, mean = kernels.compute_head_mean_attention(*heads, mask, 0.35, softcap, block=block)
    exact = tuple(part.float() for part in heads)
    expected_output, expected_mean = attention.compute_head_mean_attention(
        *exact, None if mask is None else mask.float(), 0.35, softcap
    )
    for row, length in ((0, mean.shape[1]), (1, mean.shape[1] if mask is None else PADDED_FROM)):
        torch.testing.assert_close(
            output[row, :length].float(), expected_output[row, :length], rtol=0, atol=output_error
        )
        torch.testing.assert_close(mean[row, :length], expected_mean[row, :length], rtol=0, atol=mean_error)
    assert mean.dtype == torch.float32
    assert output.dtype == heads[2].dtype
    return mean


@pytest.mark.parametrize("kind", ["none", "padding", "causal", "window", "two-sided window"])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(("shared", "groups"), [(1, 3), (4, 2)])
def test_every_mask_grouping_and_cap_equals_the_torch_path(kind, softcap, shared, groups):
    mask = make_mask(kind)
    mean = compare(draw_heads(shared, groups), mask, softcap, 3e-6, 2e-6)
    if mask is not None:
        hidden = mask[:, 0] < 0
        hidden[1, PADDED_FROM:] = False
        assert not mean[hidden].any()


@pytest.mark.parametrize(("size", "value_size"), [(5, 5), (16, 3), (40, 40), (8, 20)])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_heads_of_any_size(size, value_size, softcap):
    compare(draw_heads(2, 2, size, value_size), make_mask("causal"), softcap, 3e-6, 2e-6)


@pytest.mark.parametrize("length", [1, 16, 17, 65])
@pytest.mark.parametrize("block", [16, None])
def test_lengths_around_the_tiles(length, block):
    mask = torch.triu(torch.full((length, length), LOWEST, device=DEVICE), 1).repeat(2, 1, 1, 1)
    heads = draw_heads(2, 1, queries=length, keys=length)
    _, mean = kernels.compute_head_mean_attention(*heads, mask, 0.35, block=block)
    expected = attention.compute_head_mean_attention(*heads, mask, 0.35)[1]
    torch.testing.assert_close(mean, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_narrow_dtypes_keep_a_float32_mean(dtype, error, softcap):
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as integers; this needs a GPU")
    heads = draw_heads(2, 2, 16, dtype=dtype)
    mask = make_mask("causal")
    narrow = mask.clamp_min(torch.finfo(dtype).min).to(dtype)
    output, mean = kernels.compute_head_mean_attention(*heads, narrow, 0.35, softcap, block=16)
    exact = tuple(part.float() for part in heads)
    expected_output, expected_mean = attention.compute_head_mean_attention(*exact, mask, 0.35, softcap)
    torch.testing.assert_close(mean[0], expected_mean[0], rtol=0, atol=2e-6)
    torch.testing.assert_close(output[0].float(), expected_output[0], rtol=0, atol=error)


def test_scores_beyond_float16_do_not_overflow():
    query, key, value = draw_heads(1, 2, 16, dtype=torch.float16)
    compare((query * 100, key * 100, value), None, None, 4e-3, 1e-4)


@pytest.mark.parametrize("softcap", [None, 1e5])
def test_no_score_wins_over_the_mask(softcap):
    query, key, value = draw_heads(2, 2, 16, dtype=torch.float16)
    mask = make_mask("window").clamp_min(torch.finfo(torch.float16).min).half()
    hidden = mask[:, 0] < 0
    hiding = attention.hide_keys(mask, 2, SIZE, SIZE)
    output, mean = kernels.compute_head_mean_attention(query * 300, key * 300, value, hiding, 1.0, softcap, block=16)
    hidden[1, PADDED_FROM:] = False
    assert not mean[hidden].any()
    assert output.isfinite().all()
    torch.testing.assert_close(mean[0].sum(-1), torch.ones(SIZE, device=DEVICE), rtol=0, atol=1e-5)


def test_a_text_that_the_mask_hides_altogether_gives_finite_numbers():
    mask = torch.full((2, 1, SIZE, SIZE), LOWEST, device=DEVICE)
    mask[0] = 0
    for softcap in (None, 1.5):
        output, mean = kernels.compute_head_mean_attention(*draw_heads(), mask, 0.35, softcap, block=16)
        assert mean.isfinite().all()
        assert output.isfinite().all()


COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pipeline.ola import kernels

capability, dtype, element_bytes, size = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
pointers = {name: "*" + dtype for name in ("query", "key", "value", "mask", "output")}
pointers |= {"logsumexp": "*fp32", "mean": "*fp32"}
numbers = {"scaling": "fp32", "softcap": "fp32", "hidden_below": "fp32"}
constants = {"SHARED": 3, "BLOCK": kernels.choose_block(size, element_bytes), "BLOCK_D": size, "BLOCK_V": size}
constants |= {"HAS_MASK": True, "HAS_SOFTCAP": True, "WITH_OUTPUT": True}
for kernel in (kernels._sum_rows, kernels._average_heads):
    names = kernel.arg_names
    known = {name: "constexpr" for name in constants} | pointers | numbers
    source = ASTSource(
        kernel,
        {name: known.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items() if name in names},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= 64 * 1024, compiled.metadata.shared
"""


@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dtype", "element_bytes"), [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize("size", [64, *(pytest.param(size, marks=pytest.mark.slow) for size in (32, 128, 256))])
def test_the_compiler_takes_what_the_interpreter_takes(tmp_path, capability, dtype, element_bytes, size):
    # Compiling for a card needs none: it finds what the interpreter lets pass.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability), dtype, str(element_bytes), str(size)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        cwd=PROJECT,
        check=True,
    )


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("bert", {}),
        ("llama", {"num_key_value_heads": 2}),
        ("gemma2", {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 1.0}),
    ],
)
def test_whole_models_give_the_same_maps_by_either_path(monkeypatch, architecture, changes):
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        architecture,
        **{"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 48},
        **{"vocab_size": 300, "max_position_embeddings": 64, "pad_token_id": 0, "initializer_range": 0.2},
        **changes,
    )
    model = AutoModel.from_config(config, attn_implementation="eager").to(DEVICE).eval()
    input_ids = torch.arange(10, 58, device=DEVICE).reshape(2, 24)
    mask = torch.ones_like(input_ids)
    mask[1, 9:] = 0
    found = []
    for uses_kernels in (False, True):
        monkeypatch.setattr(attention, "find_kernels", lambda query, uses=uses_kernels: kernels if uses else None)
        found.append(compute_maps(model, Access(3, "full"), input_ids, mask, (1, 2, 3)))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)
