"""One version as a store of its own: to publish beside a paper, or to carry to another machine."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from pipeline.store.folder import FolderObjects
from pipeline.store.layout import MANIFEST_COPY, Store, open_store_for_writing
from pipeline.store.objects import describe_bytes
from pipeline.store.versions import Version, list_tags, tag_version
from storage_schema.errors import CorruptedObjectError, MissingObjectError, StoreAccessError
from storage_schema.manifest import StoredObject


def export_version(store: Store, version: Version, folder: Path) -> int:
    """Writes a version with its sample table, its tags and a README into a new folder, and returns the objects' bytes.

    The folder appears in one step, when everything is in it. It is a store, with the version under the same ref.

    Raises:
        StoreAccessError: the folder exists and is not empty, or its parent is no folder.
        MissingObjectError, CorruptedObjectError: an object of the version is missing, or not the one that was written.
    """
    folder = folder.absolute()
    if not folder.parent.is_dir():
        raise StoreAccessError(f"there is no folder {folder.parent} to export into; make it first")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StoreAccessError(f"{folder} is there already; an export makes a new folder, name another")
    aside = folder.with_name(f".{folder.name}.export")
    with FolderObjects(folder.parent).own(aside.name, lambda: None):
        shutil.rmtree(aside, ignore_errors=True)
        try:
            num_bytes = _write_store(store, version, aside)
            aside.rename(folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return num_bytes


def _write_store(store: Store, version: Version, folder: Path) -> int:
    manifest = version.manifest
    opened = open_store_for_writing(folder)
    num_bytes = 0
    for key, stored in _list_objects(store, version):
        try:
            data = store.objects.read(key)
        except FileNotFoundError:
            raise MissingObjectError(
                f"{version.ref}: object {store.describe(key)} is missing; `ola repair {version.ref}` mends it"
            ) from None
        if describe_bytes(data) != stored:
            raise CorruptedObjectError(
                f"{version.ref}: object {store.describe(key)} is not the one that was written; "
                f"`ola repair {version.ref}` mends it"
            )
        opened.objects.replace(key, data)
        num_bytes += len(data)
    group = store.group_key(manifest.dataset, manifest.recipe.fingerprint)
    for key in (f"{group}/run.json", f"{group}/{MANIFEST_COPY}", store.manifest_key(manifest.dataset, version.number)):
        if store.objects.find_size(key) is not None:
            opened.objects.replace(key, store.objects.read(key))
    for tag in list_tags(store, version):
        tag_version(opened, version, tag)
    opened.objects.replace("README.md", _describe(version).encode())
    shutil.rmtree(folder / "_work", ignore_errors=True)
    return num_bytes


def _list_objects(store: Store, version: Version) -> Iterator[tuple[str, StoredObject]]:
    manifest = version.manifest
    group = store.group_key(manifest.dataset, manifest.recipe.fingerprint)
    yield manifest.samples_path, manifest.samples
    for name, stored in manifest.objects.items():
        yield f"{group}/{name}", stored


def _describe(version: Version) -> str:
    manifest = version.manifest
    settings = "".join(
        f"| {_escape(name)} | {_escape(str(value))} |\n" for name, value in manifest.recipe.to_json().items()
    )
    counts = manifest.counts
    cells = "all cells" if manifest.packing == "full" else "the lower triangle"
    return f"""# {_escape(str(version.ref))}

Order-Level Attention maps (arXiv 2511.05064): {counts.samples} texts, {counts.tokens} tokens, maps
{_escape(", ".join(map(str, manifest.recipe.maps)))}; {manifest.num_bytes} bytes.

- Licence of the model: {_escape(manifest.model_licence)}
- Licence of the corpus: {_escape(manifest.corpus_licence)}
- Fingerprint: {manifest.recipe.fingerprint}

This folder is a store of the package `ola-store`; `ola verify {version.ref} --store .` checks it, and this reads it:

```python
from pipeline.readers import open_dataset

ds = open_dataset("{version.ref}", store=".")
print(ds[0].maps.shape, ds[0].sample.text)
```

Without the package: `{manifest.dataset}/{manifest.folder}` is a Zarr v3 group. Row `partition[i]` of a map array holds
sample i from cell `start[i]` on, {cells} of its [query, key] matrix, row by row, for `length[i]` tokens. Texts and
annotation are the rows of `{manifest.samples_path}`.

## What decided the numbers

| setting | value |
|---|---|
{settings}"""


def _escape(text: str) -> str:
    """Text as Markdown shows it, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", " ".join(text.split()))
