"""Batches are a partition of the samples, within their budget, the same every time."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.tokens.batches import BATCH_COST, iter_batches, plan_batches
from pipeline.tokens.encode import TokenTable

quick = settings(deadline=None, max_examples=200)
all_lengths = st.lists(st.integers(1, 60), max_size=40)
budgets = st.integers(1, 200)


@quick
@given(all_lengths, budgets)
def test_every_sample_is_in_one_batch_longest_first(lengths, batch_tokens):
    batches = plan_batches(lengths, batch_tokens)
    positions = [position for batch in batches for position in batch]
    assert sorted(positions) == list(range(len(lengths)))
    assert [lengths[position] for position in positions] == sorted(lengths, reverse=True)
    assert all(batches)


@quick
@given(all_lengths, budgets)
def test_a_batch_holds_its_budget_of_padded_tokens_unless_it_is_one_sample(lengths, batch_tokens):
    for batch in plan_batches(lengths, batch_tokens):
        assert len(batch) == 1 or len(batch) * max(lengths[position] for position in batch) <= batch_tokens


def count_cost(lengths, batches, batch_tokens):
    return sum(len(batch) * lengths[batch[0]] + BATCH_COST * batch_tokens for batch in batches)


@quick
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), budgets)
def test_no_other_cut_of_the_sorted_samples_costs_less(lengths, batch_tokens):
    found = plan_batches(lengths, batch_tokens)
    order = [position for batch in found for position in batch]
    costs = []
    for num_cuts in range(len(order)):
        for cuts in combinations(range(1, len(order)), num_cuts):
            batches = [order[start:stop] for start, stop in pairwise((0, *cuts, len(order)))]
            if all(len(batch) == 1 or len(batch) * lengths[batch[0]] <= batch_tokens for batch in batches):
                costs.append(count_cost(lengths, batches, batch_tokens))
    assert count_cost(lengths, found, batch_tokens) == pytest.approx(min(costs))


def test_a_few_long_texts_do_not_pad_many_short_ones():
    batches = plan_batches([400, 390] + [10] * 60, 1024)
    assert [len(batch) for batch in batches] == [2, 60]


@quick
@given(all_lengths, budgets)
def test_the_plan_depends_on_lengths_and_budget_alone(lengths, batch_tokens):
    plan = plan_batches(lengths, batch_tokens)
    array = np.array(lengths, np.int32)
    assert plan_batches(array, batch_tokens) == plan == plan_batches(lengths, batch_tokens)
    assert array.tolist() == lengths


def test_equal_lengths_keep_the_order_of_the_samples():
    assert plan_batches([3, 5, 3, 5, 3], 10) == [[1, 3], [0, 2, 4]]


def test_a_budget_counted_in_32_bits_does_not_overflow():
    lengths = np.full(50, 2_000_000_000, np.int32)
    assert plan_batches(lengths, 2**31 - 1) == [[position] for position in range(50)]


def make_table(lengths, pad_token_id):
    """Tokens that count up from 0 over all samples, so that each one tells where it stands."""
    total = sum(lengths)
    return TokenTable(
        input_ids=np.arange(total, dtype=np.int32),
        word_ids=np.zeros(total, np.int32),
        offsets=np.zeros((total, 2), np.int32),
        lengths=np.array(lengths, np.int32),
        pad_token_id=pad_token_id,
        num_truncated=0,
        num_words_without_token=0,
    )


@quick
@given(st.data(), st.lists(st.integers(1, 30), min_size=1, max_size=20), budgets, st.sampled_from([0, 7]))
def test_batches_hold_the_tokens_of_their_samples_padded_on_the_right(data, lengths, batch_tokens, pad_token_id):
    start = data.draw(st.integers(0, len(lengths)))
    stop = data.draw(st.integers(start, len(lengths)))
    tokens, seen = make_table(lengths, pad_token_id), []
    for indexes, input_ids, mask in iter_batches(tokens, start, stop, batch_tokens):
        assert input_ids.shape == mask.shape == (len(indexes), max(lengths[index] for index in indexes))
        assert input_ids.dtype == mask.dtype == np.int64
        for index, row, kept in zip(indexes, input_ids, mask, strict=True):
            first, length = sum(lengths[:index]), lengths[index]
            assert row[:length].tolist() == list(range(first, first + length))
            assert (row[length:] == pad_token_id).all()
            assert kept.tolist() == [1] * length + [0] * (len(row) - length)
        seen += indexes
    assert sorted(seen) == list(range(start, stop))


def test_a_token_that_equals_the_pad_id_is_no_padding():
    tokens = make_table([3, 2], pad_token_id=1)
    ((_, input_ids, mask),) = iter_batches(tokens, 0, 2, 100)
    assert input_ids.tolist() == [[0, 1, 2], [3, 4, 1]]
    assert mask.tolist() == [[1, 1, 1], [1, 1, 0]]


@quick
@given(all_lengths, budgets, st.integers(1, 60))
def test_short_and_long_samples_share_no_batch(lengths, batch_tokens, short_length):
    batches = plan_batches(lengths, batch_tokens, short_length)
    assert sorted(position for batch in batches for position in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len({lengths[position] > short_length for position in batch}) == 1
