"""The manifest: the record of one finished version, written last, with the digest and size of every object.

A version that was removed leaves a tombstone in its manifest's place, so that its number is never given again.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from storage_schema.arrays import Packing
from storage_schema.errors import CorruptedObjectError, NewerFormatError
from storage_schema.recipe import Recipe, encode_canonical
from storage_schema.refs import Dataset

MANIFEST_FORMAT = 2
"""Format 1 does not say which version it is of."""
TOMBSTONE_FORMAT = 1


@dataclass(frozen=True)
class StoredObject:
    """One object's digest and size."""

    sha256: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What went in, and what did not."""

    samples: int
    tokens: int
    words: int
    cells: int
    """Cells of one map, over all samples."""
    partitions: int
    truncated_samples: int
    words_without_token: int
    skipped_lines: int
    """Blank lines of a text or jsonl file."""
    dropped_words: int
    """Words of incomplete last chunks under `words:N`."""


@dataclass(frozen=True, kw_only=True)
class MapStatistics:
    """A map's values over all stored cells of this split, in float64."""

    mean: float
    std: float
    min: float
    max: float


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A version's record. Deterministic: equal recipes in one environment give equal bytes.

    Times, host and library versions lie in `run.json`, in the version's folder.
    """

    dataset: Dataset
    recipe: Recipe
    folder: str
    """The version's Zarr group, relative to the dataset's folder."""
    packing: Packing
    num_layers: int
    pad_token_id: int
    """What readers pad `input_ids` with: the tokenizer's pad id, else 0."""
    samples_path: str
    """The sample table, relative to the store."""
    samples: StoredObject
    objects: dict[str, StoredObject]
    """Every object of the group, by its path in the version's folder."""
    counts: Counts
    statistics: dict[str, MapStatistics]
    """By array name."""
    model_licence: str
    corpus_licence: str
    number: int | None = None
    """N of `vN`; None before it is published, and in format 1."""

    def __post_init__(self) -> None:
        if self.folder != self.recipe.fingerprint[:16]:
            raise CorruptedObjectError(f"its folder is {self.folder!r}, expected {self.recipe.fingerprint[:16]!r}")
        for path in (self.samples_path, *self.objects):
            if path.startswith("/") or ".." in path.split("/"):
                raise CorruptedObjectError(f"its path {path!r} leads out of the store")

    @property
    def num_bytes(self) -> int:
        """Bytes of the group; the sample table, which other versions share, is not counted."""
        return sum(stored.num_bytes for stored in self.objects.values())

    def to_json(self) -> dict[str, Any]:
        """The manifest as JSON values, with its format number, its recipe's fingerprint and its own digest."""
        values = {
            "ola_manifest": 1 if self.number is None else MANIFEST_FORMAT,
            "fingerprint": self.recipe.fingerprint,
            **asdict(self),
            "dataset": str(self.dataset),
            "recipe": self.recipe.to_json(),
        }
        if self.number is None:
            del values["number"]
        return {**values, "manifest_sha256": compute_manifest_digest(values)}

    def encode(self) -> bytes:
        """The manifest as it is stored: indented JSON with sorted keys."""
        return (json.dumps(self.to_json(), indent=1, sort_keys=True, allow_nan=False) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes, where: str) -> "Manifest":
        """The manifest back from `encode`.

        Raises:
            NewerFormatError: a later release wrote it.
            CorruptedObjectError: it is no manifest, or not the one that was written: its digest is another.
        """
        try:
            values = json.loads(data)
            digest = values.pop("manifest_sha256", None)
            found = compute_manifest_digest(values)
            version = values.pop("ola_manifest")
            if version > MANIFEST_FORMAT:
                raise NewerFormatError(
                    f"manifest format {version}, this release reads up to {MANIFEST_FORMAT}; upgrade"
                )
            fingerprint, recipe = values.pop("fingerprint"), Recipe.from_json(values.pop("recipe"))
            if fingerprint != recipe.fingerprint:
                raise CorruptedObjectError(
                    f"its recipe's fingerprint is {recipe.fingerprint[:16]}..., it says {fingerprint}"
                )
            if digest != found:
                raise CorruptedObjectError(f"its SHA-256 is {found[:16]}..., it says {str(digest)[:16]}...")
            if (version > 1) != (type(values.get("number")) is int):
                raise CorruptedObjectError(f"format {version}, with the number {values.get('number')}")
            return cls(
                dataset=Dataset(*values.pop("dataset").split("/")),
                recipe=recipe,
                samples=StoredObject(**values.pop("samples")),
                objects={path: StoredObject(**stored) for path, stored in values.pop("objects").items()},
                counts=Counts(**values.pop("counts")),
                statistics={name: MapStatistics(**row) for name, row in values.pop("statistics").items()},
                **values,
            )
        except NewerFormatError as error:
            raise NewerFormatError(f"{where}: {error}") from None
        except Exception as error:  # a damaged file can hold anything
            raise CorruptedObjectError(
                f"{where}: not a manifest, or not the one that was written ({type(error).__name__}: {error}); "
                "`ola repair <dataset>@vN` restores it from the copy beside its arrays"
            ) from None


def compute_manifest_digest(values: dict[str, Any]) -> str:
    """SHA-256 (64 hex digits) of the canonical JSON of a manifest's values, apart from this digest itself."""
    return hashlib.sha256(encode_canonical(values)).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Tombstone:
    """What is left of a removed version: its number stays taken, and its recipe can be run again."""

    dataset: Dataset
    number: int
    recipe: Recipe

    def encode(self) -> bytes:
        """The tombstone as it is stored: indented JSON with sorted keys."""
        values = {
            "ola_removed": TOMBSTONE_FORMAT,
            "dataset": str(self.dataset),
            "number": self.number,
            "fingerprint": self.recipe.fingerprint,
            "recipe": self.recipe.to_json(),
        }
        return (json.dumps(values, indent=1, sort_keys=True) + "\n").encode()


def decode_record(data: bytes, where: str) -> Manifest | Tombstone:
    """What lies in a manifest's place: the manifest, or the tombstone of a removed version.

    Raises:
        NewerFormatError: a later release wrote it.
        CorruptedObjectError: it is neither.
    """
    try:
        values = json.loads(data)
        version = values["ola_removed"]
    except (ValueError, KeyError, TypeError):
        return Manifest.decode(data, where)
    if type(version) is not int or version > TOMBSTONE_FORMAT:
        raise NewerFormatError(f"{where}: tombstone format {version}, this release reads up to {TOMBSTONE_FORMAT}")
    try:
        dataset, recipe = Dataset(*values["dataset"].split("/")), Recipe.from_json(values["recipe"])
        if values["fingerprint"] != recipe.fingerprint:
            raise ValueError(f"its recipe's fingerprint is {recipe.fingerprint[:16]}..., it says another")
        if type(values["number"]) is not int:
            raise ValueError(f"its number is {values['number']!r}")
        return Tombstone(dataset=dataset, number=values["number"], recipe=recipe)
    except Exception as error:  # a damaged file can hold anything
        raise CorruptedObjectError(f"{where}: not the record of a removed version ({error})") from None
