"""The recipe: everything that decides what is computed, and its fingerprint; standard library only."""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

from storage_schema.errors import InvalidRecipeError, NewerFormatError

RECIPE_SCHEMA = 1

MapName: TypeAlias = int | str
"""A map's name: an order (1, 2, ...) or a baseline."""

CONTRIBUTION_BASELINES = ("alti", "irnl")
"""Baselines that need more of a layer than its head-mean attention: ALTI (Ferrando et al. 2022), IRNL (Kobayashi et al.
2021)."""

BASELINES = (*CONTRIBUTION_BASELINES, "rollout")
"""Named maps beside the orders; `rollout` (Abnar & Zuidema 2020) is stored divided by 2^N."""

VARIANTS = ("random", "half-random", "shuffled-layers")
"""Controls in place of the genuine weights (arXiv 2511.05064): all weights random, half of the layers', layers in
another order."""

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
STORE_DTYPES = ("float16", "float32")


def sort_maps(maps: Iterable[MapName]) -> tuple[MapName, ...]:
    """The maps without repeats: orders ascending, then names."""
    unique = set(maps)
    orders = sorted(name for name in unique if isinstance(name, int))
    return (*orders, *sorted(name for name in unique if isinstance(name, str)))


def parse_maps(text: str) -> tuple[MapName, ...]:
    """The maps named by a comma-separated list such as `1,2,rollout`, sorted.

    Raises:
        InvalidRecipeError: the list is empty, an order is below 1, or a name is no baseline.
    """
    names: list[MapName] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if re.fullmatch(r"[+-]?[0-9]{1,9}", part):
            names.append(int(part))
        else:
            names.append(part)
    return check_maps(names)


def check_maps(maps: Iterable[MapName]) -> tuple[MapName, ...]:
    """The maps, sorted, once each is an order of 1 or more or a baseline.

    Raises:
        InvalidRecipeError: as `parse_maps`.
    """
    names = tuple(maps)
    for name in names:
        if type(name) not in (int, str):
            raise InvalidRecipeError(f"{name!r} is no map; maps are orders 1, 2, ... and the baselines {BASELINES}")
    names = sort_maps(names)
    if not names:
        raise InvalidRecipeError(f"no map requested; name at least one order (1, 2, ...) or baseline {BASELINES}")
    for name in names:
        if type(name) is int and name < 1:
            raise InvalidRecipeError(f"order {name} cannot be stored: orders start at 1 (order 0 is the identity)")
        if isinstance(name, str) and name not in BASELINES:
            raise InvalidRecipeError(f"unknown map {name!r}; maps are orders 1, 2, ... and the baselines {BASELINES}")
    return names


def check_variant(variant: str | None, seed: int | None) -> None:
    """Passes if there is neither a variant nor a seed, or a known variant with a seed from 0 to 2^32 - 1.

    Raises:
        InvalidRecipeError: otherwise.
    """
    if variant is None and seed is None:
        return
    if variant not in VARIANTS:
        raise InvalidRecipeError(f"variant is {variant!r} with seed {seed}; expected one of {', '.join(VARIANTS)}")
    if type(seed) is not int or not 0 <= seed < 2**32:
        raise InvalidRecipeError(f"the seed of variant {variant} is {seed!r}; expected an integer from 0 to 2^32 - 1")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One complete description of what a version holds. Two equal recipes are the same work.

    Device, threads, library versions and the size of batches decide only the last bits; they are recorded beside the
    version, in `run.json`.
    """

    model: str
    """Registry name, hub id `org/name`, or a local directory's base name."""
    model_revision: str
    """`commit:` and the hub commit (40 hex digits), or `sha256:` and the hash of the weight files."""
    tokenizer_sha256: str
    """SHA-256 over the tokenizer's files."""
    special_tokens: str = "default"
    """Which special tokens surround a text: the tokenizer's own (`default`)."""
    trust_remote_code: bool = False
    """Whether the model's repository may run code of its own."""
    corpus: str
    split: str
    corpus_sha256: str
    """Content hash of the whole split, before `limit`."""
    text_unit: str = "sentence"
    """`sentence`, `document` or `words:N`."""
    text_form: str = "original"
    """`original` text, or `words` joined by single spaces."""
    limit: int | None = None
    """Only the first so many samples; None for all."""
    max_length: int
    """Longest token sequence, special tokens included; longer texts are truncated."""
    maps: tuple[MapName, ...]
    """Sorted, without repeats."""
    variant: str | None = None
    """A control in place of the genuine weights; None for those."""
    seed: int | None = None
    """The control's seed; None where there is no variant."""
    compute_dtype: str = "float32"
    """The weights' dtype; scores, means and orders are float32 in any case."""
    store_dtype: str = "float16"
    partition_samples: int = 1024
    """A partition closes at so many samples, or earlier at its number of cells."""
    schema: int = RECIPE_SCHEMA

    def __post_init__(self) -> None:
        object.__setattr__(self, "maps", check_maps(self.maps))
        for name, value, allowed in (
            ("compute_dtype", self.compute_dtype, COMPUTE_DTYPES),
            ("store_dtype", self.store_dtype, STORE_DTYPES),
        ):
            if value not in allowed:
                raise InvalidRecipeError(f"{name} is {value!r}; expected one of {', '.join(allowed)}")
        check_variant(self.variant, self.seed)
        for name, number in (
            ("max_length", self.max_length),
            ("partition_samples", self.partition_samples),
            ("limit", 1 if self.limit is None else self.limit),
        ):
            if number < 1:
                raise InvalidRecipeError(f"{name} is {number}; expected 1 or more")

    @property
    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) of the recipe's canonical JSON: sorted keys, no spaces, ASCII."""
        return hashlib.sha256(encode_canonical(self.to_json())).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The recipe as JSON values."""
        return {**asdict(self), "maps": list(self.maps)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Recipe":
        """The recipe back from `to_json`.

        Raises:
            NewerFormatError: its schema number is above this release's.
            InvalidRecipeError: a key is unknown or missing.
        """
        schema = values.get("schema")
        if not isinstance(schema, int) or schema > RECIPE_SCHEMA:
            raise NewerFormatError(f"recipe schema {schema}, this release reads up to {RECIPE_SCHEMA}; upgrade")
        known = {field.name for field in fields(cls)}
        if unknown := set(values) - known:
            raise InvalidRecipeError(f"unknown recipe keys {sorted(unknown)}")
        try:
            return cls(**{**values, "maps": tuple(values["maps"])})
        except (KeyError, TypeError) as error:
            raise InvalidRecipeError(f"incomplete recipe: {error}") from None


def encode_canonical(values: Any) -> bytes:
    """JSON with sorted keys, no spaces, ASCII only: equal values give equal bytes."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()
