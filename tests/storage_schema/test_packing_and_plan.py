"""Packing loses nothing, and the plan of partitions covers a split once, within its limits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from storage_schema.arrays import (
    CHUNK_CELLS,
    INDEX_ARRAYS,
    PARTITION_CELLS,
    count_cells,
    count_row_cells,
    name_array,
    pack_map,
    place_samples,
    plan_partitions,
    unpack_map,
)

packings = st.sampled_from(["full", "lower"])
lengths_lists = st.lists(st.integers(1, 40), max_size=60)
plans = st.fixed_dictionaries(
    {"packing": packings, "partition_cells": st.integers(1, 3000), "partition_samples": st.integers(1, 20)}
)
squares = st.integers(1, 24).flatmap(
    lambda length: hnp.arrays(np.float16, (length, length), elements=st.floats(0, 1, width=16))
)


@given(squares)
@settings(deadline=None, max_examples=50)
def test_full_packing_brings_every_cell_back(values):
    cells = pack_map(values, "full")
    assert len(cells) == count_cells(len(values), "full")
    assert np.array_equal(unpack_map(cells, len(values), "full"), values)


@given(squares)
@settings(deadline=None, max_examples=50)
def test_lower_packing_brings_the_lower_triangle_back_row_by_row(values):
    cells = pack_map(values, "lower")
    rows = [values[row, : row + 1] for row in range(len(values))]
    assert np.array_equal(cells, np.concatenate(rows))
    assert len(cells) == count_cells(len(values), "lower")
    again = unpack_map(cells, len(values), "lower")
    assert again.dtype == values.dtype
    assert np.array_equal(again, np.tril(values))


@given(lengths_lists, plans)
@settings(deadline=None, max_examples=100)
def test_partitions_cover_the_split_in_order_without_gap(lengths, plan):
    partitions = plan_partitions(lengths, **plan)
    assert [partition.number for partition in partitions] == list(range(len(partitions)))
    assert [index for p in partitions for index in range(p.start, p.stop)] == list(range(len(lengths)))
    assert all(partition.stop > partition.start for partition in partitions)


@given(lengths_lists, plans)
@settings(deadline=None, max_examples=100)
def test_a_partition_keeps_its_limits_and_closes_no_earlier_than_it_must(lengths, plan):
    partitions = plan_partitions(lengths, **plan)
    for partition in partitions:
        cells = [count_cells(length, plan["packing"]) for length in lengths[partition.start : partition.stop]]
        assert partition.num_cells == sum(cells)
        assert len(cells) <= plan["partition_samples"]
        assert sum(cells) <= plan["partition_cells"] or len(cells) == 1
        if partition.stop < len(lengths):
            following = count_cells(lengths[partition.stop], plan["packing"])
            full = sum(cells) + following > plan["partition_cells"] or len(cells) == plan["partition_samples"]
            assert full


@given(lengths_lists.filter(len), lengths_lists, plans)
@settings(deadline=None, max_examples=100)
def test_a_longer_split_keeps_every_partition_but_the_last(lengths, added, plan):
    before, after = plan_partitions(lengths, **plan), plan_partitions(lengths + added, **plan)
    assert after[: len(before) - 1] == before[:-1]
    assert after[len(before) - 1].start == before[-1].start


@given(lengths_lists, plans)
@settings(deadline=None, max_examples=100)
def test_runs_of_samples_are_disjoint_and_fill_their_partition(lengths, plan):
    partitions = plan_partitions(lengths, **plan)
    owner, first = place_samples(np.array(lengths, np.int32), partitions, plan["packing"])
    assert (owner.dtype, first.dtype) == (np.int32, np.int64)
    taken = [np.zeros(partition.num_cells, int) for partition in partitions]
    for length, partition, start in zip(lengths, owner, first, strict=True):
        stop = start + count_cells(length, plan["packing"])
        assert stop <= partitions[partition].num_cells
        taken[partition][start:stop] += 1
    assert all((cells == 1).all() for cells in taken)


@given(st.integers(1, 20_000), packings)
@settings(deadline=None, max_examples=100)
def test_a_row_of_cells_holds_the_longest_sample_in_whole_chunks(max_length, packing):
    cells = count_row_cells(plan_partitions([1, max_length], packing=packing, partition_samples=1))
    assert cells % CHUNK_CELLS == 0
    assert cells >= count_cells(max_length, packing)
    assert cells == PARTITION_CELLS or cells - CHUNK_CELLS < count_cells(max_length, packing)


def test_a_partition_closes_at_four_mebicells():
    lengths = [512] * 33
    (first, second, third) = plan_partitions(lengths, packing="full", partition_samples=1024)
    assert count_row_cells([first, second, third]) == 4 * 1024 * 1024
    assert (first.stop, second.stop, third.stop) == (16, 32, 33)
    assert first.num_cells == PARTITION_CELLS


def test_positions_beyond_32_bits_are_kept():
    lengths = np.array([100_000, 1], np.int32)
    (partition,) = plan_partitions(lengths, packing="full", partition_cells=10**11, partition_samples=2)
    _, first = place_samples(lengths, [partition], "full")
    assert first.tolist() == [0, 10**10]


@pytest.mark.parametrize(("name", "array"), [(1, "order_1"), (12, "order_12"), ("rollout", "rollout")])
def test_a_map_has_its_own_array_name(name, array):
    assert name_array(name) == array


def test_no_map_array_has_the_name_of_an_index_array():
    names = {index.name for index in INDEX_ARRAYS}
    assert len(names) == len(INDEX_ARRAYS)
    assert not names & {name_array(name) for name in (1, 2, "rollout")}
