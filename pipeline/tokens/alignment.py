"""Which word each token belongs to, from character offsets alone."""

from bisect import bisect_right
from collections.abc import Sequence

NO_WORD = -1


def align_tokens(offsets: Sequence[tuple[int, int]], word_spans: Sequence[tuple[int, int]]) -> list[int]:
    """Each token's word, or `NO_WORD`.

    A token that overlaps several words belongs to the largest overlap, then the first. A token without characters (a
    special token) or over whitespace alone belongs to none.

    Args:
        offsets: [start, stop) of each token in the text.
        word_spans: [start, stop) of each word; in order, apart from words that share one span.
    """
    stops = [stop for _, stop in word_spans]
    words = []
    for start, stop in offsets:
        best, most = NO_WORD, 0
        for word in range(bisect_right(stops, start), len(word_spans)):
            first, last = word_spans[word]
            if first >= stop:
                break
            overlap = min(stop, last) - max(start, first)
            if overlap > most:
                best, most = word, overlap
        words.append(best)
    return words
