"""A recipe names one piece of work: equal work has equal fingerprints, bad settings are refused by name."""

import hashlib
import json
import subprocess
import sys
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage_schema.errors import InvalidRecipeError, NewerFormatError
from storage_schema.recipe import BASELINES, RECIPE_SCHEMA, VARIANTS, Recipe, encode_canonical, parse_maps, sort_maps

LITERAL = Recipe(
    model="org/name",
    model_revision="commit:" + "a" * 40,
    tokenizer_sha256="b" * 64,
    corpus="lines",
    split="all",
    corpus_sha256="c" * 64,
    max_length=64,
    maps=(1, 2, "rollout"),
)
CONTROL = replace(LITERAL, variant="random", seed=0)
OTHER_VALUES = {
    "model": "org/other",
    "model_revision": "commit:" + "d" * 40,
    "tokenizer_sha256": "d" * 64,
    "special_tokens": "none",
    "trust_remote_code": True,
    "corpus": "other",
    "split": "dev",
    "corpus_sha256": "d" * 64,
    "text_unit": "words:50",
    "text_form": "words",
    "limit": 5,
    "max_length": 65,
    "maps": (1, 2),
    "variant": "half-random",
    "seed": 1,
    "compute_dtype": "bfloat16",
    "store_dtype": "float32",
    "partition_samples": 1023,
    "schema": 0,
}

map_lists = st.lists(st.one_of(st.integers(1, 60), st.sampled_from(BASELINES)), min_size=1, max_size=8)


def test_the_fingerprint_of_a_literal_recipe_never_changes():
    assert LITERAL.fingerprint == "81fc9a82d13bc5120781370f0cfb9f7b518872779d839d66dd25909784c5122b"


def test_the_fingerprint_is_the_sha256_of_canonical_json():
    text = json.dumps(LITERAL.to_json(), sort_keys=True, separators=(",", ":"))
    assert LITERAL.fingerprint == hashlib.sha256(text.encode("ascii")).hexdigest()


@pytest.mark.parametrize("name", [field.name for field in fields(Recipe)])
def test_every_field_decides_the_fingerprint(name):
    changed = replace(CONTROL, **{name: OTHER_VALUES[name]})
    assert changed.fingerprint != CONTROL.fingerprint


def test_recipes_that_differ_in_one_field_have_distinct_fingerprints():
    changed = {replace(CONTROL, **{name: value}).fingerprint for name, value in OTHER_VALUES.items()}
    assert len(changed) == len(OTHER_VALUES)


@given(map_lists, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=50)
def test_order_and_repeats_of_maps_decide_nothing(maps, random):
    shuffled = [*maps, *maps]
    random.shuffle(shuffled)
    first, second = replace(LITERAL, maps=tuple(maps)), replace(LITERAL, maps=tuple(shuffled))
    assert first == second
    assert first.fingerprint == second.fingerprint


@given(st.permutations(list(LITERAL.to_json())))
@settings(deadline=None, max_examples=20)
def test_the_order_of_json_keys_decides_nothing(keys):
    values = LITERAL.to_json()
    again = Recipe.from_json({key: values[key] for key in keys})
    assert again.fingerprint == LITERAL.fingerprint


@given(
    maps=map_lists,
    limit=st.none() | st.integers(1, 10**9),
    max_length=st.integers(1, 10**6),
    text_unit=st.text(max_size=12),
    store_dtype=st.sampled_from(["float16", "float32"]),
    control=st.none() | st.tuples(st.sampled_from(VARIANTS), st.integers(0, 2**32 - 1)),
)
@settings(deadline=None, max_examples=50)
def test_a_recipe_comes_back_from_its_json_text(control, **changes):
    variant, seed = control or (None, None)
    recipe = replace(LITERAL, **{**changes, "maps": tuple(changes["maps"]), "variant": variant, "seed": seed})
    again = Recipe.from_json(json.loads(json.dumps(recipe.to_json())))
    assert again == recipe
    assert again.fingerprint == recipe.fingerprint


def test_maps_are_sorted_orders_first_and_unique():
    assert sort_maps(["rollout", 10, 2, "rollout", 2]) == (2, 10, "rollout")
    assert parse_maps(" 3, 1,rollout,1 ,") == (1, 3, "rollout")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "order 0 cannot be stored"),
        ("-1", "order -1 cannot be stored"),
        ("1,roll", "unknown map 'roll'.*rollout"),
        ("1.5", "unknown map '1.5'"),
        ("1,١", "unknown map"),
        ("", "no map requested"),
        (" , ", "no map requested"),
    ],
)
def test_map_lists_that_name_no_map_are_refused(text, message):
    with pytest.raises(InvalidRecipeError, match=message):
        parse_maps(text)


@pytest.mark.parametrize("maps", ["(1, 2.0)", "(1, None)", "(True,)", "(2, b'rollout')", "(Fraction(2), 1)"])
def test_a_map_that_is_neither_an_order_nor_a_name_is_refused_not_dropped(maps):
    # In a process of its own: the suite's type checks would see the wrong type first.
    code = (
        "from fractions import Fraction\nfrom storage_schema.recipe import check_maps\n"
        "from storage_schema.errors import InvalidRecipeError\n"
        f"try: print(check_maps({maps}))\nexcept InvalidRecipeError: print('refused')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "refused"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"maps": ()}, "no map requested"),
        ({"maps": (0, 1)}, "order 0 cannot be stored"),
        ({"maps": (-3,)}, "order -3 cannot be stored"),
        ({"maps": ("altis",)}, "unknown map 'altis'"),
        ({"compute_dtype": "float64"}, "compute_dtype is 'float64'; expected one of float32, bfloat16, float16"),
        ({"store_dtype": "bfloat16"}, "store_dtype is 'bfloat16'; expected one of float16, float32"),
        ({"limit": 0}, "limit is 0; expected 1 or more"),
        ({"limit": -1}, "limit is -1; expected 1 or more"),
        ({"max_length": 0}, "max_length is 0; expected 1 or more"),
        ({"partition_samples": 0}, "partition_samples is 0; expected 1 or more"),
        ({"variant": "shuffled", "seed": 0}, "variant is 'shuffled' .* random, half-random, shuffled-layers"),
        ({"variant": "random"}, "the seed of variant random is None"),
        ({"variant": "random", "seed": -1}, "the seed of variant random is -1; expected an integer from 0"),
        ({"variant": "random", "seed": 2**32}, "the seed of variant random is 4294967296"),
        ({"seed": 0}, "variant is None with seed 0"),
    ],
)
def test_settings_out_of_range_are_refused_with_value_and_rule(changes, message):
    with pytest.raises(InvalidRecipeError, match=message):
        replace(LITERAL, **changes)


def test_an_unknown_key_is_refused_by_name():
    with pytest.raises(InvalidRecipeError, match="'temperature'"):
        Recipe.from_json({**LITERAL.to_json(), "temperature": 1})


@pytest.mark.parametrize("key", ["model", "maps", "corpus_sha256", "max_length"])
def test_a_missing_key_is_refused_by_name(key):
    values = LITERAL.to_json()
    del values[key]
    with pytest.raises(InvalidRecipeError, match=key):
        Recipe.from_json(values)


def test_a_newer_schema_is_refused_before_its_keys_are_looked_at():
    values = {**LITERAL.to_json(), "schema": RECIPE_SCHEMA + 1, "new_key": 1}
    with pytest.raises(NewerFormatError, match=f"schema {RECIPE_SCHEMA + 1}.*up to {RECIPE_SCHEMA}.*upgrade"):
        Recipe.from_json(values)


def test_canonical_json_is_ascii_without_spaces_and_refuses_nan():
    assert encode_canonical({"b": "é", "a": [1, None]}) == b'{"a":[1,null],"b":"\\u00e9"}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_canonical({"a": float("nan")})
