"""Objects as the files of a folder: each appears whole or not at all, and is on the disk once its writing returns."""

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pipeline.store.objects import describe_bytes
from storage_schema.errors import StoreAccessError
from storage_schema.manifest import StoredObject
from storage_schema.paths import expand_home

_POLL_SECONDS = 0.2
_LONGEST_SHOWN = 200


def open_folder(store: str | Path) -> "FolderObjects":
    """The objects of a folder, which need not exist yet.

    Raises:
        StoreAccessError: it is a file, or its path is no path.
    """
    path = expand_home(store).absolute()
    try:
        is_file = path.exists() and not path.is_dir()
    except OSError as error:
        text = str(path)
        shown = text if len(text) <= _LONGEST_SHOWN else f"{text[:100]}...{text[-90:]}"
        raise StoreAccessError(f"the store {shown} cannot be read: {error.strerror}; choose another") from None
    if is_file:
        raise StoreAccessError(f"the store {path} is a file; a store is a folder")
    return FolderObjects(path)


class _Lock:
    """Ownership by a lock that the system holds for this process: it cannot be lost while the process lives."""

    def check(self) -> None:
        pass


@dataclass(frozen=True)
class FolderObjects:
    """Objects below a folder."""

    path: Path

    @property
    def is_local(self) -> bool:
        return True

    def describe(self, key: str = "") -> str:
        return str(self.path / key)

    def read(self, key: str) -> bytes:
        path = self.path / key
        try:
            return path.read_bytes()
        except NotADirectoryError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None

    def find_size(self, key: str) -> int | None:
        try:
            return (self.path / key).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def list_names(self, prefix: str) -> list[str]:
        try:
            entries = list((self.path / prefix).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(f"{path.name}/" if path.is_dir() else path.name for path in entries if not _is_partial(path))

    def list_sizes(self, prefix: str) -> dict[str, int]:
        folder = self.path / prefix
        sizes: dict[str, int] = {}
        for parent, _, names in os.walk(folder, onerror=_raise_unless_absent):
            for path in (Path(parent, name) for name in names):
                with suppress(FileNotFoundError):
                    if not _is_partial(path):
                        sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
        return sizes

    def find_changed(self, prefix: str, recorded: Mapping[str, StoredObject]) -> set[str]:
        folder = FolderObjects(self.path / prefix)
        return {name for name, stored in recorded.items() if not folder._matches(name, stored)}

    def _matches(self, key: str, stored: StoredObject) -> bool:
        try:
            return describe_bytes(self.read(key)) == stored
        except FileNotFoundError:
            return False

    def localize(self, key: str, stored: StoredObject) -> Path:
        return self.path / key

    def put_if_absent(self, key: str, data: bytes) -> bool:
        # The file is linked into place, which alone tells the loser of a race (a rename would replace the winner's).
        path = self.path / key
        with _write_partial(path, data) as partial:
            try:
                os.link(partial, path)
            except FileExistsError:
                return False
        _sync_folder(path.parent)
        return True

    def replace(self, key: str, data: bytes) -> None:
        path = self.path / key
        with _write_partial(path, data) as partial:
            partial.replace(path)
        _sync_folder(path.parent)

    def remove(self, key: str) -> None:
        (self.path / key).unlink(missing_ok=True)

    def is_owned(self, prefix: str) -> bool:
        try:
            with (self.path / f"{prefix}.lock").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def remove_tree(self, prefix: str) -> None:
        shutil.rmtree(self.path / prefix, ignore_errors=True)

    def sweep(self, prefix: str, *, deep: bool = False) -> None:
        folder = self.path / prefix
        for path in folder.rglob("*.partial") if deep else folder.glob("*.partial"):
            try:
                # A live writer holds a lock on its partial file.
                with path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink(missing_ok=True)
            except (BlockingIOError, FileNotFoundError, PermissionError):
                continue

    @contextmanager
    def own(self, prefix: str, on_wait: Callable[[], None]) -> Iterator[_Lock]:
        # The system frees the lock of a killed process.
        path = self.path / f"{prefix}.lock"
        _make_folder(path.parent)
        is_waiting = False
        while (file := _try_lock(path)) is None:
            if not is_waiting:
                on_wait()
                is_waiting = True
            time.sleep(_POLL_SECONDS)
        with file:
            try:
                yield _Lock()
            finally:
                path.unlink(missing_ok=True)

    def check_writable(self) -> None:
        existing = next(parent for parent in (self.path, *self.path.parents) if parent.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise StoreAccessError(
                f"the store {self.path} cannot be written: {existing} is not a folder that you may write to; "
                "choose another folder with --store"
            )
        if existing == self.path:
            try:
                with tempfile.TemporaryFile(dir=self.path):
                    pass
            except OSError as error:
                raise StoreAccessError(
                    f"the store {self.path} cannot be written: {error.strerror}; choose another folder with --store"
                ) from None


def _is_partial(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".partial")


def _raise_unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _try_lock(path: Path) -> IO[bytes] | None:
    while True:
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        # Its last owner may have removed the file between the two calls: such a lock excludes nobody.
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


@contextmanager
def _write_partial(path: Path, data: bytes) -> Iterator[Path]:
    _make_folder(path.parent)
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


def _make_folder(path: Path) -> None:
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        _sync_folder(folder.parent)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
