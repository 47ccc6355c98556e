"""Partitions of a dataset's earlier versions that would come out byte for byte the same, taken over instead of made.

A corpus that grew at its end, or a map that was added, leaves most of the work of the version before as it was.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float, Integer
from numpy import ndarray

from pipeline.plan import Plan
from pipeline.store.layout import Store
from pipeline.store.open import StoredVersion
from pipeline.store.versions import Version, list_versions
from pipeline.tokens.encode import TokenTable
from storage_schema.arrays import Partition, name_array
from storage_schema.errors import DamagedError

_DECISIVE = ("device", "threads", "attention", "batch_tokens", "batch_halvings")
_DECISIVE_LIBRARIES = ("torch", "transformers")


@dataclass(frozen=True)
class _Source:
    opened: StoredVersion
    partitions: dict[bytes, int]
    """The number of each partition, by the digest of its tokens."""


class PartitionReuse:
    """What earlier versions have of a plan's partitions."""

    def __init__(self, store: Store, plan: Plan, tokens: TokenTable, run: Mapping[str, Any]) -> None:
        """Looks through the finished versions of the plan's dataset.

        A version serves if its recipe differs in nothing but maps and corpus content, and if it was made in the same
        environment: elsewhere the last bits are others, and a version is of one piece.

        Args:
            run: what `run.json` will say of device, threads, batches and libraries.
        """
        self._maps, self._tokens = plan.recipe.maps, tokens
        self.counts: Counter[str] = Counter()
        """Partitions that maps were taken from, by ref."""
        self._sources = [
            source
            for version in reversed(list_versions(store, plan.dataset))
            if _differs_in_maps_or_corpus_alone(version, plan)
            and (source := _open_source(store, version, run)) is not None
        ]

    def read_partition(self, partition: Partition) -> dict[str, Float[ndarray, " cells"]]:
        """The partition's cells, by array name, of the maps that an earlier version has of the very same tokens.

        What is damaged there is left out, and so is made anew.
        """
        found: dict[str, Float[ndarray, " cells"]] = {}
        if not self._sources:
            return found
        first = int(self._tokens.lengths[: partition.start].sum())
        lengths = self._tokens.lengths[partition.start : partition.stop]
        digest = _digest_tokens(lengths, self._tokens.input_ids[first : first + int(lengths.sum())])
        for source in self._sources:
            number = source.partitions.get(digest)
            wanted = [] if number is None else [name for name in self._maps if name_array(name) not in found]
            taken = 0
            for name in wanted:
                if name in source.opened.manifest.recipe.maps:
                    try:
                        cells = source.opened.read_partition(name, number or 0)
                    except DamagedError:
                        continue
                    found[name_array(name)] = cells[: partition.num_cells]
                    taken = 1
            if taken:
                self.counts[str(source.opened.version.ref)] += 1
        return found


def _differs_in_maps_or_corpus_alone(version: Version, plan: Plan) -> bool:
    stored, wanted = version.manifest.recipe, plan.recipe
    return replace(stored, maps=wanted.maps, corpus_sha256=wanted.corpus_sha256) == wanted


def _open_source(store: Store, version: Version, run: Mapping[str, Any]) -> _Source | None:
    manifest = version.manifest
    group = store.group_key(manifest.dataset, manifest.recipe.fingerprint)
    try:
        recorded = json.loads(store.objects.read(f"{group}/run.json"))
        if _describe_environment(recorded) != _describe_environment(run):
            return None
        opened = StoredVersion(store, version)
        index = opened.index
    except (OSError, ValueError, KeyError, TypeError, DamagedError):
        return None
    bounds = [*np.flatnonzero(np.diff(index["partition"], prepend=-1)).tolist(), len(index["partition"])]
    ends = np.concatenate([[0], np.cumsum(index["length"], dtype=np.int64)])
    return _Source(
        opened,
        {
            _digest_tokens(index["length"][start:stop], index["input_ids"][ends[start] : ends[stop]]): number
            for number, (start, stop) in enumerate(pairwise(bounds))
        },
    )


def _describe_environment(run: Mapping[str, Any]) -> list[Any]:
    return [run[key] for key in _DECISIVE] + [run["versions"][name] for name in _DECISIVE_LIBRARIES]


def _digest_tokens(lengths: Integer[ndarray, " S"], input_ids: Integer[ndarray, " N"]) -> bytes:
    return sha256(lengths.astype("<i8").tobytes() + input_ids.astype("<i8").tobytes()).digest()
