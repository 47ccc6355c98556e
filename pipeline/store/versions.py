"""Versions of a dataset: listing, resolving refs, publishing and tagging."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipeline.store.folder import StoreFolder, put_if_absent, replace_object
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


def iter_versions(store: StoreFolder) -> Iterator[Callable[[], Version]]:
    """A reader of each manifest in the store, by dataset and number; a reader raises what is wrong with its own."""
    for folder in sorted({path.parent for path in store.path.glob("[!._]*/[!._]*/[!._]*/v*.json")}):
        for number, path in sorted(_iter_numbered(folder)):
            yield partial(_read_in_place, store, number, path)


def _read_in_place(store: StoreFolder, number: int, path: Path) -> Version:
    return _read_version(Dataset(*path.parent.relative_to(store.path).parts), number, path)


def list_versions(store: StoreFolder, dataset: Dataset) -> list[Version]:
    """The finished versions of a dataset, oldest first.

    Raises:
        CorruptedObjectError: a manifest is not what was written.
        NewerFormatError: a later release wrote one.
    """
    return [_read_version(dataset, number, path) for number, path in sorted(_iter_manifests(store, dataset))]


def _read_version(dataset: Dataset, number: int, path: Path) -> Version:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CorruptedObjectError(f"{path} cannot be read: {error.strerror}; restore it from a copy") from None
    manifest = Manifest.decode(data, str(path))
    if manifest.dataset != dataset:
        raise CorruptedObjectError(f"{path} is the manifest of {manifest.dataset}, not of {dataset}; put it back there")
    return Version(number, manifest)


def _iter_manifests(store: StoreFolder, dataset: Dataset) -> Iterator[tuple[int, Path]]:
    return _iter_numbered(store.dataset_path(dataset))


def _iter_numbered(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.glob("v*.json"):
        if match := _MANIFEST_NAME.fullmatch(path.name):
            yield int(match[1]), path


def find_version(store: StoreFolder, dataset: Dataset, recipe: Recipe) -> Version | None:
    """The finished version of exactly this recipe, if there is one."""
    fingerprint = recipe.fingerprint
    return next((v for v in list_versions(store, dataset) if v.manifest.recipe.fingerprint == fingerprint), None)


def resolve_ref(store: StoreFolder, text: str) -> Version:
    """The finished version that a ref names.

    Raises:
        InvalidNameError: the text is no ref.
        DatasetNotFoundError: the store has no such dataset or version; lists what there is.
    """
    ref = parse_ref(text)
    paths = dict(sorted(_iter_manifests(store, ref.dataset)))
    if not paths:
        known = ", ".join(_list_names(store)) or "none"
        raise DatasetNotFoundError(f"the store {store.path} has no dataset {ref.dataset}; it has: {known}")
    number = max(paths) if ref.version == "latest" else ref.number
    if number in paths:
        return _read_version(ref.dataset, number, paths[number])
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


def _list_names(store: StoreFolder) -> list[str]:
    folders = {path.parent for path in store.path.glob("[!._]*/[!._]*/[!._]*/v*.json")}
    return sorted(folder.relative_to(store.path).as_posix() for folder in folders)


def _tag_path(store: StoreFolder, dataset: Dataset, tag: str) -> Path:
    return store.dataset_path(dataset) / "_tags" / f"{tag}.json"


def _read_tag(store: StoreFolder, ref: Ref) -> str:
    path = _tag_path(store, ref.dataset, ref.version)
    try:
        fingerprint = json.loads(path.read_bytes())["fingerprint"]
        if not re.fullmatch("[0-9a-f]{64}", fingerprint):
            raise ValueError
        return str(fingerprint)
    except FileNotFoundError:
        tags = ", ".join(sorted(other.stem for other in path.parent.glob("*.json"))) or "none"
        raise DatasetNotFoundError(f"dataset {ref.dataset} has no tag {ref.version!r}; tags: {tags}") from None
    except (ValueError, KeyError, TypeError, OSError):
        raise CorruptedObjectError(f"{path} is not a tag; set it again with `ola tag`") from None


def list_tags(store: StoreFolder, version: Version) -> list[str]:
    """The tags of a version, sorted."""
    dataset = version.manifest.dataset
    folder = _tag_path(store, dataset, "any").parent
    return sorted(
        path.stem
        for path in folder.glob("*.json")
        if _read_tag(store, Ref(dataset, path.stem)) == version.manifest.recipe.fingerprint
    )


def tag_version(store: StoreFolder, version: Version, tag: str) -> None:
    """Lets a tag name this version; a tag that named another one moves.

    Raises:
        InvalidNameError: the tag could be mistaken for another kind of version.
    """
    check_tag(tag)
    record = {"fingerprint": version.manifest.recipe.fingerprint}
    replace_object(_tag_path(store, version.manifest.dataset, tag), json.dumps(record).encode() + b"\n")


def publish_version(store: StoreFolder, manifest: Manifest) -> Version:
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
        if put_if_absent(store.dataset_path(manifest.dataset) / f"v{number}.json", data):
            return Version(number, manifest)
