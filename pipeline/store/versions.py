"""Versions of a dataset: listing, resolving refs, publishing, tagging and removing."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from pipeline.store.layout import MANIFEST_COPY, Store
from pipeline.store.objects import raise_unless_damage
from storage_schema.errors import CorruptedObjectError, DatasetNotFoundError, MissingObjectError, OlaError
from storage_schema.manifest import Manifest, Tombstone, decode_record
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


def iter_versions(store: Store) -> Iterator[Callable[[], Version | None]]:
    """A reader of each record in the store, by dataset and number: None where the version was removed.

    A reader raises what is wrong with its own.
    """
    for folder in iter_dataset_folders(store):
        for number in _list_numbers(store, folder):
            yield partial(_read_in_place, store, folder, number)


def iter_dataset_folders(store: Store) -> Iterator[str]:
    """The keys of all folders that may hold a dataset, sorted."""
    for model in _list_folders(store, ""):
        for corpus in _list_folders(store, model):
            yield from _list_folders(store, corpus)


def _list_folders(store: Store, prefix: str) -> list[str]:
    names = [name[:-1] for name in store.objects.list_names(prefix) if name.endswith("/") and name[0] not in "._"]
    return [f"{prefix}/{name}".lstrip("/") for name in sorted(names)]


def _read_in_place(store: Store, folder: str, number: int) -> Version | None:
    record = _read_record(store, Dataset(*folder.split("/")), number)
    return Version(number, record) if isinstance(record, Manifest) else None


def list_versions(store: Store, dataset: Dataset) -> list[Version]:
    """The finished versions of a dataset, oldest first.

    Raises:
        CorruptedObjectError: a manifest is not what was written.
        NewerFormatError: a later release wrote one.
    """
    records = _list_records(store, dataset)
    return [Version(number, record) for number, record in records if isinstance(record, Manifest)]


def _list_records(store: Store, dataset: Dataset) -> list[tuple[int, Manifest | Tombstone]]:
    numbers = _list_numbers(store, store.dataset_key(dataset))
    return [(number, _read_record(store, dataset, number)) for number in numbers]


def _read_record(store: Store, dataset: Dataset, number: int) -> Manifest | Tombstone:
    key = store.manifest_key(dataset, number)
    place = store.describe(key)
    try:
        data = store.objects.read(key)
    except OSError as error:
        raise_unless_damage(error)
        raise CorruptedObjectError(
            f"{place} cannot be read: {error.strerror}; `ola repair {dataset}@v{number}` restores it"
        ) from None
    record = decode_record(data, place)
    if record.dataset != dataset or record.number not in (number, None):
        raise CorruptedObjectError(
            f"{place} is the record of {record.dataset}@v{record.number}, not of {dataset}@v{number}; "
            f"`ola repair {dataset}@v{number}` restores the right one"
        )
    return record


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
    if ref.number is not None and ref.number not in numbers and find_manifest_copy(store, ref.dataset, ref.number):
        place = store.describe(store.manifest_key(ref.dataset, ref.number))
        raise MissingObjectError(f"{place} is missing, but not its arrays; `ola repair {ref}` restores it")
    if not numbers:
        known = ", ".join(folder for folder in iter_dataset_folders(store) if _list_numbers(store, folder)) or "none"
        raise DatasetNotFoundError(f"the store {store.describe()} has no dataset {ref.dataset}; it has: {known}")
    named = reversed(numbers) if ref.version == "latest" else [n for n in numbers if n == ref.number]
    for number in named:
        record = _read_record(store, ref.dataset, number)
        if isinstance(record, Manifest):
            return Version(number, record)
        if ref.number is not None:
            raise DatasetNotFoundError(
                f"{ref} was removed; the `ola materialize` that made it makes it again, under a new number "
                f"(fingerprint {record.recipe.fingerprint[:12]})"
            )
    versions = list_versions(store, ref.dataset)
    chosen: list[Version] = []
    if ref.number is None and ref.version != "latest":
        wanted = ref.version if ref.is_fingerprint else _read_tag(store, ref)
        chosen = [version for version in versions if version.manifest.recipe.fingerprint.startswith(wanted)]
    if len(chosen) != 1:
        known = ", ".join(f"v{v.number} ({v.manifest.recipe.fingerprint[:12]})" for v in versions) or "none"
        problem = "has no version" if not chosen else "has several versions"
        raise DatasetNotFoundError(f"dataset {ref.dataset} {problem} {ref.version!r}; it has: {known}")
    return chosen[0]


def _list_tag_names(store: Store, dataset: Dataset) -> list[str]:
    names = store.objects.list_names(f"{store.dataset_key(dataset)}/_tags")
    return [name.removesuffix(".json") for name in names if name.endswith(".json")]


def _read_tag(store: Store, ref: Ref) -> str:
    key = store.tag_key(ref.dataset, ref.version)
    try:
        fingerprint = json.loads(store.objects.read(key))["fingerprint"]
        if not re.fullmatch("[0-9a-f]{64}", fingerprint):
            raise ValueError
        return str(fingerprint)
    except FileNotFoundError:
        tags = ", ".join(_list_tag_names(store, ref.dataset)) or "none"
        raise DatasetNotFoundError(f"dataset {ref.dataset} has no tag {ref.version!r}; tags: {tags}") from None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise_unless_damage(error)
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
    store.objects.replace(store.tag_key(version.manifest.dataset, tag), json.dumps(record).encode() + b"\n")


def publish_version(store: Store, manifest: Manifest, above: int = 0) -> Version:
    """The version that this manifest is from now on: numbered, visible and `latest` in one step.

    The step is a put-if-absent of `vN.json`. On a conflict the store is looked at again: where the same recipe has been
    published, that version is the answer, else the next number is tried.

    Args:
        above: the number is higher than this one (`find_highest_claim`).
    """
    while True:
        # One look for both questions: whatever is published after it takes the next number, and so makes a conflict.
        records = _list_records(store, manifest.dataset)
        for number, record in records:
            if isinstance(record, Manifest) and record.recipe == manifest.recipe:
                return Version(number, record)
        number = max(above, records[-1][0] if records else 0) + 1
        numbered = replace(manifest, number=number)
        # First beside the arrays, so that no published manifest is ever the only one.
        store.objects.replace(_copy_key(store, manifest.dataset, manifest.folder), numbered.encode())
        if store.objects.put_if_absent(store.manifest_key(manifest.dataset, number), numbered.encode()):
            return Version(number, numbered)


def _copy_key(store: Store, dataset: Dataset, folder: str) -> str:
    return f"{store.dataset_key(dataset)}/{folder}/{MANIFEST_COPY}"


def find_manifest_copy(store: Store, dataset: Dataset, number: int) -> Manifest | None:
    """The manifest of that version as it lies beside its arrays; None where no intact one says that it is.

    An unfinished version's copy does not count: its number may have become another's.
    """
    found = [copy for copy in _iter_finished_copies(store, dataset) if copy.number == number]
    return found[0] if len(found) == 1 else None


def find_highest_claim(store: Store, dataset: Dataset) -> int:
    """The highest number that a finished version has by the copy beside its arrays, also where its manifest was lost;
    0 where there is none.
    """
    return max((copy.number or 0 for copy in _iter_finished_copies(store, dataset)), default=0)


def _iter_finished_copies(store: Store, dataset: Dataset) -> Iterator[Manifest]:
    for folder in list_groups(store, dataset):
        if not store.has_work(folder) and (copy := read_manifest_copy(store, dataset, folder)) is not None:
            yield copy


def list_groups(store: Store, dataset: Dataset) -> list[str]:
    """The folders of a dataset that are named like a version's group: 16 hex digits."""
    names = store.objects.list_names(store.dataset_key(dataset))
    return [name[:-1] for name in names if re.fullmatch("[0-9a-f]{16}/", name)]


def read_manifest_copy(store: Store, dataset: Dataset, folder: str) -> Manifest | None:
    """The manifest beside a group's arrays; None where there is none, or not the one that was written there."""
    key = _copy_key(store, dataset, folder)
    try:
        copy = Manifest.decode(store.objects.read(key), store.describe(key))
    except OSError as error:
        raise_unless_damage(error)
        return None
    except OlaError:
        return None
    return copy if (copy.dataset, copy.folder) == (dataset, folder) else None


def restore_manifest(store: Store, ref: Ref) -> bool:
    """Puts the copy beside a version's arrays in the place of its manifest, if that is missing or damaged.

    Returns:
        Whether it did; a ref that names no number, and a version that was removed, are left alone.

    Raises:
        CorruptedObjectError: the manifest is damaged, and there is no copy.
        NewerFormatError: a later release wrote it.
    """
    if ref.number is None:
        return False
    try:
        if ref.number in _list_numbers(store, store.dataset_key(ref.dataset)):
            _read_record(store, ref.dataset, ref.number)
            return False
        copy = find_manifest_copy(store, ref.dataset, ref.number)
    except CorruptedObjectError:
        copy = find_manifest_copy(store, ref.dataset, ref.number)
        if copy is None:
            raise
    if copy is None:
        return False
    store.objects.replace(store.manifest_key(ref.dataset, ref.number), copy.encode())
    return True


def list_dangling_tags(store: Store, dataset: Dataset) -> list[str]:
    """The tags that name a version which is not there."""
    known = {version.manifest.recipe.fingerprint for version in list_versions(store, dataset)}
    return [tag for tag in _list_tag_names(store, dataset) if _read_tag(store, Ref(dataset, tag)) not in known]


def remove_tag(store: Store, dataset: Dataset, tag: str) -> None:
    """Removes a tag, if it is there."""
    store.objects.remove(store.tag_key(dataset, tag))


def bury_version(store: Store, version: Version) -> None:
    """Puts a tombstone in the place of a version's manifest, in one step: no reader sees the version any more."""
    manifest = version.manifest
    tombstone = Tombstone(dataset=manifest.dataset, number=version.number, recipe=manifest.recipe)
    store.objects.replace(store.manifest_key(manifest.dataset, version.number), tombstone.encode())
