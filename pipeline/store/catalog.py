"""What a store holds."""

import os
from dataclasses import dataclass
from pathlib import Path

from pipeline.store.folder import open_store
from pipeline.store.versions import list_datasets as list_stored_datasets
from pipeline.store.versions import list_tags, list_versions
from storage_schema.paths import expand_home


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
        StoreAccessError: the path is a file, a URL, or a folder that is no store.
        NewerFormatError: a later release wrote the store or a manifest.
        CorruptedObjectError: a manifest is not what was written.
    """
    chosen = choose_store(store)
    if "://" not in chosen and not expand_home(chosen).exists():
        return []
    folder = open_store(chosen)
    return [
        DatasetEntry(
            ref=str(version.ref),
            fingerprint=version.manifest.recipe.fingerprint,
            samples=version.manifest.counts.samples,
            tokens=version.manifest.counts.tokens,
            maps=version.manifest.recipe.maps,
            bytes=version.manifest.num_bytes,
            tags=tuple(list_tags(folder, version)),
        )
        for dataset in list_stored_datasets(folder)
        for version in list_versions(folder, dataset)
    ]
