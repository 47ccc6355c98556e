"""Removing: one version on request, and whatever nothing refers to."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipeline.store.layout import Store
from pipeline.store.ownership import own_collection, own_work
from pipeline.store.versions import (
    Version,
    bury_version,
    iter_dataset_folders,
    iter_versions,
    list_dangling_tags,
    list_groups,
    list_tags,
    read_manifest_copy,
    remove_tag,
    resolve_ref,
)
from storage_schema.errors import InvalidNameError, MissingObjectError
from storage_schema.refs import Dataset

_WORK_NAME = re.compile(r"([0-9a-f]{16})(/|\.lock|\.lease)")


def remove_version(store: Store, version: Version, on_wait: Callable[[], None] = lambda: None) -> list[str]:
    """Removes a version with its arrays and tags, and returns the tags; its number is never given again.

    Readers lose sight of it in one step, before any byte goes. What a kill leaves, `collect_garbage` removes.

    Args:
        on_wait: called once if another process works on the same recipe.

    Raises:
        DatasetNotFoundError: another process removed it meanwhile.
        CorruptedObjectError: a tag of the dataset cannot be read, so that it is not known whose it is.
    """
    manifest = version.manifest
    recipe = manifest.recipe
    with own_work(store, recipe, on_wait) as owner:
        # Looked up again: while this process waited, another may have removed it, and a third made it anew.
        version = resolve_ref(store, str(version.ref))
        tags = list_tags(store, version)
        owner.check()
        bury_version(store, version)
        for tag in tags:
            remove_tag(store, manifest.dataset, tag)
        store.objects.remove_tree(store.group_key(manifest.dataset, recipe.fingerprint))
        store.remove_journal(recipe.fingerprint)
    return tags


@dataclass(frozen=True)
class Garbage:
    """Objects that nothing refers to: one, or all below a key that ends in `/`."""

    key: str
    what: str
    bytes: int


@dataclass(frozen=True)
class Survey:
    """What `collect_garbage` found."""

    garbage: list[Garbage]
    unfinished: list[str]
    """Keys of work that was left alone: a live process is on it, or a rerun goes on with it."""


def collect_garbage(store: Store, *, unfinished: bool = False, apply: bool = False) -> Survey:
    """What nothing in the store refers to; removed if `apply`.

    That is: arrays of no version, tags of no version, sample tables that no version uses (none while unfinished work
    is left, which may need them), and, with `apply`, half-written files of killed writers. Objects in other places
    than this project's are never touched.

    Args:
        unfinished: also work that no live process is on; without it a rerun finds what a killed one did.

    Raises:
        CorruptedObjectError, MissingObjectError: a manifest or a tag cannot be read or has gone, so that it is not
            known what it refers to; nothing is removed then.
    """
    if not apply:
        return _survey(store, unfinished)
    with own_collection(store) as owner:
        survey = _survey(store, unfinished)
        for garbage in survey.garbage:
            owner.check()
            if garbage.key.endswith("/"):
                store.objects.remove_tree(garbage.key[:-1])
            else:
                store.objects.remove(garbage.key)
        store.objects.sweep("", deep=True)
    return survey


def _survey(store: Store, unfinished: bool) -> Survey:
    # Work first and versions after it: work that ends in between has published its version by then.
    names = _list_work(store)
    work = {match[1] for match in names}
    if unfinished:
        work = {fingerprint for fingerprint in work if store.objects.is_owned(store.work_key(fingerprint))}
        names = _list_work(store)  # to look for an owner in a bucket takes a while, in which work may end
    versions = [version for read_version in iter_versions(store) if (version := read_version()) is not None]
    groups = {store.group_key(v.manifest.dataset, v.manifest.recipe.fingerprint) for v in versions}
    garbage = [
        _weigh(store, f"_work/{match[0]}", "journal or owner of unfinished work")
        for match in names
        if match[1] not in work
    ]
    for dataset in _iter_datasets(store):
        for folder in list_groups(store, dataset):
            key = store.group_key(dataset, folder)
            if key not in groups and folder not in work:
                _check_unclaimed(store, dataset, folder)
                garbage.append(_weigh(store, f"{key}/", "arrays of no version"))
        for tag in list_dangling_tags(store, dataset):
            garbage.append(_weigh(store, store.tag_key(dataset, tag), "tag of no version"))
    if not work:
        used = {version.manifest.samples_path for version in versions}
        tables = (f"_samples/{name}" for name in sorted(store.objects.list_sizes("_samples")))
        unused = [key for key in tables if key.endswith(".parquet") and key not in used]
        garbage += [_weigh(store, key, "sample table that no version uses") for key in unused]
    return Survey(garbage, sorted(store.work_key(fingerprint) for fingerprint in work))


def _list_work(store: Store) -> list[re.Match[str]]:
    return [match for name in store.objects.list_names("_work") if (match := _WORK_NAME.fullmatch(name))]


def _iter_datasets(store: Store) -> Iterator[Dataset]:
    for folder in iter_dataset_folders(store):
        try:
            yield Dataset(*folder.split("/"))
        except InvalidNameError:
            continue  # not made here


def _check_unclaimed(store: Store, dataset: Dataset, folder: str) -> None:
    copy = read_manifest_copy(store, dataset, folder)
    if copy is not None and f"v{copy.number}.json" not in store.objects.list_names(store.dataset_key(dataset)):
        place = store.describe(f"{store.dataset_key(dataset)}/v{copy.number}.json")
        raise MissingObjectError(
            f"{place} is missing, but not its arrays; `ola repair {dataset}@v{copy.number}` restores it, and then "
            "`ola rm` removes the version if it is not wanted"
        )


def _weigh(store: Store, key: str, what: str) -> Garbage:
    if key.endswith("/"):
        return Garbage(key, what, sum(store.objects.list_sizes(key[:-1]).values()))
    return Garbage(key, what, store.objects.find_size(key) or 0)
