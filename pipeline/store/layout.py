"""Where everything lies in a store, and how one is opened.

ola-store.json                                    marker with the format number
_samples/<corpus>/<split>/<content hash>.parquet  samples with their annotation, once a corpus
_work/<fingerprint>/, _work/<fingerprint>.*       an unfinished version's journal and owner; gone when it is finished
<model>/<corpus>/<split>/vN.json                  manifest, whose presence is the version, or a tombstone
<model>/<corpus>/<split>/<fingerprint>/           the version's Zarr group, with a copy of the manifest
<model>/<corpus>/<split>/_tags/<tag>.json         a tag
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from pipeline.store.folder import open_folder
from pipeline.store.objects import Objects
from storage_schema.errors import NewerFormatError, StoreAccessError
from storage_schema.refs import Dataset

STORE_FORMAT = 1
_MARKER = "ola-store.json"
MANIFEST_COPY = "manifest.json"
"""Beside the arrays: what a lost or damaged manifest is restored from."""
_COLLAPSED_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


@dataclass(frozen=True)
class Store:
    """An opened store: its objects, and the keys of its layout."""

    objects: Objects

    def describe(self, key: str = "") -> str:
        """The full place of an object, or of the store, for messages."""
        return self.objects.describe(key)

    def dataset_key(self, dataset: Dataset) -> str:
        return str(dataset)

    def group_key(self, dataset: Dataset, fingerprint: str) -> str:
        return f"{dataset}/{fingerprint[:16]}"

    def samples_key(self, corpus: str, split: str, content_sha256: str) -> str:
        return f"_samples/{corpus}/{split}/{content_sha256[:16]}.parquet"

    def manifest_key(self, dataset: Dataset, number: int) -> str:
        return f"{dataset}/v{number}.json"

    def tag_key(self, dataset: Dataset, tag: str) -> str:
        return f"{dataset}/_tags/{tag}.json"

    def work_key(self, fingerprint: str) -> str:
        return f"_work/{fingerprint[:16]}"

    def has_work(self, fingerprint: str) -> bool:
        """Whether a journal or an owner of this recipe's work is there."""
        return any(name.startswith(fingerprint[:16]) for name in self.objects.list_names("_work"))

    def remove_journal(self, fingerprint: str) -> None:
        """Removes the journal of a published version, also one that a process killed right after publishing left."""
        self.objects.remove_tree(self.work_key(fingerprint))


def connect(store: str | Path) -> Objects:
    """The objects of the place that a path or `s3://bucket/prefix` names, whether or not it holds a store.

    Raises:
        StoreAccessError: it is a file, no path, or another URL.
    """
    if "://" in str(store):
        from pipeline.store.bucket import open_bucket

        return open_bucket(str(store))
    if _COLLAPSED_URL.match(str(store)):
        raise StoreAccessError(f"the store {store} is a URL that went through pathlib; pass it as a string, with '://'")
    return open_folder(store)


def open_store(store: str | Path) -> Store:
    """The store at a path, for reading.

    Raises:
        StoreAccessError: there is nothing, it is a file or a URL that names no bucket, or it holds no store.
        StoreUnavailableError: the bucket does not answer.
        NewerFormatError: a later release wrote it.
    """
    return _open(connect(store))


def _open(objects: Objects) -> Store:
    place = objects.describe()
    try:
        values = json.loads(objects.read(_MARKER))
        version = values["ola_store"]
        if type(version) is not int or version < 1:
            raise ValueError
    except FileNotFoundError:
        if _is_empty(objects):
            raise StoreAccessError(
                f"there is no store at {place}; `ola materialize --store {place}` makes one"
            ) from None
        raise StoreAccessError(f"{place} is no store: it has no {_MARKER}; name another place with --store") from None
    except (ValueError, KeyError, TypeError):
        raise StoreAccessError(
            f'{objects.describe(_MARKER)} is not a store\'s marker; restore it from a copy: {{"ola_store": 1}}'
        ) from None
    except OSError as error:
        raise StoreAccessError(f"the store {place} cannot be read: {error.strerror}") from None
    if version > STORE_FORMAT:
        raise NewerFormatError(
            f"the store {place} has format {version}, this release reads up to {STORE_FORMAT}; upgrade to use it"
        )
    return Store(objects)


def open_store_for_writing(store: str | Path) -> Store:
    """The store at a path, made there if nothing is there yet.

    Raises:
        StoreAccessError: the place cannot be written, is no place for a store, or holds something else.
        StoreUnavailableError: the bucket does not answer.
        NewerFormatError: a later release wrote it.
    """
    objects = connect(store)
    try:
        if _is_empty(objects):
            objects.put_if_absent(_MARKER, json.dumps({"ola_store": STORE_FORMAT}).encode() + b"\n")
    except OSError as error:
        raise StoreAccessError(
            f"the store {objects.describe()} cannot be written: {error.strerror or error}; "
            "choose another folder with --store"
        ) from None
    opened = _open(objects)
    objects.check_writable()
    return opened


def check_writable(store: str | Path) -> None:
    """Nothing, where `open_store_for_writing` would succeed; makes nothing.

    Raises:
        StoreAccessError, NewerFormatError: as `open_store_for_writing`.
    """
    objects = connect(store)
    if not _is_empty(objects):
        _open(objects)
    objects.check_writable()


def is_unclaimed(store: str | Path) -> bool:
    """Whether a store may be made there: nothing is there yet, or nothing but another process's beginning of one.

    Raises:
        StoreAccessError: the place cannot be looked into.
    """
    return _is_empty(connect(store))


def _is_empty(objects: Objects) -> bool:
    try:
        return not objects.list_names("")
    except OSError as error:
        raise StoreAccessError(
            f"the store {objects.describe()} cannot be read: {error.strerror}; choose another"
        ) from None
