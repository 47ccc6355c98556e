"""A store's folder: its marker, its paths, and objects that appear whole or not at all.

ola-store.json                                    marker with the format number
_samples/<corpus>/<split>/<content hash>.parquet  samples with their annotation, once a corpus
_work/<fingerprint>/, _work/<fingerprint>.lock    an unfinished version's journal and owner; gone when it is finished
<model>/<corpus>/<split>/vN.json                  manifest: its presence is the version
<model>/<corpus>/<split>/<fingerprint>/           the version's Zarr group
<model>/<corpus>/<split>/_tags/<tag>.json         a tag
"""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO

from storage_schema.errors import NewerFormatError, StoreAccessError
from storage_schema.manifest import StoredObject
from storage_schema.paths import expand_home
from storage_schema.refs import Dataset

STORE_FORMAT = 1
_MARKER = "ola-store.json"


@dataclass(frozen=True)
class StoreFolder:
    """An opened store. All paths of its layout come from here."""

    path: Path

    def dataset_path(self, dataset: Dataset) -> Path:
        return self.path / dataset.model / dataset.corpus / dataset.split

    def group_path(self, dataset: Dataset, fingerprint: str) -> Path:
        return self.dataset_path(dataset) / fingerprint[:16]

    def samples_path(self, corpus: str, split: str, content_sha256: str) -> Path:
        return self.path / "_samples" / corpus / split / f"{content_sha256[:16]}.parquet"

    def work_path(self, fingerprint: str) -> Path:
        return self.path / "_work" / fingerprint[:16]

    def lock_path(self, fingerprint: str) -> Path:
        return self.work_path(fingerprint).with_suffix(".lock")

    def remove_journal(self, fingerprint: str) -> None:
        """Removes the journal of a published version, also one that a process killed right after publishing left."""
        shutil.rmtree(self.work_path(fingerprint), ignore_errors=True)


def open_store(store: str | Path) -> StoreFolder:
    """The store in a folder, for reading.

    Raises:
        StoreAccessError: there is no such folder, it is a file or a URL, or it holds no store.
        NewerFormatError: a later release wrote it.
    """
    path = _local_path(store)
    if not path.exists():
        raise StoreAccessError(f"there is no store at {path}; `ola materialize --store {path}` makes one")
    if not path.is_dir():
        raise StoreAccessError(f"the store {path} is a file; a store is a folder")
    marker = path / _MARKER
    try:
        values = json.loads(marker.read_bytes())
        version = values["ola_store"]
        if type(version) is not int or version < 1:
            raise ValueError
    except FileNotFoundError:
        raise StoreAccessError(f"{path} is no store: it has no {_MARKER}; name another folder with --store") from None
    except (ValueError, KeyError, TypeError):
        raise StoreAccessError(
            f'{marker} is not a store\'s marker; restore it from a copy: {{"ola_store": 1}}'
        ) from None
    except OSError as error:
        raise StoreAccessError(f"the store {path} cannot be read: {error.strerror}") from None
    if version > STORE_FORMAT:
        raise NewerFormatError(
            f"the store {path} has format {version}, this release reads up to {STORE_FORMAT}; upgrade to use it"
        )
    return StoreFolder(path)


def open_store_for_writing(store: str | Path) -> StoreFolder:
    """The store in a folder, made there if the folder is missing or empty.

    Raises:
        StoreAccessError: the folder cannot be written, is a file, a URL, or holds something else.
        NewerFormatError: a later release wrote it.
    """
    path = _local_path(store)
    try:
        if is_unclaimed(path):
            path.mkdir(parents=True, exist_ok=True)
            put_if_absent(path / _MARKER, json.dumps({"ola_store": STORE_FORMAT}).encode() + b"\n")
        folder = open_store(path)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise StoreAccessError(
            f"the store {path} cannot be written: {error.strerror or error}; choose another folder with --store"
        ) from None
    return folder


def check_writable(store: str | Path) -> None:
    """Nothing, where `open_store_for_writing` would succeed; touches nothing.

    Raises:
        StoreAccessError, NewerFormatError: as `open_store_for_writing`.
    """
    path = _local_path(store)
    if not is_unclaimed(path):
        open_store(path)
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise StoreAccessError(f"the store {path} cannot be written: {existing} is not a folder that you may write to")


def is_unclaimed(store: str | Path) -> bool:
    """Whether a store may be made there: nothing is there yet, or nothing but another process's beginning of one.

    Raises:
        StoreAccessError: the folder cannot be looked into, or its path is no path.
    """
    path = _local_path(store)
    try:
        if not path.exists():
            return True
        return path.is_dir() and all(_is_partial_of(_MARKER, entry) for entry in path.iterdir())
    except OSError as error:
        raise StoreAccessError(f"the store {_shorten(path)} cannot be read: {error.strerror}; choose another") from None


def _shorten(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 200 else f"{text[:100]}...{text[-90:]}"


def _is_partial_of(name: str, path: Path) -> bool:
    return path.name.startswith(f".{name}.") and path.name.endswith(".partial")


def _local_path(store: str | Path) -> Path:
    if "://" in str(store):
        raise StoreAccessError(
            f"the store {str(store).partition('://')[0]}://... is a URL; this release keeps stores in folders"
        )
    return expand_home(store).absolute()


def put_if_absent(path: Path, data: bytes) -> bool:
    """Writes a whole object in one step, unless the path is taken; says whether it did.

    The file is linked into place, which alone tells the loser of a race (a rename would replace the winner's).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _partial_file(path, data) as partial:
        try:
            os.link(partial, path)
        except FileExistsError:
            return False
    sync_folder(path.parent)
    return True


def replace_object(path: Path, data: bytes) -> None:
    """Writes a whole object in one step, over what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _partial_file(path, data) as partial:
        partial.replace(path)
    sync_folder(path.parent)


@contextmanager
def _partial_file(path: Path, data: bytes) -> Iterator[Path]:
    with _create_partial(path) as file:
        partial = Path(file.name)
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            partial.chmod(0o644)
            yield partial
        finally:
            partial.unlink(missing_ok=True)


def _create_partial(path: Path) -> IO[bytes]:
    # Its owner holds a lock on it, which dies with the process: whoever gets the lock may sweep the file.
    while True:
        file = tempfile.NamedTemporaryFile(  # noqa: SIM115 - the caller closes it
            dir=path.parent, prefix=f".{path.name}.", suffix=".partial", delete=False
        )
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


def sync_folder(path: Path) -> None:
    """Brings a folder's entries onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_bytes(data: bytes) -> str:
    """SHA-256 of an object's bytes, 64 hex digits."""
    return sha256(data).hexdigest()


def read_object(path: Path) -> StoredObject:
    """A stored object's digest and size, once its bytes are on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        data = file.read()
    return StoredObject(hash_bytes(data), len(data))


def remove_partials(group: Path) -> None:
    """Removes what a killed writer left in a group that the caller owns: files under `.partial` names."""
    for path in group.rglob("*.partial"):
        path.unlink(missing_ok=True)


def sweep_partials(*folders: Path) -> None:
    """Removes what killed writers left in these folders themselves; files of live ones are locked and stay."""
    for folder in folders:
        for path in folder.glob("*.partial"):
            try:
                with path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink(missing_ok=True)
            except (BlockingIOError, FileNotFoundError, PermissionError):
                continue
