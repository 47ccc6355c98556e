"""Maps of real weights equal those of the paper's own code."""

import numpy as np
import pytest
import torch

from pipeline.ola.identity import identify_model
from pipeline.ola.load import load_model
from pipeline.tokens.encode import encode_samples, load_tokenizer
from storage_schema.errors import UnknownModelError
from storage_schema.samples import Sample

TOLERANCE = 1e-5
ORDERS = (1, 2, 3)
MODELS = ["minilm-l6", "smollm2-135m", pytest.param("gemma3-270m", marks=pytest.mark.slow)]
LAYERS = {"minilm-l6": (6, "full"), "smollm2-135m": (30, "lower"), "gemma3-270m": (18, "lower")}


@pytest.fixture(scope="module", params=MODELS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def identity(name):
    try:
        return identify_model(name)
    except UnknownModelError as error:
        pytest.skip(f"the weights of {name} are not here: {error}")


@pytest.fixture(scope="module")
def loaded(identity):
    return load_model(identity, device="cpu")


@pytest.fixture(scope="module")
def golden(golden_folder, name, golden_sentences):
    """Token ids [T] and orders 1 to 3 [3, T, T] of each sentence."""
    with np.load(golden_folder / f"{name}.npz") as arrays:
        return [
            (arrays[f"ids_{i}"], np.stack([arrays[f"order{order}_{i}"] for order in ORDERS]))
            for i in range(len(golden_sentences))
        ]


def test_token_ids_are_the_golden_ones(identity, golden, golden_sentences):
    samples = [Sample(text=text, words=(text,), word_spans=((0, len(text)),)) for text in golden_sentences]
    tokens = encode_samples(load_tokenizer(identity.path, identity.name), samples, 512)
    assert tokens.lengths.tolist() == [len(ids) for ids, _ in golden]
    assert tokens.input_ids.tolist() == np.concatenate([ids for ids, _ in golden]).tolist()


def test_one_padded_batch_gives_the_golden_maps(loaded, golden):
    lengths = torch.tensor([len(ids) for ids, _ in golden])
    texts = [torch.from_numpy(ids).long() for ids, _ in golden]
    input_ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
    batch = loaded.compute_maps(input_ids, mask, ORDERS)
    for found, (ids, expected) in zip(batch, golden, strict=True):
        np.testing.assert_allclose(found[:, : len(ids), : len(ids)], expected, rtol=0, atol=TOLERANCE)
        assert not found[:, len(ids) :].any()
        assert not found[:, :, len(ids) :].any()


def test_one_sentence_at_a_time_gives_the_golden_maps(loaded, golden):
    for ids, expected in golden:
        input_ids = torch.from_numpy(ids).long()[None]
        found = loaded.compute_maps(input_ids, torch.ones_like(input_ids), ORDERS)[0]
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_layers_and_packing_of_real_models_are_known(name, loaded):
    assert (loaded.num_layers, loaded.packing) == LAYERS[name]
