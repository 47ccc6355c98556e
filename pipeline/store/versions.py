"""Versions of a dataset: listing, resolving refs, publishing and tagging."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from pipeline.store.layout import Store
from storage_schema.errors import CorruptedObjectError, DatasetNotFoundError
from storage_schema.manifest import Manifest
from storage_schema.recipe import Recipe
from storage_schema.refs import Dataset, Ref, check_tag, parse_ref

_MANIFEST_NAME = re.compile(r"v([1-9][0-9]*)\.json", re.ASCII)


@dataclass(frozen=True)
class Version:
    """A finished version: its number and its record."""

    number: int
    manifest: Manifest

    @property
    def ref(self) -> Ref:
        """The ref that names it for good: `...@vN`."""
        return Ref(self.manifest.dataset, f"v{self.number}")


def iter_versions(store: Store) -> Iterator[Callable[[], Version]]:
    """A reader of each manifest in the store, by dataset and number; a reader raises what is wrong with its own."""
    for folder in _iter_dataset_folders(store):
        for number in _list_numbers(store, folder):
            yield partial(_read_in_place, store, folder, number)


def _iter_dataset_folders(store: Store) -> Iterator[str]:
    for model in _list_folders(store, ""):
        for corpus in _list_folders(store, model):
            yield from _list_folders(store, corpus)


def _list_folders(store: Store, prefix: str) -> list[str]:
    names = store.objects.list_names(prefix)
    return [f"{prefix}/{name[:-1]}".lstrip("/") for name in names if name.endswith("/") and name[0] not in "._"]


def _read_in_place(store: Store, folder: str, number: int) -> Version:
    return _read_version(store, Dataset(*folder.split("/")), number)


def list_versions(store: Store, dataset: Dataset) -> list[Version]:
    """The finished versions of a dataset, oldest first.

    Raises:
        CorruptedObjectError: a manifest is not what was written.
        NewerFormatError: a later release wrote one.
    """
    return [_read_version(store, dataset, number) for number in _list_numbers(store, store.dataset_key(dataset))]


def _read_version(store: Store, dataset: Dataset, number: int) -> Version:
    key = _manifest_key(store, dataset, number)
    place = store.describe(key)
    try:
        data = store.objects.read(key)
    except OSError as error:
        raise CorruptedObjectError(f"{place} cannot be read: {error.strerror}; restore it from a copy") from None
    manifest = Manifest.decode(data, place)
    if manifest.dataset != dataset:
        raise CorruptedObjectError(
            f"{place} is the manifest of {manifest.dataset}, not of {dataset}; put it back there"
        )
    return Version(number, manifest)


def _manifest_key(store: Store, dataset: Dataset, number: int) -> str:
    return f"{store.dataset_key(dataset)}/v{number}.json"


def _list_numbers(store: Store, folder: str) -> list[int]:
    matches = (_MANIFEST_NAME.fullmatch(name) for name in store.objects.list_names(folder))
    return sorted(int(match[1]) for match in matches if match)


def find_version(store: Store, dataset: Dataset, recipe: Recipe) -> Version | None:
    """The finished version of exactly this recipe, if there is one."""
    fingerprint = recipe.fingerprint
    return next((v for v in list_versions(store, dataset) if v.manifest.recipe.fingerprint == fingerprint), None)


def resolve_ref(store: Store, text: str) -> Version:
    """The finished version that a ref names.

    Raises:
        InvalidNameError: the text is no ref.
        DatasetNotFoundError: the store has no such dataset or version; lists what there is.
    """
    ref = parse_ref(text)
    numbers = _list_numbers(store, store.dataset_key(ref.dataset))
    if not numbers:
        known = ", ".join(folder for folder in _iter_dataset_folders(store) if _list_numbers(store, folder)) or "none"
        raise DatasetNotFoundError(f"the store {store.describe()} has no dataset {ref.dataset}; it has: {known}")
    number = numbers[-1] if ref.version == "latest" else ref.number
    if number in numbers:
        return _read_version(store, ref.dataset, number)
    versions = list_versions(store, ref.dataset)
    chosen: list[Version] = []
    if ref.number is None:
        wanted = ref.version if ref.is_fingerprint else _read_tag(store, ref)
        chosen = [version for version in versions if version.manifest.recipe.fingerprint.startswith(wanted)]
    if len(chosen) != 1:
        known = ", ".join(f"v{v.number} ({v.manifest.recipe.fingerprint[:12]})" for v in versions)
        problem = "has no version" if not chosen else "has several versions"
        raise DatasetNotFoundError(f"dataset {ref.dataset} {problem} {ref.version!r}; it has: {known}")
    return chosen[0]


def _tag_key(store: Store, dataset: Dataset, tag: str) -> str:
    return f"{store.dataset_key(dataset)}/_tags/{tag}.json"


def _list_tag_names(store: Store, dataset: Dataset) -> list[str]:
    names = store.objects.list_names(f"{store.dataset_key(dataset)}/_tags")
    return [name.removesuffix(".json") for name in names if name.endswith(".json")]


def _read_tag(store: Store, ref: Ref) -> str:
    key = _tag_key(store, ref.dataset, ref.version)
    try:
        fingerprint = json.loads(store.objects.read(key))["fingerprint"]
        if not re.fullmatch("[0-9a-f]{64}", fingerprint):
            raise ValueError
        return str(fingerprint)
    except FileNotFoundError:
        tags = ", ".join(_list_tag_names(store, ref.dataset)) or "none"
        raise DatasetNotFoundError(f"dataset {ref.dataset} has no tag {ref.version!r}; tags: {tags}") from None
    except (ValueError, KeyError, TypeError, OSError):
        raise CorruptedObjectError(f"{store.describe(key)} is not a tag; set it again with `ola tag`") from None


def list_tags(store: Store, version: Version) -> list[str]:
    """The tags of a version, sorted."""
    dataset = version.manifest.dataset
    return [
        tag
        for tag in _list_tag_names(store, dataset)
        if _read_tag(store, Ref(dataset, tag)) == version.manifest.recipe.fingerprint
    ]


def tag_version(store: Store, version: Version, tag: str) -> None:
    """Lets a tag name this version; a tag that named another one moves.

    Raises:
        InvalidNameError: the tag could be mistaken for another kind of version.
    """
    check_tag(tag)
    record = {"fingerprint": version.manifest.recipe.fingerprint}
    store.objects.replace(_tag_key(store, version.manifest.dataset, tag), json.dumps(record).encode() + b"\n")


def publish_version(store: Store, manifest: Manifest) -> Version:
    """The version that this manifest is from now on: numbered, visible and `latest` in one step.

    The step is a put-if-absent of `vN.json`. On a conflict the store is looked at again: where the same recipe has been
    published, that version is the answer, else the next number is tried.
    """
    data = manifest.encode()
    while True:
        # One look for both questions: whatever is published after it takes the next number, and so makes a conflict.
        versions = list_versions(store, manifest.dataset)
        published = [version for version in versions if version.manifest.recipe == manifest.recipe]
        if published:
            return published[0]
        number = versions[-1].number + 1 if versions else 1
        if store.objects.put_if_absent(_manifest_key(store, manifest.dataset, number), data):
            return Version(number, manifest)
