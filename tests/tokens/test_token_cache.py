"""Tokens are made once for the same texts, tokenizer and length, and never taken from a damaged or another's file."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from pipeline.tokens import cache
from pipeline.tokens.cache import recall_tokens
from pipeline.tokens.encode import TokenTable
from storage_schema.samples import Sample

SAMPLES = [
    Sample(text=text, words=(text,), word_spans=((0, len(text)),), sample_id=f"{number:016x}")
    for number, text in enumerate(("one", "two"))
]
TOKENIZER = ("sha256:model", "tokenizer")


@pytest.fixture
def recall(tmp_path, monkeypatch):
    """Recalls tokens from a cache of the test's own, and says beside them whether they were made now."""
    monkeypatch.setenv("OLA_CACHE", str(tmp_path))

    def recall(samples=SAMPLES, tokenizer=TOKENIZER, max_length=8):
        made = []

        def make():
            made.append(True)
            return TokenTable(
                input_ids=np.array([5, 6, 7], np.int32),
                word_ids=np.array([0, 0, -1], np.int32),
                offsets=np.array([[0, 1], [1, 3], [0, 0]], np.int32),
                lengths=np.array([1, 2], np.int32),
                pad_token_id=3,
                num_truncated=1,
                num_words_without_token=2,
            )

        return recall_tokens(samples, tokenizer, max_length, make), bool(made)

    return recall


def test_same_texts_are_tokenized_once(recall):
    made, is_new = recall()
    found, is_new_again = recall()
    assert (is_new, is_new_again) == (True, False)
    for name, value in asdict(made).items():
        again = getattr(found, name)
        assert type(again) is type(value), name
        assert np.array_equal(again, value), name
        assert not isinstance(value, np.ndarray) or again.dtype == value.dtype, name


@pytest.mark.parametrize(
    "changed",
    [
        {"samples": SAMPLES[:1]},
        {"samples": [SAMPLES[0], replace(SAMPLES[1], text="twø")]},
        {"samples": [SAMPLES[0], replace(SAMPLES[1], word_spans=((1, 3),))]},
        {"tokenizer": ("sha256:model", "another")},
        {"tokenizer": ("sha256:another", "tokenizer")},
        {"max_length": 9},
    ],
    ids=["fewer samples", "another text", "other spans", "another tokenizer", "another model", "another length"],
)
def test_whatever_decides_the_tokens_makes_them_anew(recall, changed):
    recall()
    assert recall(**changed)[1]


def test_code_and_libraries_that_changed_make_them_anew(recall, tmp_path, monkeypatch):
    recall()
    edited = tmp_path / "encode.py"
    edited.write_text("another way to encode")
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_CODE", (edited,))
        assert recall()[1]
    monkeypatch.setattr(cache, "find_library_version", lambda name: "99")
    assert recall()[1]


def test_no_flipped_bit_of_a_file_becomes_other_tokens(recall, tmp_path):
    made, _ = recall()
    (path,) = tmp_path.glob("tokens/*.npz")
    data = path.read_bytes()
    num_noticed = 0
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1 << position % 8]) + data[position + 1 :])
        found, is_new = recall()
        num_noticed += is_new
        assert all(np.array_equal(getattr(found, name), value) for name, value in asdict(made).items()), position
    assert num_noticed > len(data) / 2  # others lie in fields of the archive that nothing reads


@pytest.mark.parametrize("share", [0, 0.5, 0.95])
def test_truncated_files_count_as_none_and_are_replaced(recall, tmp_path, share):
    recall()
    (path,) = tmp_path.glob("tokens/*.npz")
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    assert recall()[1]
    assert not recall()[1]


def test_nothing_is_kept_of_tokens_that_could_not_be_made(tmp_path, monkeypatch):
    monkeypatch.setenv("OLA_CACHE", str(tmp_path))

    def fail():
        raise ValueError("no tokens")

    with pytest.raises(ValueError, match="no tokens"):
        recall_tokens(SAMPLES, TOKENIZER, 8, fail)
    assert not list(tmp_path.glob("tokens/*"))
