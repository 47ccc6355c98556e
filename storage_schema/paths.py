"""Paths as people write them, and the cache; standard library only."""

import os
import tempfile
from pathlib import Path

from storage_schema.errors import StoreAccessError


def expand_home(path: str | Path) -> Path:
    """The path with a leading `~` or `~user` replaced by that home; unchanged where there is no such user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - pathlib's own raises for an unknown user


def find_cache(part: str) -> Path:
    """A folder of the cache (`OLA_CACHE`, else the user's cache folder), made if it is missing.

    Args:
        part: `models`, `facts`, `tokens` or `objects`.

    Raises:
        StoreAccessError: it cannot be made or written.
    """
    chosen = os.environ.get("OLA_CACHE")
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ola-store"
    folder = (expand_home(chosen).absolute() if chosen else default) / part
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise StoreAccessError(
            f"the cache {folder} cannot be written: {error.strerror}; set OLA_CACHE to a folder that can"
        ) from None
    return folder


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file of the cache in one step, over what was there: readers see the whole of one or of the other."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        partial = Path(folder) / path.name
        partial.write_bytes(data)
        partial.replace(path)
