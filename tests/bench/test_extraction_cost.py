"""What extraction costs: against the plain forward pass, and against the paper's way, in turn in one run.

Every figure is a ratio of medians. `make bench` runs on the CPU, or on a GPU where there is one; RESULTS.md keeps what
was measured.
"""

import itertools
import statistics
import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModel

from pipeline.extraction import BATCH_TOKENS
from pipeline.ola.attention import run_model
from pipeline.ola.check import check_model
from pipeline.ola.extract import compute_maps
from pipeline.ola.identity import identify_model
from pipeline.ola.load import load_model
from pipeline.tokens.batches import plan_batches
from pipeline.tokens.encode import load_tokenizer

pytestmark = [pytest.mark.bench, pytest.mark.timeout(3600)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_TEXTS = 480
MODELS = ["minilm-l6", "smollm2-135m"]


def time_in_turn(*actions, rounds=5) -> list[float]:
    seconds = [[] for _ in actions]
    for round_number in range(rounds + 1):
        for action, measured in zip(actions, seconds, strict=True):
            began = time.perf_counter()
            action()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            if round_number:  # the first one warms up
                measured.append(time.perf_counter() - began)
    return [statistics.median(measured) for measured in seconds]


def measure_peak(action) -> int:
    """The most bytes that an action held at once, beyond what was there before."""
    action()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        action()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    held = peak = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def load_plain(identity, implementation):
    return AutoModel.from_pretrained(identity.path, attn_implementation=implementation).to(DEVICE).eval()


def make_batch(num_tokens, length, vocabulary=20000):
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(100, vocabulary, (max(1, num_tokens // length), length), generator=generator)
    return input_ids.to(DEVICE), torch.ones_like(input_ids, device=DEVICE)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [16, 32, 64, 128, 256, 512, 4096])
def test_a_cost_over_the_plain_forward_pass(name, length):
    identity = identify_model(name)
    if length > (identity.max_positions or length) or (length > 512 and DEVICE == "cpu"):
        pytest.skip(f"{name} has {identity.max_positions} positions; more than 512 tokens are measured on a GPU")
    ours, plain = load_model(identity, device=DEVICE), load_plain(identity, "sdpa")
    batch = make_batch(BATCH_TOKENS[DEVICE], length)
    run_plain = torch.inference_mode()(lambda: run_model(plain, *batch))
    extraction, forward = time_in_turn(lambda: ours.compute_maps(*batch, (1, 2, 3)), run_plain)
    order_1, forward_again = time_in_turn(lambda: ours.compute_maps(*batch, (1,)), run_plain)
    print(
        f"\n(a) {name}, {tuple(batch[0].shape)}: orders 1-3 {extraction / forward:.2f} x the forward pass, "
        f"order 1 {order_1 / forward_again:.2f} x"
    )


@torch.inference_mode()
def enumerate_orders(model, input_ids):
    """The paper's way: all layers' attentions of one text, then the mean over every combination of layers."""
    attentions = model(input_ids=input_ids, output_attentions=True).attentions
    layers = [attention[0].mean(0) for attention in attentions]
    orders = []
    for order in (1, 2, 3):
        total, count = torch.zeros_like(layers[0]), 0
        for chosen in itertools.combinations(layers, order):
            product = chosen[0]
            for later in chosen[1:]:
                product = later @ product
            total, count = total + product, count + 1
        orders.append(total / count)
    return orders


@pytest.mark.parametrize("name", MODELS)
def test_b_speed_over_one_text_at_a_time_with_enumeration(name, corpus_folder):
    identity = identify_model(name)
    ours, eager = load_model(identity, device=DEVICE), load_plain(identity, "eager")
    tokenizer = load_tokenizer(identity.path, name)
    lines = (corpus_folder("ud-ewt") / "en_ewt-ud-dev.conllu").read_text(encoding="utf-8").splitlines()
    texts = [line.removeprefix("# text = ") for line in lines if line.startswith("# text = ")]
    chosen = texts[:: len(texts) // NUM_TEXTS][:NUM_TEXTS]
    encoded = [torch.tensor(tokenizer(text, padding=False)["input_ids"], device=DEVICE) for text in chosen]

    def run_batches():
        for batch in plan_batches([len(ids) for ids in encoded], BATCH_TOKENS[DEVICE]):
            rows = [encoded[position] for position in batch]
            input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            ours.compute_maps(input_ids, mask, (1, 2, 3))

    def run_enumeration():
        for ids in encoded:
            enumerate_orders(eager, ids[None])

    batched, enumerated = time_in_turn(run_batches, run_enumeration, rounds=3)
    tokens = sum(len(ids) for ids in encoded)
    print(
        f"\n(b) {name}, {NUM_TEXTS} sentences of ud-ewt dev ({tokens} tokens): {enumerated / batched:.1f} x as fast as "
        "one text at a time with enumeration"
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [128, 512])
def test_c_peak_memory(name, length):
    identity = identify_model(name)
    ours, plain, eager = (
        load_model(identity, device=DEVICE),
        load_plain(identity, "sdpa"),
        load_plain(identity, "eager"),
    )
    batch = make_batch(BATCH_TOKENS[DEVICE], length)
    run_plain = torch.inference_mode()(lambda: run_model(plain, *batch))
    run_eager = torch.inference_mode()(lambda: run_model(eager, *batch, output_attentions=True).attentions)
    forward = measure_peak(run_plain)
    extraction = measure_peak(lambda: ours.compute_maps(*batch, (1, 2, 3)))
    attentions = measure_peak(run_eager)
    one_map = batch[0].numel() * length * 4
    print(
        f"\n(c) {name}, {tuple(batch[0].shape)}: peak {extraction / forward:.2f} x the forward pass "
        f"({(extraction - forward) / one_map:.1f} maps above it); all eager attentions {attentions / forward:.2f} x"
    )


def load_synthetic(num_layers, implementation):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        **{"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1024},
        **{"num_hidden_layers": num_layers, "vocab_size": 1000, "max_position_embeddings": 4096},
    )
    return AutoModel.from_config(config, attn_implementation=implementation).to(DEVICE).eval()


@pytest.mark.parametrize(
    ("num_layers", "length", "highest"),
    [
        *((num_layers, 256, 3) for num_layers in (6, 12, 24, 42)),
        *((6, length, 3) for length in (512, 1024, 2048, 4096)),
        *((12, 512, highest) for highest in (1, 2, 3, 4)),
        (42, 4096, 3),
    ],
)
def test_d_growth_with_layers_length_and_order(num_layers, length, highest):
    ours, plain = load_synthetic(num_layers, "eager"), load_synthetic(num_layers, "sdpa")
    access = check_model(ours, "synthetic", 1e-5)
    batch = make_batch(BATCH_TOKENS[DEVICE], length, vocabulary=1000)
    maps = tuple(range(1, highest + 1))
    run_plain = torch.inference_mode()(lambda: run_model(plain, *batch))
    rounds = 1 if length * num_layers > 40_000 else 3
    extraction, forward = time_in_turn(lambda: compute_maps(ours, access, *batch, maps), run_plain, rounds=rounds)
    print(
        f"\n(d) {num_layers} layers, {tuple(batch[0].shape)}, orders 1-{highest}: {extraction / forward:.2f} x "
        f"the forward pass ({extraction:.2f} s)"
    )
