"""What a store holds."""

import os
from dataclasses import dataclass
from pathlib import Path

from pipeline.store.layout import is_unclaimed, open_store
from pipeline.store.versions import Version, iter_versions, list_tags
from storage_schema.errors import OlaError


@dataclass(frozen=True)
class DatasetEntry:
    """One finished version."""

    ref: str
    """Always `...@vN`."""
    fingerprint: str
    samples: int
    tokens: int
    maps: tuple[int | str, ...]
    bytes: int
    """Of the version's group; sample tables are shared and not counted."""
    tags: tuple[str, ...]


def choose_store(store: str | Path | None = None) -> str:
    """The store that is meant: the one given, else `OLA_STORE`, else `data/store`."""
    return str(store or os.environ.get("OLA_STORE") or "data/store")


def list_datasets(store: str | Path | None = None) -> list[DatasetEntry]:
    """Every finished version of a store, by dataset and number; empty where there is no store yet.

    Raises:
        StoreAccessError: the path is a file, a URL that names no bucket, or something that is no store.
        NewerFormatError: a later release wrote the store or a manifest.
        CorruptedObjectError: a manifest or a tag is not what was written.
        InvalidNameError: a folder that holds a manifest has a name that may not stand in a ref.
    """
    entries, damage = survey_datasets(store)
    if damage:
        raise damage[0]
    return entries


def survey_datasets(store: str | Path | None = None) -> tuple[list[DatasetEntry], list[OlaError]]:
    """What `list_datasets` gives, with the errors of single versions and tags beside it instead of in its place."""
    chosen = choose_store(store)
    if is_unclaimed(chosen):
        return [], []
    opened = open_store(chosen)
    entries: list[DatasetEntry] = []
    damage: list[OlaError] = []
    for read_version in iter_versions(opened):
        try:
            version = read_version()
        except OlaError as error:
            damage.append(error)
            continue
        if version is None:
            continue
        tags: list[str] = []
        try:
            tags = list_tags(opened, version)
        except OlaError as error:
            damage.append(error)
        entries.append(_describe(version, tags))
    return entries, list({str(error): error for error in damage}.values())


def _describe(version: Version, tags: list[str]) -> DatasetEntry:
    return DatasetEntry(
        ref=str(version.ref),
        fingerprint=version.manifest.recipe.fingerprint,
        samples=version.manifest.counts.samples,
        tokens=version.manifest.counts.tokens,
        maps=version.manifest.recipe.maps,
        bytes=version.manifest.num_bytes,
        tags=tuple(tags),
    )
