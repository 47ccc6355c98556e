"""Orders and rollout equal what the paper enumerates, at every depth, whatever is asked beside them."""

import gc
import weakref
from functools import reduce
from itertools import combinations
from math import comb

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.ola.orders import MapAccumulator

TOLERANCE = 2e-6
quick = settings(deadline=None, max_examples=40)


@st.composite
def stacks(draw, *, lower=False):
    """Layers of row-stochastic matrices, [N, B, T, T] in float64; some rows put all their weight on one key."""
    num_layers, batch, size = draw(st.integers(1, 6)), draw(st.integers(1, 3)), draw(st.integers(1, 7))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    layers = random.random((num_layers, batch, size, size)) ** draw(st.sampled_from([1, 8, 60])) + 1e-30
    if lower:
        layers = np.tril(layers)
    return layers / layers.sum(-1, keepdims=True)


def enumerate_order(layers, order):
    """The mean over all choices of `order` layers of their product, later layers on the left."""
    identity = np.broadcast_to(np.eye(layers.shape[-1]), layers.shape[1:])
    chosen = list(combinations(range(len(layers)), order))
    products = (reduce(lambda product, layer: layers[layer] @ product, choice, identity) for choice in chosen)
    return sum(products) / len(chosen)


def accumulate(layers, maps):
    accumulator = MapAccumulator(maps)
    for layer in layers:
        accumulator.add_layer(torch.from_numpy(layer).float())
    return accumulator.stack_maps()


@quick
@given(stacks())
def test_every_order_equals_the_enumeration_of_all_layer_combinations(layers):
    orders = tuple(range(1, len(layers) + 1))
    found = accumulate(layers, orders)
    expected = np.stack([enumerate_order(layers, order) for order in orders], axis=1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@quick
@given(stacks())
def test_the_binomially_weighted_sum_of_all_orders_is_the_unnormalized_rollout(layers):
    num_layers, size = len(layers), layers.shape[-1]
    *orders, rollout = accumulate(layers, (*range(1, num_layers + 1), "rollout")).double().unbind(1)
    product = reduce(lambda seen, layer: (layer + np.eye(size)) @ seen, layers, np.eye(size))
    total = np.eye(size) + sum(comb(num_layers, k) * order.numpy() for k, order in enumerate(orders, start=1))
    np.testing.assert_allclose(total / 2**num_layers, product / 2**num_layers, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(rollout, product / 2**num_layers, rtol=0, atol=TOLERANCE)


@quick
@given(stacks())
def test_rows_of_every_map_sum_to_one(layers):
    found = accumulate(layers, (*range(1, len(layers) + 1), "rollout"))
    np.testing.assert_allclose(found.sum(-1), 1, rtol=0, atol=TOLERANCE)
    assert found.dtype == torch.float32
    assert found.min() >= 0


@quick
@given(stacks(lower=True))
def test_causal_layers_give_exactly_lower_triangular_maps(layers):
    found = accumulate(layers, (*range(1, len(layers) + 1), "rollout"))
    assert not found.triu(1).any()


@quick
@given(stacks(), st.data())
def test_a_selection_of_maps_has_the_values_of_all_in_the_order_asked(layers, data):
    every = (*range(1, len(layers) + 1), "rollout")
    asked = tuple(data.draw(st.lists(st.sampled_from(every), min_size=1, unique=True)))
    everything = dict(zip(every, accumulate(layers, every).unbind(1), strict=True))
    selected = accumulate(layers, asked)
    assert selected.shape[1] == len(asked)
    for name, found in zip(asked, selected.unbind(1), strict=True):
        assert torch.equal(found, everything[name])


@pytest.mark.parametrize("num_layers", [1, 3])
def test_an_order_above_the_number_of_layers_raises(num_layers):
    layers = np.full((num_layers, 1, 2, 2), 0.5)
    with pytest.raises(ValueError, match=f"order {num_layers + 1} of {num_layers} layers"):
        accumulate(layers, (1, num_layers + 1))


def test_rollout_alone_of_100_layers_neither_overflows_nor_loses_its_row_sums():
    random = np.random.default_rng(0).random((100, 1, 5, 5))
    layers = random / random.sum(-1, keepdims=True)
    rollout = accumulate(layers, ("rollout",))
    np.testing.assert_allclose(rollout.sum(-1), 1, rtol=0, atol=1e-5)


def test_deep_stacks_keep_float32_accuracy():
    random = np.random.default_rng(1).random((42, 1, 6, 6)) ** 8
    layers = random / random.sum(-1, keepdims=True)
    size = layers.shape[-1]
    expected = {k: np.zeros((1, size, size)) for k in range(4)}
    expected[0] += np.eye(size)
    for layer in layers:
        for k in (3, 2, 1):
            expected[k] = expected[k] + layer @ expected[k - 1]
    found = accumulate(layers, (1, 2, 3))
    sums = np.stack([expected[k] / comb(42, k) for k in (1, 2, 3)], axis=1)
    np.testing.assert_allclose(found, sums, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_layers_are_accumulated_in_float32(dtype):
    layers = torch.softmax(torch.randn(4, 2, 5, 5, generator=torch.Generator().manual_seed(0)), dim=-1).to(dtype)
    accumulator = MapAccumulator((1, 2, "rollout"))
    for layer in layers:
        accumulator.add_layer(layer)
    found = accumulator.stack_maps()
    exact = layers.double().numpy()
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found[:, 1], enumerate_order(exact, 2), rtol=0, atol=TOLERANCE)


def test_the_layers_given_are_not_changed():
    layer = torch.softmax(torch.randn(1, 4, 4), dim=-1)
    before = layer.clone()
    accumulator = MapAccumulator((1, 2, "rollout"))
    for _ in range(3):
        accumulator.add_layer(layer)
    accumulator.stack_maps()
    assert torch.equal(layer, before)


def count_live_tensors():
    gc.collect()
    return sum(issubclass(type(value), torch.Tensor) for value in gc.get_objects())


@pytest.mark.parametrize("maps", [(1,), (1, 2, 3), ("rollout",), (2, "rollout")])
def test_no_layer_outlives_its_turn(maps):
    accumulator, seen, live = MapAccumulator(maps), [], []
    for number in range(8):
        layer = torch.softmax(torch.randn(2, 5, 5), dim=-1)
        seen.append(weakref.ref(layer))
        accumulator.add_layer(layer)
        del layer
        if number in (3, 7):
            live.append(count_live_tensors())
    assert [layer() for layer in seen] == [None] * 8
    assert live[0] == live[1]


class ProductCounter(TorchDispatchMode):
    """Counts matrix products of T x T matrices."""

    def __init__(self):
        super().__init__()
        self.num_products = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.num_products += any(name in str(function) for name in ("bmm", "aten.mm", "addmm"))
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize(
    ("maps", "num_products"),
    [
        ((1,), 0),
        ((1, 2), 9),
        ((1, 2, 3), 9 + 8),
        ((3,), 9 + 8),
        (("rollout",), 10),
        ((1, "rollout"), 10),
        ((1, 2, "rollout"), 9 + 10),
    ],
)
def test_selecting_maps_costs_the_products_of_what_is_selected(maps, num_products):
    layers = torch.softmax(torch.randn(10, 2, 5, 5, generator=torch.Generator().manual_seed(0)), dim=-1)
    accumulator = MapAccumulator(maps)
    with ProductCounter() as counter:
        for layer in layers:
            accumulator.add_layer(layer)
    assert counter.num_products == num_products


@pytest.mark.parametrize("num_tokens", [1, 127, 128, 129, 300])
def test_lower_triangles_are_multiplied_in_blocks_to_the_same_maps(num_tokens):
    generator = torch.Generator().manual_seed(0)
    layers = torch.rand(4, 2, num_tokens, num_tokens, generator=generator).tril()
    layers /= layers.sum(-1, keepdim=True)
    maps, stacks = (1, 2, 3, "rollout"), []
    for packing in ("full", "lower"):
        accumulator = MapAccumulator(maps, packing)
        for layer in layers:
            accumulator.add_layer(layer)
        stacks.append(accumulator.stack_maps())
    torch.testing.assert_close(stacks[1], stacks[0], rtol=0, atol=1e-6)
    assert not stacks[1].triu(1).any()
