"""Fixtures shared by all tests: where the reference data lies, and small models built on the spot."""

import os
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("OLA_DATA", PROJECT.parent / "shared" / "data")).resolve()


@pytest.fixture(scope="session")
def corpus_folder():
    """A function from a corpus's folder name to its path; skips by name where it is absent."""

    def find(name: str) -> Path:
        folder = DATA / name
        if not folder.is_dir():
            pytest.skip(f"corpus {name!r} is not in OLA_DATA ({DATA})")
        return folder

    return find
