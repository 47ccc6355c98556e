"""Samples become the tokens of their whole text, each one aligned to its word by characters."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.ola.identity import identify_model
from pipeline.tokens import encode
from pipeline.tokens.encode import check_vocabulary, encode_samples, load_tokenizer
from storage_schema.errors import InvalidRecipeError, UnknownModelError, UnsupportedModelError
from storage_schema.samples import Sample

TEXTS = {
    "contraction": "She didn't go — they're John's.",
    "emoji": "I 🙂👩‍👩‍👧 ok",
    "ellipsis": "wait… what…",
    "no-break space": "a\u00a0b c",
    "zero-width word": "a \u200b b",
    "accents": "Ünïcödé e\u0301a ﬁne",
    "spaces around": "  lead \t trail  ",
    "CJK": "日本語 テキスト",
    "control characters": "\u0007 bell a\u0000b",
}
SPECIAL = {"tiny-special": 2, "tiny-plain": 0, "minilm-l6": 2, "smollm2-135m": 0}
LITERAL = "x [SEP] [CLS] y </s> <s> <pad> [PAD] <|endoftext|> <|im_start|> [MASK] z"


def make_sample(text, sample_id="0123456789abcdef"):
    words = list(re.finditer(r"\S+", text))
    return Sample(
        text=text,
        words=tuple(word[0] for word in words),
        word_spans=tuple(word.span() for word in words),
        sample_id=sample_id,
    )


@pytest.fixture(scope="module", params=sorted(SPECIAL))
def name(request):
    return request.param


@pytest.fixture(scope="module")
def tokenizer(name, tiny_bert, tiny_llama):
    try:
        path = {"tiny-special": tiny_bert, "tiny-plain": tiny_llama}.get(name) or identify_model(name).path
    except UnknownModelError as error:
        pytest.skip(f"the tokenizer of {name} is not here: {error}")
    return load_tokenizer(path, name)


@pytest.fixture(scope="module")
def tiny_tokenizer(tiny_bert):
    return load_tokenizer(tiny_bert, "tiny-bert")


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_every_token_of_the_text_belongs_to_the_word_it_overlaps_or_covers_space(tokenizer, text):
    sample = make_sample(text)
    tokens = encode_samples(tokenizer, [sample], 512)
    special = tokenizer.backend_tokenizer.encode(text).special_tokens_mask
    assert len(special) == len(tokens.input_ids) == len(tokens.word_ids) == len(tokens.offsets)
    for is_special, word, (start, stop) in zip(special, tokens.word_ids, tokens.offsets, strict=True):
        if is_special:
            assert (word, start, stop) == (-1, 0, 0)
        elif word == -1:
            assert not text[start:stop].strip()
        else:
            first, last = sample.word_spans[word]
            assert first < stop
            assert start < last


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_offsets_slice_the_text_whose_tokens_stand_there(tokenizer, name, text):
    tokens = encode_samples(tokenizer, [make_sample(text)], 512)
    covered = set()
    for start, stop in tokens.offsets:
        assert 0 <= start <= stop <= len(text)
        covered |= set(range(start, stop))
    left_out = "".join(character for place, character in enumerate(text) if place not in covered)
    assert not left_out.strip("\u200b\u0007 \t\u00a0") if name == "minilm-l6" else not left_out


def test_every_word_of_a_plain_text_has_a_token(tokenizer):
    for text in ("contraction", "emoji", "ellipsis", "no-break space", "accents", "CJK"):
        assert encode_samples(tokenizer, [make_sample(TEXTS[text])], 512).num_words_without_token == 0


@pytest.mark.parametrize("name", ["minilm-l6"], indirect=True)
def test_words_that_normalize_to_nothing_are_counted(tokenizer):
    tokens = encode_samples(tokenizer, [make_sample("a \u200b b"), make_sample("\u0007 bell")], 512)
    assert tokens.num_words_without_token == 2
    assert tokens.word_ids.tolist() == [-1, 0, 2, -1, -1, 1, -1]


@pytest.mark.parametrize("name", ["minilm-l6"], indirect=True)
def test_contractions_are_cut_by_the_tokenizer_and_joined_by_words(tokenizer):
    tokens = encode_samples(tokenizer, [make_sample("She didn't go")], 512)
    assert tokenizer.convert_ids_to_tokens(tokens.input_ids.tolist())[2:5] == ["didn", "'", "t"]
    assert tokens.word_ids.tolist() == [-1, 0, 1, 1, 1, 2, -1]
    assert tokens.offsets.tolist() == [[0, 0], [0, 3], [4, 8], [8, 9], [9, 10], [11, 13], [0, 0]]


@pytest.mark.parametrize("name", ["smollm2-135m"], indirect=True)
def test_byte_level_tokens_keep_their_leading_space_and_belong_to_the_word_after_it(tokenizer):
    tokens = encode_samples(tokenizer, [make_sample("She didn't go")], 512)
    assert tokenizer.convert_ids_to_tokens(tokens.input_ids.tolist()) == ["She", "Ġdidn", "'t", "Ġgo"]
    assert tokens.offsets.tolist() == [[0, 3], [3, 8], [8, 10], [10, 13]]
    assert tokens.word_ids.tolist() == [0, 1, 1, 2]


def test_special_tokens_that_stand_in_a_text_are_text(tokenizer, name):
    tokens = encode_samples(tokenizer, [make_sample(LITERAL)], 512)
    inside = tokens.input_ids[1:-1] if SPECIAL[name] else tokens.input_ids
    assert not set(inside.tolist()) & set(tokenizer.all_special_ids)
    assert (tokens.word_ids == -1).sum() == SPECIAL[name] + sum(
        not LITERAL[start:stop].strip() for start, stop in tokens.offsets if stop > start
    )
    assert set(tokens.word_ids.tolist()) - {-1} == set(range(len(LITERAL.split())))


def test_the_models_own_special_tokens_surround_a_text_and_belong_to_no_word(tokenizer, name):
    tokens = encode_samples(tokenizer, [make_sample("go")], 512)
    special = [position for position, token in enumerate(tokens.input_ids) if token in tokenizer.all_special_ids]
    assert len(special) == SPECIAL[name] == tokenizer.num_special_tokens_to_add()
    for position in special:
        assert tokens.word_ids[position] == -1
        assert tokens.offsets[position].tolist() == [0, 0]


@pytest.mark.parametrize("spare", [1, 2, 5])
def test_truncation_is_on_the_right_counted_and_exact_special_tokens_included(tokenizer, name, spare):
    long, short = make_sample("one two three four five six seven eight"), make_sample("a")
    max_length = SPECIAL[name] + spare
    whole = encode_samples(tokenizer, [long], 512)
    tokens = encode_samples(tokenizer, [long, short, long], max_length)
    assert tokens.lengths.tolist() == [max_length, SPECIAL[name] + 1, max_length]
    assert tokens.num_truncated == 2
    front = SPECIAL[name] // 2
    assert tokens.input_ids[front : front + spare].tolist() == whole.input_ids[front : front + spare].tolist()
    assert tokens.input_ids[max_length - 1] == (whole.input_ids[-1] if front else whole.input_ids[spare - 1])
    lost = 8 - len(set(tokens.word_ids[:max_length].tolist()) - {-1})
    assert tokens.num_words_without_token == 2 * lost > 0


def test_a_text_of_exactly_the_maximum_length_is_whole(tokenizer):
    sample = make_sample("one two three four")
    whole = encode_samples(tokenizer, [sample], 512)
    tokens = encode_samples(tokenizer, [sample], int(whole.lengths[0]))
    assert (tokens.num_truncated, tokens.input_ids.tolist()) == (0, whole.input_ids.tolist())


def test_a_maximum_length_without_room_for_text_is_refused_with_the_least_that_works(tokenizer, name):
    with pytest.raises(InvalidRecipeError, match=f"{SPECIAL[name]} special tokens; give at least {SPECIAL[name] + 1}"):
        encode_samples(tokenizer, [make_sample("a")], SPECIAL[name])


@pytest.mark.parametrize("name", ["minilm-l6"], indirect=True)
def test_padding_and_truncation_of_the_tokenizers_own_file_are_off(tokenizer):
    own = json.loads((Path(tokenizer.name_or_path) / "tokenizer.json").read_bytes())
    texts = [make_sample("word " * 300), make_sample("go")]
    tokens = encode_samples(tokenizer, texts, 512)
    assert own["truncation"]["max_length"] == own["padding"]["strategy"]["Fixed"] == 128
    assert tokens.lengths.tolist() == [302, 3]
    assert tokens.num_truncated == 0
    assert encode_samples(tokenizer, texts, 512).lengths.tolist() == [302, 3]


def test_padding_truncation_side_and_stride_of_a_tokenizers_file_do_not_matter(tiny_bert, tmp_path):
    sample = make_sample("She didn't say who'd borrowed the ladder")
    expected = encode_samples(load_tokenizer(tiny_bert, "tiny"), [sample, make_sample("a")], 9)
    for file in tiny_bert.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Left", "max_length": 4, "strategy": "LongestFirst", "stride": 1}
    content["padding"] = {
        **{"strategy": {"Fixed": 16}, "direction": "Left", "pad_to_multiple_of": 8},
        **{"pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokens = encode_samples(load_tokenizer(tmp_path, "own"), [sample, make_sample("a")], 9)
    assert tokens.lengths.tolist() == expected.lengths.tolist() == [9, 3]
    assert tokens.input_ids.tolist() == expected.input_ids.tolist()


def test_the_longest_text_a_tokenizer_names_does_not_truncate(tiny_bert, tmp_path):
    for file in tiny_bert.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    settings_file = tmp_path / "tokenizer_config.json"
    settings_file.write_text(json.dumps(json.loads(settings_file.read_text()) | {"model_max_length": 5}))
    tokens = encode_samples(load_tokenizer(tmp_path, "own"), [make_sample("one two three four")], 60)
    assert (tokens.num_truncated, tokens.lengths[0] > 5) == (0, True)


def test_a_text_without_any_token_is_refused_naming_the_sample(tiny_llama, tmp_path):
    tokenizer = load_tokenizer(tiny_llama, "tiny-llama")
    samples = [make_sample("go"), replace(make_sample("a"), text="", words=(), word_spans=(), sample_id="feed")]
    with pytest.raises(UnsupportedModelError, match="no token of sample feed"):
        encode_samples(tokenizer, samples, 60)


@settings(deadline=None, max_examples=60)
@given(texts=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=25), min_size=1, max_size=5))
def test_texts_together_have_the_tokens_they_have_alone(tiny_tokenizer, texts):
    samples = [make_sample(text) for text in texts]
    together = encode_samples(tiny_tokenizer, samples, 30)
    alone = [encode_samples(tiny_tokenizer, [sample], 30) for sample in samples]
    for field in ("input_ids", "word_ids", "offsets", "lengths"):
        np.testing.assert_array_equal(getattr(together, field), np.concatenate([getattr(one, field) for one in alone]))
    assert together.num_truncated == sum(one.num_truncated for one in alone)
    assert together.num_words_without_token == sum(one.num_words_without_token for one in alone)
    assert together.starts.tolist() == [sum(together.lengths[:index]) for index in range(len(texts))]


def test_texts_are_encoded_in_windows_that_do_not_show(tiny_tokenizer, monkeypatch):
    samples = [make_sample(f"text number {number}") for number in range(7)]
    whole = encode_samples(tiny_tokenizer, samples, 60)
    monkeypatch.setattr(encode, "_TEXTS_AT_ONCE", 3)
    reports = []
    windowed = encode_samples(tiny_tokenizer, samples, 60, lambda done, total: reports.append((done, total)))
    assert windowed.input_ids.tolist() == whole.input_ids.tolist()
    assert reports == [(3, 7), (6, 7), (7, 7)]


def test_no_samples_give_an_empty_table(tiny_tokenizer):
    tokens = encode_samples(tiny_tokenizer, [], 60)
    assert (tokens.input_ids.shape, tokens.offsets.shape, tokens.lengths.shape) == ((0,), (0, 2), (0,))


def test_the_pad_id_is_the_tokenizers_or_else_zero(tiny_bert):
    tiny_tokenizer = load_tokenizer(tiny_bert, "tiny-bert")
    tiny_tokenizer.pad_token = "</s>"
    assert encode_samples(tiny_tokenizer, [make_sample("a")], 60).pad_token_id == 2
    tiny_tokenizer.pad_token = None
    assert encode_samples(tiny_tokenizer, [make_sample("a")], 60).pad_token_id == 0


def test_words_that_share_a_span_share_the_first_ones_tokens(tiny_tokenizer):
    sample = Sample(text="du pain", words=("de", "le", "pain"), word_spans=((0, 2), (0, 2), (3, 7)))
    tokens = encode_samples(tiny_tokenizer, [sample], 60)
    assert set(tokens.word_ids.tolist()) == {-1, 0, 2}
    assert tokens.num_words_without_token == 1


@pytest.mark.parametrize("content", ["no JSON", "{}", '{"model": 3}'])
def test_a_tokenizer_that_does_not_load_is_refused_by_name(tmp_path, content):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UnsupportedModelError, match="own-model: its tokenizer does not load"):
        load_tokenizer(tmp_path, "own-model")


WORD_LEVEL = (
    '{"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"go": 0}, "unk_token": "go"}}'
)


@pytest.mark.parametrize(
    ("architecture", "files"),
    [
        ("bert", {"vocab.json": '{"<unk>": 0, "go": 1}', "merges.txt": "#version: 0.2"}),
        ("roberta", {"vocab.txt": "go"}),
        ("bert", {"tokenizer.json": WORD_LEVEL}),
    ],
)
def test_a_vocabulary_that_its_tokenizer_does_not_read_is_refused(tmp_path, architecture, files):
    for file, content in {"config.json": json.dumps({"model_type": architecture}), **files}.items():
        (tmp_path / file).write_text(content)
    with pytest.raises(UnsupportedModelError):  # noqa: PT012 - which of the three notices differs
        tokenizer = load_tokenizer(tmp_path, "own-model")
        tokens = encode_samples(tokenizer, [make_sample("We left early.")], 9)
        check_vocabulary(tokenizer, tokens, "own-model")


def test_a_vocabulary_of_another_language_than_english_is_no_fault(tmp_path):
    vocabulary = '{"[UNK]": 0, "acg": 1, "tta": 2}'
    model = f'{{"type": "WordLevel", "vocab": {vocabulary}, "unk_token": "[UNK]"}}'
    splitter = '{"type": "Whitespace"}'
    (tmp_path / "tokenizer.json").write_text(
        f'{{"version": "1.0", "added_tokens": [], "pre_tokenizer": {splitter}, "model": {model}}}'
    )
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    tokenizer = load_tokenizer(tmp_path, "own-model")
    tokens = encode_samples(tokenizer, [make_sample("acg tta acg")], 9)
    check_vocabulary(tokenizer, tokens, "own-model")
    assert tokens.input_ids.tolist() == [1, 2, 1]


def test_a_tokenizer_without_character_offsets_is_refused(tmp_path):
    files = {
        "config.json": '{"model_type": "bert"}',
        "tokenizer_config.json": '{"tokenizer_class": "CTRLTokenizer"}',
        "vocab.json": '{"<unk>": 0, "a</w>": 1}',
        "merges.txt": "#version: 0.2",
    }
    for file, content in files.items():
        (tmp_path / file).write_text(content)
    with pytest.raises(
        UnsupportedModelError, match=r"own-model: CTRLTokenizer is not a fast tokenizer.*tokenizer\.json"
    ):
        load_tokenizer(tmp_path, "own-model")
