"""Writing a version: owned by one process, partition by partition, resumable, published last.

A journal in the store's `_work` folder records each finished step with the digests of its objects. With it a rerun does
only what is missing; it goes away when the version is published.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped
from numpy import ndarray

from pipeline.store.arrays import encode_group
from pipeline.store.layout import Store
from pipeline.store.objects import Ownership, describe_bytes
from pipeline.store.shards import encode_shard
from pipeline.store.versions import Version, find_highest_claim, publish_version
from storage_schema.arrays import Packing, Partition, count_row_cells, name_array
from storage_schema.errors import MissingObjectError
from storage_schema.manifest import Manifest, MapStatistics, StoredObject
from storage_schema.recipe import Recipe
from storage_schema.refs import Dataset

_INDEX_RECORD = "index.json"


@dataclass(frozen=True)
class _Record:
    """One finished step: its objects by their key in the group, and what the maps' cells add up to."""

    objects: dict[str, StoredObject]
    statistics: dict[str, dict[str, float]]

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> "_Record":
        values = json.loads(data)
        objects = {name: StoredObject(**stored) for name, stored in values["objects"].items()}
        return cls(objects, dict(values["statistics"]))


class VersionWriter:
    """One version on its way. Use it inside `own_work`."""

    def __init__(
        self,
        store: Store,
        dataset: Dataset,
        recipe: Recipe,
        partitions: Sequence[Partition],
        index: Mapping[str, Shaped[ndarray, "..."]],
        *,
        packing: Packing,
        num_layers: int,
        owner: Ownership,
    ) -> None:
        """Writes the version's metadata and index, or takes up what an earlier run left of the very same ones.

        Args:
            index: the arrays of `INDEX_ARRAYS` by name.
            owner: what `own_work` gave; it is asked before every step that counts.
        """
        self._store, self._dataset, self._recipe, self._owner = store, dataset, recipe, owner
        self._partitions, self._row_cells = partitions, count_row_cells(partitions)
        self._group = store.group_key(dataset, recipe.fingerprint)
        self._work = store.work_key(recipe.fingerprint)
        self._sweep()
        self._records = dict(self._read_records())
        self._write_index(encode_group(dataset, recipe, partitions, index, packing=packing, num_layers=num_layers))

    def _sweep(self) -> None:
        samples = self._store.samples_key(self._dataset.corpus, self._recipe.split, self._recipe.corpus_sha256)
        dataset = self._store.dataset_key(self._dataset)
        for prefix in ("", self._work, dataset, f"{dataset}/_tags", samples.rpartition("/")[0]):
            self._store.objects.sweep(prefix)
        self._store.objects.sweep(self._group, deep=True)

    def _read_records(self) -> Iterable[tuple[str, _Record]]:
        for name in self._store.objects.list_names(self._work):
            try:
                yield name, _Record.decode(self._store.objects.read(f"{self._work}/{name}"))
            except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
                continue  # a torn record costs its step

    def _write_index(self, encoded: Mapping[str, bytes]) -> None:
        # Equal recipes give equal bytes, but for other versions of the libraries that tokenize and encode.
        objects = {name: describe_bytes(data) for name, data in encoded.items()}
        left = self._records.get(_INDEX_RECORD)
        if left is None or left.objects != objects:
            self._owner.check()
            self._store.objects.remove_tree(self._group)
            self._store.objects.remove_tree(self._work)
            self._records.clear()
        for name in sorted(self._store.objects.find_changed(self._group, objects)):
            self._store.objects.replace(f"{self._group}/{name}", encoded[name])
        if not self._records:
            self._record(_INDEX_RECORD, _Record(objects, {}))

    def list_missing(self) -> list[Partition]:
        """The partitions still to be written, in order. Those of an earlier run count once their objects are right."""
        recorded = {name: stored for record in self._records.values() for name, stored in record.objects.items()}
        changed = self._store.objects.find_changed(self._group, recorded)
        return [
            partition
            for partition in self._partitions
            if (record := self._records.get(_name_record(partition))) is None or changed & record.objects.keys()
        ]

    def write_partition(self, partition: Partition, cells: Mapping[str, Float[ndarray, " cells"]]) -> None:
        """Writes one partition's shards, one a map, and records them.

        Args:
            cells: by array name, in the stored dtype; one value for each cell of the partition.

        Raises:
            LostOwnershipError: another process has taken the work over.
        """
        objects, statistics = {}, {}
        for name, values in cells.items():
            key, data = f"{name}/c/{partition.number}/0", encode_shard(values, self._row_cells)
            self._owner.check()
            self._store.objects.replace(f"{self._group}/{key}", data)
            objects[key] = describe_bytes(data)
            statistics[name] = _summarize(values)
        self._record(_name_record(partition), _Record(objects, statistics))

    def _record(self, name: str, record: _Record) -> None:
        self._owner.check()
        self._store.objects.replace(f"{self._work}/{name}", record.encode())
        self._records[name] = record

    def finish(self, run: Mapping[str, Any], **manifest_fields: Any) -> Version:
        """Publishes the version, once every partition is there.

        Args:
            run: what the environment was: goes to `run.json`, beside the arrays.
            manifest_fields: what `Manifest` takes beside objects, statistics and the recipe's own facts.

        Raises:
            MissingObjectError: a partition is missing or not as recorded; names all such.
            LostOwnershipError: another process has taken the work over.
        """
        missing = self.list_missing()
        if missing:
            numbers = ", ".join(str(partition.number) for partition in missing)
            raise MissingObjectError(
                f"{self._dataset}: partitions {numbers} are not written; run the same command again"
            )
        records = [self._records[_name_record(partition)] for partition in self._partitions]
        objects = dict(self._records[_INDEX_RECORD].objects)
        for record in records:
            objects |= record.objects
        statistics = {
            name: _combine([record.statistics[name] for record in records])
            for name in (name_array(name) for name in self._recipe.maps)
        }
        self._owner.check()
        data = json.dumps(run, indent=1, sort_keys=True).encode() + b"\n"
        self._store.objects.replace(f"{self._group}/run.json", data)
        manifest = Manifest(
            dataset=self._dataset, recipe=self._recipe, folder=self._group.rpartition("/")[2],
            objects=dict(sorted(objects.items())), statistics=statistics, **manifest_fields,
        )  # fmt: skip
        self._owner.check()
        version = publish_version(self._store, manifest, find_highest_claim(self._store, self._dataset))
        self._store.remove_journal(self._recipe.fingerprint)
        return version


def _name_record(partition: Partition) -> str:
    return f"partition-{partition.number:05d}.json"


def _summarize(cells: Float[ndarray, " cells"]) -> dict[str, float]:
    wide = cells.astype(np.float64)
    return {
        "count": float(len(wide)), "sum": float(wide.sum()), "squares": float(wide @ wide),
        "min": float(wide.min()), "max": float(wide.max()),
    }  # fmt: skip


def _combine(parts: Sequence[Mapping[str, float]]) -> MapStatistics:
    count = sum(part["count"] for part in parts)
    mean = sum(part["sum"] for part in parts) / count
    variance = max(0.0, sum(part["squares"] for part in parts) / count - mean * mean)
    return MapStatistics(
        mean=mean, std=variance**0.5, min=min(part["min"] for part in parts), max=max(part["max"] for part in parts)
    )
