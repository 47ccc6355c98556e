"""What a store asks of the place its objects lie in: whole objects under string keys, and an owner for unfinished work.

A key is a path inside the store with `/` between its parts ("minilm-l6/sample/train/v1.json"), a prefix is one without
its last part; "" is the store itself. An object appears whole or not at all. Folders and S3 buckets are such places.
"""

import errno
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from hashlib import sha256
from pathlib import Path
from typing import Protocol, runtime_checkable

from storage_schema.manifest import StoredObject

_NOT_OF_THE_OBJECT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def raise_unless_damage(error: Exception) -> None:
    """Raises the error again where it is the process's own want (of open files, of memory) and says nothing of the
    object, which may be whole.
    """
    if isinstance(error, OSError) and error.errno in _NOT_OF_THE_OBJECT:
        raise error


def describe_bytes(data: bytes) -> StoredObject:
    """The digest and size of an object with these bytes."""
    return StoredObject(sha256(data).hexdigest(), len(data))


@runtime_checkable
class Ownership(Protocol):
    """The right of one process to work under a prefix."""

    def check(self) -> None:
        """Nothing, while the right is held; to be asked right before each step that another owner must not see.

        Raises:
            LostOwnershipError: another process has taken the work over.
        """


@runtime_checkable
class Objects(Protocol):
    """Objects by key. Both kinds pickle, and work in whatever process they arrive in.

    Besides what is said below, a folder raises `OSError` and a bucket `StoreUnavailableError` where it cannot be used.
    """

    @property
    def is_local(self) -> bool:
        """Whether objects are files that may be read in place."""

    def describe(self, key: str = "") -> str:
        """The full place of an object, or of the store, for messages; never with credentials."""

    def read(self, key: str) -> bytes:
        """An object's bytes.

        Raises:
            FileNotFoundError: there is none.
        """

    def find_size(self, key: str) -> int | None:
        """An object's number of bytes; None where there is none."""

    def list_names(self, prefix: str) -> list[str]:
        """The names one level below a prefix, sorted: of objects as they are, of prefixes with a `/` at the end."""

    def list_sizes(self, prefix: str) -> dict[str, int]:
        """The number of bytes of every object below a prefix, at any depth, by its key relative to it."""

    def find_changed(self, prefix: str, recorded: Mapping[str, StoredObject]) -> set[str]:
        """Which of the recorded objects (keys relative to the prefix) are missing or not as recorded.

        A folder compares digests; a bucket compares sizes, since it checked the digest of each upload itself.
        """

    def localize(self, key: str, stored: StoredObject) -> Path:
        """A local file with the object's bytes: the object itself in a folder, else a copy whose digest was checked.

        Raises:
            MissingObjectError, CorruptedObjectError: a copy must be fetched, and the object is not the recorded one.
        """

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Writes an object in one step, unless the key is taken; says whether it did."""

    def replace(self, key: str, data: bytes) -> None:
        """Writes an object in one step, over what was there."""

    def remove(self, key: str) -> None:
        """Removes an object, if it is there."""

    def is_owned(self, prefix: str) -> bool:
        """Whether a live process owns the prefix; in a bucket this takes as long as its owner gives no sign of life."""

    def remove_tree(self, prefix: str) -> None:
        """Removes every object below a prefix, as far as there are any."""

    def sweep(self, prefix: str, *, deep: bool = False) -> None:
        """Removes what killed writers left of unfinished objects right below a prefix, or at any depth."""

    def own(self, prefix: str, on_wait: Callable[[], None]) -> AbstractContextManager[Ownership]:
        """Within it, this process alone works under the prefix.

        Another live owner is waited for (`on_wait` is called once); a killed one holds nothing for long.
        """

    def check_writable(self) -> None:
        """Nothing, where objects may be written; leaves no trace.

        Raises:
            StoreAccessError: they may not.
        """
