"""Extraction against the plain forward pass, and against the paper's way, in turn in one run."""

import itertools
import statistics
import time

import pytest
import torch
from transformers import AutoModel

from pipeline.ola.attention import run_model
from pipeline.ola.identity import identify_model
from pipeline.ola.load import load_model
from pipeline.tokens.batches import plan_batches
from pipeline.tokens.encode import load_tokenizer

pytestmark = pytest.mark.bench
ROUNDS = 5
NUM_TEXTS = 64


def time_in_turn(*actions) -> list[float]:
    for action in actions:
        action()
    seconds = [[] for _ in actions]
    for _ in range(ROUNDS):
        for action, measured in zip(actions, seconds, strict=True):
            began = time.perf_counter()
            action()
            measured.append(time.perf_counter() - began)
    return [statistics.median(measured) for measured in seconds]


def load_fused(identity):
    return AutoModel.from_pretrained(identity.path, dtype=torch.float32, attn_implementation="sdpa").eval()


@pytest.mark.parametrize("name", ["minilm-l6", "smollm2-135m"])
@pytest.mark.parametrize("length", [16, 32, 128, 512])
def test_cost_over_the_plain_forward_pass(name, length):
    identity = identify_model(name)
    ours, plain = load_model(identity), load_fused(identity)
    input_ids = torch.randint(100, 20000, (max(1, 2048 // length), length))
    mask = torch.ones_like(input_ids)

    @torch.inference_mode()
    def run_plain():
        run_model(plain, input_ids, mask)

    extraction, forward = time_in_turn(lambda: ours.compute_maps(input_ids, mask, (1, 2, 3)), run_plain)
    print(f"\n{name}, {tuple(input_ids.shape)}: orders 1-3 cost {extraction / forward:.2f} x the forward pass")


@pytest.mark.parametrize("name", ["minilm-l6", "smollm2-135m"])
def test_speed_over_one_text_at_a_time_with_enumeration(name, corpus_folder):
    identity = identify_model(name)
    ours = load_model(identity)
    eager = AutoModel.from_pretrained(identity.path, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = load_tokenizer(identity.path, name)
    file = corpus_folder("ud-ewt") / "en_ewt-ud-dev.conllu"
    lines = file.read_text(encoding="utf-8").splitlines()
    texts = [line.removeprefix("# text = ") for line in lines if line.startswith("# text = ")]
    encoded = [tokenizer(text, padding=False)["input_ids"] for text in texts[:NUM_TEXTS]]

    def run_batches():
        for batch in plan_batches([len(ids) for ids in encoded], 4096):
            rows = [torch.tensor(encoded[position]) for position in batch]
            input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            ours.compute_maps(input_ids, mask, (1, 2, 3))

    @torch.inference_mode()
    def run_enumeration():
        for ids in encoded:
            attentions = eager(input_ids=torch.tensor([ids]), output_attentions=True).attentions
            layers = [attention[0].mean(0) for attention in attentions]
            for order in (1, 2, 3):
                total = torch.zeros_like(layers[0])
                for chosen in itertools.combinations(layers, order):
                    product = chosen[0]
                    for later in chosen[1:]:
                        product = later @ product
                    total += product

    batched, enumerated = time_in_turn(run_batches, run_enumeration)
    print(f"\n{name}, {NUM_TEXTS} sentences of ud-ewt dev: {enumerated / batched:.1f} x as fast as one at a time")
