"""Each token belongs to the word that it overlaps most, or to none."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.tokens.alignment import NO_WORD, align_tokens

quick = settings(deadline=None, max_examples=300)


@st.composite
def word_spans(draw):
    """Spans in order, with gaps; some words share the span before them, as words of a contraction do."""
    spans, position = [], draw(st.integers(0, 3))
    for _ in range(draw(st.integers(1, 8))):
        start = position + draw(st.integers(0, 2))
        position = start + draw(st.integers(1, 5))
        spans += [(start, position)] * draw(st.sampled_from([1, 1, 1, 2, 3]))
    return spans


offsets = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)).map(lambda pair: (pair[0], sum(pair))), max_size=12)


def find_best_word(start, stop, spans):
    overlaps = [min(stop, last) - max(start, first) for first, last in spans]
    return overlaps.index(max(overlaps)) if max(overlaps) > 0 else NO_WORD


@quick
@given(offsets, word_spans())
def test_the_word_is_the_first_of_those_with_the_largest_overlap(offsets, spans):
    assert align_tokens(offsets, spans) == [find_best_word(start, stop, spans) for start, stop in offsets]


@quick
@given(word_spans())
def test_a_token_as_long_as_its_word_belongs_to_it_or_to_the_first_that_shares_its_span(spans):
    assert align_tokens(spans, spans) == [spans.index(span) for span in spans]


@quick
@given(word_spans(), st.integers(1, 4))
def test_tokens_that_tile_the_text_leave_no_word_of_its_own_span_out(spans, size):
    stop = spans[-1][1]
    singles = [(position, position + 1) for position in range(stop)]
    words = set(align_tokens(singles, spans)) - {NO_WORD}
    assert {spans[word] for word in words} == set(spans)
    coarse = align_tokens([(first, min(first + size, stop)) for first in range(0, stop, size)], spans)
    assert all(word == NO_WORD or 0 <= word < len(spans) for word in coarse)
    assert [word for word in coarse if word != NO_WORD] == sorted(word for word in coarse if word != NO_WORD)


@pytest.mark.parametrize(
    ("offset", "word"),
    [
        ((0, 0), NO_WORD),
        ((3, 3), NO_WORD),
        ((3, 4), NO_WORD),
        ((2, 5), 0),
        ((3, 7), 1),
        ((1, 6), 0),
        ((0, 20), 2),
        ((13, 14), NO_WORD),
        ((30, 40), NO_WORD),
    ],
    ids=str,
)
def test_a_token_over_space_or_over_several_words(offset, word):
    assert align_tokens([offset], [(0, 3), (4, 6), (8, 13)]) == [word]


def test_no_tokens_give_no_words():
    assert align_tokens([], [(0, 3)]) == []
