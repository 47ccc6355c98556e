"""Paths as people write them; standard library only."""

import os
from pathlib import Path


def expand_home(path: str | Path) -> Path:
    """The path with a leading `~` or `~user` replaced by that home; unchanged where there is no such user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - pathlib's own raises for an unknown user
