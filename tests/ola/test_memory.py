"""Memory: bounded by the maps, not by heads or layers; flat from batch to batch; halved batches where it runs out."""

import gc
import subprocess
import sys
import textwrap

import psutil
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModel

from pipeline.ola import eager
from pipeline.ola.attention import SCORE_CELLS, run_model
from pipeline.ola.check import check_model
from pipeline.ola.extract import compute_maps
from tests.conftest import PROJECT

BATCH, TOKENS, HEADS = 4, 512, 16
ONE_MAP = BATCH * TOKENS * TOKENS * 4
GIB = 1024**3


def make_model(architecture, num_layers=3, implementation="eager"):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        architecture,
        **{"hidden_size": 64, "num_attention_heads": HEADS, "num_hidden_layers": num_layers, "intermediate_size": 64},
        **{"vocab_size": 300, "max_position_embeddings": TOKENS, "pad_token_id": 0},
    )
    return AutoModel.from_config(config, attn_implementation=implementation).eval()


def make_batch(rows=BATCH, tokens=TOKENS):
    input_ids = torch.randint(3, 300, (rows, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(input_ids)
    mask[-1, tokens // 2 :] = 0
    return input_ids, mask


def measure_peak(action):
    """The most bytes that an action held at once beyond what was there before, by the allocator's own count."""
    action()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("maps", [(1,), (1, 2, 3), (1, 2, 3, "rollout")], ids=str)
@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_peak_above_the_plain_pass_is_a_few_maps_however_many_heads(architecture, maps):
    model, plain = make_model(architecture), make_model(architecture, implementation="sdpa")
    access = check_model(model, "tiny", 1e-5)
    batch = make_batch()
    with torch.inference_mode():
        above = measure_peak(lambda: compute_maps(model, access, *batch, maps)) - measure_peak(
            lambda: run_model(plain, *batch)
        )
    # The bound of compute_maps' docstring, and a little for what is not a map.
    assert above <= (len(maps) + 3) * ONE_MAP + 2 * 4 * SCORE_CELLS["cpu"] + ONE_MAP / 4
    assert above < HEADS * ONE_MAP


@pytest.mark.parametrize("architecture", ["bert", "bloom", "mpnet", "falcon", "deberta-v2"])
def test_more_layers_hold_no_more(architecture):
    peaks = []
    for num_layers in (2, 8):
        model = make_model(architecture, num_layers)
        access = check_model(model, "tiny", 1e-5)
        batch = make_batch(2, 128)
        peaks.append(
            measure_peak(lambda model=model, access=access, batch=batch: compute_maps(model, access, *batch, (1, 2)))
        )
    one_layer = 2 * HEADS * 128 * 128 * 4
    assert peaks[1] - peaks[0] < one_layer / 2


def test_an_eager_model_takes_as_few_texts_at_once_as_its_bound_says(monkeypatch):
    model = make_model("bloom")
    access, batch = check_model(model, "tiny", 1e-5), make_batch(4, 32)
    whole = compute_maps(model, access, *batch, (1, 2))
    rows = []
    model.register_forward_pre_hook(lambda _, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True)
    monkeypatch.setattr("pipeline.ola.extract.MAX_CELLS", 2 * HEADS * 32 * 32)
    parts = compute_maps(model, access, *batch, (1, 2))
    assert rows == [2, 2]
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-6)
    assert eager.MAX_CELLS > 2 * HEADS * 32 * 32


@pytest.mark.parametrize(
    ("architecture", "maps", "num_batches"),
    [
        ("llama", (1, 2, "rollout"), 500),
        ("bloom", (1, 2), 500),
        ("bert", (1, "irnl", "alti"), 100),  # with shapes checked at every call, it takes minutes
        pytest.param("bert", (1, "irnl", "alti"), 500, marks=pytest.mark.slow),
    ],
)
def test_memory_is_flat_over_many_batches(architecture, maps, num_batches):
    model = make_model(architecture)
    access = check_model(model, "tiny", 1e-5)

    def run(num_batches):
        for number in range(num_batches):
            compute_maps(model, access, *make_batch(1 + number % 3, 8 + number % 5), maps)
        gc.collect()
        tensors = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
        return tensors, psutil.Process().memory_info().rss

    tensors, resident = run(num_batches // 5)
    after_tensors, after_resident = run(num_batches)
    assert after_tensors == tensors
    assert after_resident <= resident + 32 * 1024**2


def run_with_little_memory(body):
    """Runs code in a process of its own; in it `limit(bytes)` caps what can be allocated from then on."""
    code = """
        import resource, psutil, numpy as np, torch
        from pipeline.extraction import BatchRunner
        from pipeline.ola.check import check_model
        from pipeline.ola.load import LoadedModel
        from storage_schema.errors import TextTooLargeError
        from tests.ola.test_memory import make_batch, make_model

        def limit(num_bytes):
            used = psutil.Process().memory_info().vms
            resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, resource.RLIM_INFINITY))

        model = make_model("bert")
        loaded = LoadedModel("tiny", model, check_model(model, "tiny", 1e-5))
        input_ids, mask = (part.numpy() for part in make_batch(64))
        heard = []
        runner = BatchRunner(loaded, 10**6, lambda *rows: heard.append(rows))
        list(runner.iter_maps(input_ids[:1], mask[:1], (1, 2), torch.float32))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code) + textwrap.dedent(body)],
        check=False,
        capture_output=True,
        text=True,
        cwd=PROJECT,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_a_batch_that_does_not_fit_is_halved_and_said_once():
    out = run_with_little_memory("""
        limit(200 * 1024**2)
        tops = {}
        for first, part in runner.iter_maps(input_ids, mask, (1, 2), torch.float16):
            tops |= {first + row: maps[:, :4, :4].copy() for row, maps in enumerate(part)}
        assert runner.num_halvings >= 1
        before = runner.num_halvings
        for _ in runner.iter_maps(input_ids, mask, (1, 2), torch.float16):
            pass
        assert runner.num_halvings == before
        assert heard == [(32, 64)], heard
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        ((_, whole),) = BatchRunner(loaded, 10**6).iter_maps(input_ids, mask, (1, 2), torch.float16)
        assert sorted(tops) == list(range(64))
        assert max(np.abs(whole[row, :, :4, :4] - top).max() for row, top in tops.items()) <= 2**-11
        print("done")
    """)
    assert out == "done"


def test_a_text_that_does_not_fit_alone_is_refused_with_a_remedy():
    out = run_with_little_memory("""
        limit(2 * 1024**2)
        try:
            list(runner.iter_maps(input_ids[:4], mask[:4], (1, 2), torch.float32))
        except TextTooLargeError as error:
            print(error)
    """)
    assert "a text of 512 tokens does not fit into memory, even alone; lower --max-length" in out
