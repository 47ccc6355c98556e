"""Tokens kept between runs, under a hash of all that decides them.

They lie in the cache folder as NumPy archives without pickles; an archive's own checksums tell a damaged one, which
counts as none.
"""

import io
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from hashlib import sha256
from importlib.metadata import version as find_library_version
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.tokens import alignment, encode
from pipeline.tokens.encode import TokenTable
from storage_schema.paths import find_cache, replace_file
from storage_schema.samples import Sample

_CODE = tuple(Path(str(module.__file__)) for module in (alignment, encode))
_LIBRARIES = ("numpy", "tokenizers", "transformers")


def recall_tokens(
    samples: Sequence[Sample], tokenizer: Sequence[str], max_length: int, make: Callable[[], TokenTable]
) -> TokenTable:
    """The tokens that `make` makes of the samples, from the cache where they are there.

    Args:
        tokenizer: hashes that tell it from any other.
        make: called where the cache has none; what it raises is passed on, and nothing is kept.

    Raises:
        StoreAccessError: the cache folder cannot be written.
    """
    path = find_cache("tokens") / f"{_digest(samples, tokenizer, max_length)}.npz"
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
            values = {field.name: found[field.name] for field in fields(TokenTable)}
        columns: dict[str, Any] = {name: value if value.ndim else int(value) for name, value in values.items()}
        return TokenTable(**columns)
    except Exception:  # a damaged archive raises whatever the damaged field leads to
        tokens = make()
    archive = io.BytesIO()
    np.savez(archive, **asdict(tokens))
    with suppress(OSError):  # a full disk costs the next run some seconds, not this one its work
        replace_file(path, archive.getvalue())
    return tokens


def _digest(samples: Sequence[Sample], tokenizer: Sequence[str], max_length: int) -> str:
    libraries = [find_library_version(name) for name in _LIBRARIES]
    digest = sha256(json.dumps([*tokenizer, max_length, libraries]).encode())
    for path in _CODE:
        digest.update(path.read_bytes())
    for sample in samples:
        digest.update(json.dumps([sample.text, sample.word_spans]).encode() + b"\n")
    return digest.hexdigest()[:32]
