"""Transforms give what plain loops over rows and words give, whatever the batch and its padding."""

import math

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import interpolate

from pipeline.readers.transforms import pool_words, remove_outliers, renormalize, resize, symmetrize
from storage_schema.errors import InvalidRecipeError

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=4)
SEEDS = st.integers(0, 2**32 - 1)
PADDINGS = st.integers(0, 5)


def draw_maps(seed, lengths, padding=0, *, causal=False, num_maps=2):
    """Random maps with padding: sharp rows (most entries tiny, a few large) whose values often repeat."""
    generator = np.random.default_rng(seed)
    num_tokens = max(lengths) + padding
    maps = np.zeros((len(lengths), num_maps, num_tokens, num_tokens))
    for sample, length in enumerate(lengths):
        weights = np.exp(generator.normal(size=(num_maps, length, length)).round(1) * 3)
        weights = np.tril(weights) if causal else weights
        maps[sample, :, :length, :length] = weights / weights.sum(-1, keepdims=True)
    return torch.from_numpy(maps).float()


def loop_without_outliers(maps, lengths, causal, renormalized):
    result = np.zeros(maps.shape)
    for sample, number, query in np.ndindex(maps.shape[:3]):
        if query >= lengths[sample]:
            continue
        entries = maps[sample, number, query].double().tolist()[: query + 1 if causal else lengths[sample]]
        limit = math.inf
        if len(entries) > 1:
            mean = sum(entries) / len(entries)
            limit = mean + 3 * math.sqrt(sum((entry - mean) ** 2 for entry in entries) / (len(entries) - 1))
        kept = [0.0 if entry > limit or entry == max(entries) else entry for entry in entries]
        scale = sum(kept) if renormalized and sum(kept) > 0 else 1.0
        result[sample, number, query, : len(kept)] = np.array(kept) / scale
    return result


def loop_words(maps, word_ids, num_words):
    width = max(num_words)
    result = np.zeros((*maps.shape[:2], width, width))
    for sample, number, query_word, key_word in np.ndindex(result.shape):
        queries = [token for token, word in enumerate(word_ids[sample]) if word == query_word]
        keys = [token for token, word in enumerate(word_ids[sample]) if word == key_word]
        if queries:
            given = sum(float(maps[sample, number, query, key]) for query in queries for key in keys)
            result[sample, number, query_word, key_word] = given / len(queries)
    return result


@given(seed=SEEDS, lengths=LENGTHS, padding=PADDINGS, causal=st.booleans(), renormalized=st.booleans())
@example(seed=0, lengths=[40, 1, 12], padding=3, causal=True, renormalized=True)
@example(seed=0, lengths=[40, 1, 12], padding=3, causal=False, renormalized=False)
@settings(max_examples=40, deadline=None)
def test_outliers_are_those_that_a_loop_over_rows_removes(seed, lengths, padding, causal, renormalized):
    maps = draw_maps(seed, lengths, padding, causal=causal)
    result = remove_outliers(maps, torch.tensor(lengths), causal=causal, renormalized=renormalized)
    expected = loop_without_outliers(maps, lengths, causal, renormalized)
    assert result.dtype == torch.float32
    assert np.array_equal(result != 0, expected != 0)
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_entries_above_three_sigma_go_beside_the_maximum():
    row = torch.tensor([0.5, 0.4, *[0.1 / 28] * 27, 0.1 / 28 * 0.999])
    maps = row.repeat(1, 1, 30, 1)
    kept = remove_outliers(maps, torch.tensor([30]), causal=False, renormalized=False)[0, 0, 0]
    assert kept[:2].tolist() == [0, 0]
    assert torch.equal(kept[2:], row[2:])
    # Of ten entries none can be above: only the maximum goes.
    short = torch.tensor([0.9, *[0.1 / 9] * 9]).repeat(1, 1, 10, 1)
    assert (remove_outliers(short, torch.tensor([10]), causal=False)[0, 0, 0] != 0).tolist() == [False, *[True] * 9]


def test_sigma_is_unbiased():
    # The second entry is 3.05 biased and 2.97 unbiased sigmas above the mean.
    row = torch.tensor([0.5, 0.49, *[0.01] * 19])
    kept = remove_outliers(row.repeat(1, 1, 21, 1), torch.tensor([21]), causal=False, renormalized=False)[0, 0, 0]
    assert (kept != 0).tolist() == [False, *[True] * 20]


def test_a_maximum_that_occurs_twice_is_removed_twice():
    row = torch.tensor([0.4, 0.1, 0.4, 0.1])
    maps = row.repeat(1, 1, 4, 1)
    assert remove_outliers(maps, torch.tensor([4]), causal=False)[0, 0, 0].tolist() == [0, 0.5, 0, 0.5]


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e-38])
def test_rows_of_equal_entries_are_left_empty(scale):
    for length in (1, 2, 3, 11, 37):
        maps = torch.full((1, 1, length, length), scale / length)
        assert not remove_outliers(maps, torch.tensor([length]), causal=False).any()
        assert not remove_outliers(maps.tril(), torch.tensor([length]), causal=True).any()


def test_a_row_left_empty_stays_zero_and_others_sum_to_one():
    lengths = [20, 1, 2]
    for causal in (True, False):
        # Scaled row by row so that no maximum occurs twice, even in the row of two.
        maps = draw_maps(5, lengths, 2, causal=causal) * torch.linspace(1, 1.01, 22)
        result = remove_outliers(maps, torch.tensor(lengths), causal=causal)
        assert torch.isfinite(result).all()
        sums = result.sum(-1)
        for sample, length in enumerate(lengths):
            first = 1 if causal or length == 1 else 0
            assert not sums[sample, :, :first].any()
            assert torch.allclose(sums[sample, :, first:length], torch.ones(()))
            assert not sums[sample, :, length:].any()


def test_structural_zeros_count_only_when_the_map_is_not_taken_as_causal():
    # The third row's entries .45, .35, .2 have no outlier; with 37 zeros more, .35 is one, as in the paper's code.
    maps = torch.zeros(1, 1, 40, 40)
    maps[0, 0, 2, :3] = torch.tensor([0.45, 0.35, 0.2])
    lengths = torch.tensor([40])
    corrected = remove_outliers(maps, lengths, causal=True, renormalized=False)[0, 0, 2, :3]
    parity = remove_outliers(maps, lengths, causal=False, renormalized=False)[0, 0, 2, :3]
    assert torch.equal(corrected, torch.tensor([0, 0.35, 0.2]))
    assert torch.equal(parity, torch.tensor([0, 0, 0.2]))


def test_what_lies_outside_the_real_entries_has_no_part_and_comes_back_zero():
    maps = draw_maps(1, [14, 30], causal=True)
    lengths = torch.tensor([14, 30])
    dirty = maps + torch.ones_like(maps).triu(1)
    dirty[0, :, 14:], dirty[0, :, :, 14:] = math.nan, math.nan
    assert torch.equal(remove_outliers(dirty, lengths, causal=True), remove_outliers(maps, lengths, causal=True))


@given(seed=SEEDS, lengths=LENGTHS, padding=PADDINGS, causal=st.booleans())
@settings(max_examples=25, deadline=None)
def test_a_sample_alone_and_in_a_padded_batch_gives_the_same(seed, lengths, padding, causal):
    maps = draw_maps(seed, lengths, padding, causal=causal)
    word_ids = torch.full(maps.shape[:1] + maps.shape[-1:], -1)
    for sample, length in enumerate(lengths):
        word_ids[sample, :length] = torch.arange(length) // 2
    num_words = torch.tensor([(length + 1) // 2 for length in lengths])
    removed = remove_outliers(maps, torch.tensor(lengths), causal=causal)
    resized = resize(maps, torch.tensor(lengths), 9)
    pooled = pool_words(maps, word_ids, num_words)
    for sample, length in enumerate(lengths):
        alone, lengths_alone = maps[sample : sample + 1, :, :length, :length], torch.tensor([length])
        words = int(num_words[sample])
        pairs = [
            (removed[sample, :, :length, :length], remove_outliers(alone, lengths_alone, causal=causal)[0]),
            (resized[sample], resize(alone, lengths_alone, 9)[0]),
            (
                pooled[sample, :, :words, :words],
                pool_words(alone, word_ids[sample : sample + 1, :length], num_words[sample : sample + 1])[0],
            ),
        ]
        for batched, single in pairs:
            torch.testing.assert_close(batched, single, rtol=1e-6, atol=1e-6)
        assert removed[sample].count_nonzero() == pairs[0][0].count_nonzero()
        assert pooled[sample].count_nonzero() == pairs[2][0].count_nonzero()


def test_renormalized_rows_sum_to_one_and_zero_rows_stay_zero():
    maps = torch.tensor([[[[0.2, 0.2], [0.0, 0.0]], [[0.0, 3.0], [1e-30, 3e-30]]]])
    expected = torch.tensor([[[[0.5, 0.5], [0.0, 0.0]], [[0.0, 1.0], [0.25, 0.75]]]])
    torch.testing.assert_close(renormalize(maps), expected)
    assert renormalize(maps).dtype == torch.float32


def test_symmetric_maps_mirror_the_lower_triangle_and_keep_the_diagonal():
    maps = draw_maps(2, [7, 4], 1, causal=True)
    result = symmetrize(maps)
    assert torch.equal(result, result.mT)
    assert torch.equal(result.tril(), maps)
    assert not result[1, :, 4:].any()
    assert torch.equal(symmetrize(maps + torch.ones_like(maps).triu(1)), result)


@given(seed=SEEDS, lengths=LENGTHS, padding=PADDINGS, size=st.integers(1, 60))
@example(seed=0, lengths=[40, 1, 9, 40, 1], padding=2, size=9)
@settings(max_examples=25, deadline=None)
def test_resizing_scales_each_sample_s_own_square(seed, lengths, padding, size):
    maps = draw_maps(seed, lengths, padding)
    result = resize(maps, torch.tensor(lengths), size)
    assert (result.shape, result.dtype) == ((len(lengths), 2, size, size), torch.float32)
    for sample, length in enumerate(lengths):
        square = maps[sample : sample + 1, :, :length, :length]
        expected = interpolate(square, size=(size, size), mode="bilinear", align_corners=False, antialias=True)[0]
        torch.testing.assert_close(result[sample], expected, rtol=1e-6, atol=1e-7)
        if length == size:
            torch.testing.assert_close(result[sample], square[0])


def test_samples_of_one_length_are_resized_in_one_call(monkeypatch):
    calls = []

    def record(squares, *args, **options):
        calls.append(tuple(squares.shape))
        return interpolate(squares, *args, **options)

    monkeypatch.setattr("pipeline.readers.transforms.interpolate", record)
    resize(draw_maps(0, [8, 3, 8, 8, 3]), torch.tensor([8, 3, 8, 8, 3]), 5)
    assert sorted(calls) == [(2, 2, 3, 3), (3, 2, 8, 8)]


@given(data=st.data(), seed=SEEDS, lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3), padding=PADDINGS)
@settings(max_examples=40, deadline=None)
def test_word_maps_are_those_of_a_loop_over_words(data, seed, lengths, padding):
    maps = draw_maps(seed, lengths, padding)
    num_words = data.draw(st.lists(st.integers(0, 8), min_size=len(lengths), max_size=len(lengths)))
    word_ids = [
        data.draw(st.lists(st.integers(-1, words - 1), min_size=length, max_size=length))
        + [-1] * (maps.shape[-1] - length)
        for length, words in zip(lengths, num_words, strict=True)
    ]
    result = pool_words(maps, torch.tensor(word_ids), torch.tensor(num_words))
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result, loop_words(maps, word_ids, num_words), atol=1e-6)


def test_word_maps_sum_key_tokens_and_average_query_tokens_in_any_order():
    # Words out of order, one in two pieces apart, special tokens around; word 1 has no token, and sample 1 fewer words.
    maps = torch.arange(1.0, 51.0).reshape(2, 1, 5, 5) / 100
    word_ids = torch.tensor([[-1, 2, 0, 2, -1], [0, -1, -1, -1, -1]])
    result = pool_words(maps, word_ids, torch.tensor([3, 1]))
    expected = torch.zeros(2, 1, 3, 3)
    expected[0, 0, 0, 0] = 0.13
    expected[0, 0, 0, 2] = 0.12 + 0.14
    expected[0, 0, 2, 0] = (0.08 + 0.18) / 2
    expected[0, 0, 2, 2] = (0.07 + 0.09 + 0.17 + 0.19) / 2
    expected[1, 0, 0, 0] = 0.26
    torch.testing.assert_close(result, expected)
    assert not result[0, 0, 1].any()
    assert not result[0, 0, :, 1].any()


def test_rows_of_word_maps_sum_to_one_minus_what_went_outside_words():
    maps = draw_maps(3, [8, 5])
    word_ids = torch.tensor([[-1, 0, 0, 1, 2, 2, 2, -1], [-1, 0, 1, 1, -1, -1, -1, -1]])
    sums = pool_words(maps, word_ids, torch.tensor([3, 2])).sum(-1)
    outside = maps.masked_fill((word_ids >= 0)[:, None, None], 0).sum(-1)
    for sample, number, word in [(0, 0, 0), (0, 1, 2), (1, 0, 1)]:
        expected = 1 - outside[sample, number, word_ids[sample] == word].mean()
        torch.testing.assert_close(sums[sample, number, word], expected)
    assert not sums[1, :, 2].any()


def test_inputs_are_not_modified():
    for causal in (True, False):
        maps = draw_maps(4, [12, 6], 1, causal=causal)
        lengths = torch.tensor([12, 6])
        word_ids, num_words = torch.arange(13).repeat(2, 1) - 1, torch.tensor([12, 12])
        inputs = (maps, lengths, word_ids, num_words)
        before = [tensor.clone() for tensor in inputs]
        results = [
            remove_outliers(maps, lengths, causal=causal),
            remove_outliers(maps, lengths, causal=causal, renormalized=False),
            renormalize(maps),
            symmetrize(maps),
            resize(maps, lengths, 13),
            resize(maps, torch.tensor([13, 13]), 13),
            pool_words(maps, word_ids, num_words),
        ]
        for result in results:
            result.fill_(7)  # nor is memory shared with them
        assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, before, strict=True))


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([3, 0], r"\[1, 3\].*sample 1 of the batch has 0"),
        ([4, 3], r"\[1, 3\].*sample 0 of the batch has 4"),
        ([-1, 3], r"sample 0 of the batch has -1"),
    ],
)
def test_lengths_outside_the_maps_are_refused(lengths, message):
    maps = torch.zeros(2, 1, 3, 3)
    with pytest.raises(InvalidRecipeError, match=message):
        remove_outliers(maps, torch.tensor(lengths), causal=True)
    with pytest.raises(InvalidRecipeError, match=message):
        resize(maps, torch.tensor(lengths), 2)


@pytest.mark.parametrize("size", [0, -3])
def test_a_size_under_one_is_refused(size):
    with pytest.raises(InvalidRecipeError, match=f"size of at least 1, got {size}"):
        resize(torch.zeros(1, 1, 3, 3), torch.tensor([3]), size)


@pytest.mark.parametrize(
    ("word_ids", "num_words", "message"),
    [
        ([[0, 1], [0, 2]], [2, 2], r"\[0, 2\).*token 1 of sample 1 of the batch has 2"),
        ([[0, 1], [1, 0]], [2, 1], r"\[0, 1\).*token 0 of sample 1 of the batch has 1"),
        ([[0, -2], [0, 0]], [2, 2], r"-1 or lie in \[0, 2\).*token 1 of sample 0 of the batch has -2"),
    ],
)
def test_word_ids_that_name_no_word_are_refused(word_ids, num_words, message):
    with pytest.raises(InvalidRecipeError, match=message):
        pool_words(torch.zeros(2, 1, 2, 2), torch.tensor(word_ids), torch.tensor(num_words))


@pytest.fixture
def unchecked_shapes():
    """Annotations are not checked, as outside of tests."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("unchecked_shapes")
def test_other_shapes_are_refused():
    maps = torch.zeros(2, 1, 3, 3)
    for lengths in (torch.tensor([3]), torch.tensor([[3], [3]]), torch.tensor(3)):
        message = rf"shape \(2,\) for this batch; got shape \({', '.join(map(str, lengths.shape))}"
        with pytest.raises(InvalidRecipeError, match=message):
            remove_outliers(maps, lengths, causal=False)
        with pytest.raises(InvalidRecipeError, match=message):
            resize(maps, lengths, 2)
    ids, counts = torch.zeros(2, 3, dtype=torch.int64), torch.tensor([1, 1])
    for word_ids, num_words in [(ids[:1], counts), (ids[:, :2], counts), (ids, counts[:1]), (ids, counts[:, None])]:
        with pytest.raises(InvalidRecipeError, match=r"\(2, 3\) and num_words \(2,\).*got shapes"):
            pool_words(maps, word_ids, num_words)
