"""Writing a version: owned by one process, partition by partition, resumable, published last.

A journal in the store's `_work` folder records each finished step with the digests of its objects. With it a rerun does
only what is missing; it goes away when the version is published.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from filelock import FileLock, Timeout
from jaxtyping import Float, Shaped
from numpy import ndarray
from zarr.storage import LocalStore

from pipeline.store.arrays import create_group
from pipeline.store.folder import StoreFolder, read_object, remove_partials, replace_object, sweep_partials, sync_folder
from pipeline.store.versions import Version, publish_version
from storage_schema.arrays import CHUNK_CELLS, Packing, Partition, name_array
from storage_schema.errors import MissingObjectError
from storage_schema.manifest import Manifest, MapStatistics, StoredObject
from storage_schema.recipe import Recipe
from storage_schema.refs import Dataset

_POLL_SECONDS = 0.2


@contextmanager
def own_work(store: StoreFolder, recipe: Recipe, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Within it, this process alone works on this recipe in this store.

    Another live owner is waited for (`on_wait` is called once); the lock dies with its process, so a killed owner holds
    nothing.
    """
    path = store.lock_path(recipe.fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        on_wait()
        lock.acquire(poll_interval=_POLL_SECONDS)
    try:
        yield
    finally:
        if not store.work_path(recipe.fingerprint).exists():
            path.unlink(missing_ok=True)
        lock.release()


class VersionWriter:
    """One version on its way. Use it inside `own_work`."""

    def __init__(
        self,
        store: StoreFolder,
        dataset: Dataset,
        recipe: Recipe,
        partitions: Sequence[Partition],
        index: Mapping[str, Shaped[ndarray, "..."]],
        *,
        packing: Packing,
        num_layers: int,
    ) -> None:
        """Creates the version's group and index, or takes up what an earlier run left of the very same ones.

        Args:
            index: the arrays of `INDEX_ARRAYS` by name.
        """
        self._store, self._dataset, self._recipe = store, dataset, recipe
        self._partitions = partitions
        self._path = store.group_path(dataset, recipe.fingerprint)
        self._work = store.work_path(recipe.fingerprint)
        self._work.mkdir(parents=True, exist_ok=True)
        remove_partials(self._path)
        dataset_path = store.dataset_path(dataset)
        samples_path = store.samples_path(dataset.corpus, recipe.split, recipe.corpus_sha256).parent
        sweep_partials(store.path, self._work, dataset_path, dataset_path / "_tags", samples_path)
        self._index_objects = self._recall("index")
        if self._index_objects is None or not self._holds(index):
            shutil.rmtree(self._path, ignore_errors=True)
            for record in self._work.glob("*.json"):
                record.unlink()
            group = create_group(
                store, dataset, recipe, packing=packing, num_layers=num_layers,
                num_samples=len(index["length"]), num_tokens=len(index["input_ids"]), partitions=partitions,
            )  # fmt: skip
            for name, values in index.items():
                _open_array(group, name)[...] = values
            self._index_objects = self._record("index", sorted(self._iter_objects()), {})
        self._group = zarr.open_group(LocalStore(self._path), mode="r+")

    def _holds(self, index: Mapping[str, Shaped[ndarray, "..."]]) -> bool:
        # Equal recipes give equal tokens, but for another version of the tokenizers library between two runs.
        group = zarr.open_group(LocalStore(self._path, read_only=True), mode="r")
        return all(np.array_equal(np.asarray(_open_array(group, name)[...]), values) for name, values in index.items())

    def list_missing(self) -> list[Partition]:
        """The partitions still to be written, in order. Those of an earlier run count once their digests are right."""
        return [partition for partition in self._partitions if self._recall(_name_record(partition)) is None]

    def write_partition(self, partition: Partition, cells: Mapping[str, Float[ndarray, " cells"]]) -> None:
        """Writes one partition's shards, one a map, and records them.

        Args:
            cells: by array name, in the stored dtype; one value for each cell of the partition.
        """
        paths, statistics = [], {}
        for name, values in cells.items():
            array = _open_array(self._group, name)
            path = self._path / name / "c" / str(partition.number) / "0"
            # Zarr merges a part of a shard with what is there; nothing of an unrecorded shard may stay.
            path.unlink(missing_ok=True)
            filled = np.zeros(-(-partition.num_cells // CHUNK_CELLS) * CHUNK_CELLS, array.dtype)
            filled[: partition.num_cells] = values
            array[partition.number, : len(filled)] = filled
            paths.append(path)
            statistics[name] = _summarize(values)
        self._record(_name_record(partition), paths, statistics)

    def finish(self, run: Mapping[str, Any], **manifest_fields: Any) -> Version:
        """Publishes the version, once every partition is there.

        Args:
            run: what the environment was: goes to `run.json`, beside the arrays.
            manifest_fields: what `Manifest` takes beside objects, statistics and the recipe's own facts.

        Raises:
            MissingObjectError: a partition is missing or not as recorded; names all such.
        """
        missing = self.list_missing()
        if missing:
            numbers = ", ".join(str(partition.number) for partition in missing)
            raise MissingObjectError(
                f"{self._dataset}: partitions {numbers} are not written; run the same command again"
            )
        records = [self._read_record(_name_record(partition)) for partition in self._partitions]
        objects = dict(self._index_objects or {})
        for record in records:
            objects |= {path: StoredObject(**stored) for path, stored in record["objects"].items()}
        statistics = {
            name: _combine([record["statistics"][name] for record in records])
            for name in (name_array(name) for name in self._recipe.maps)
        }
        replace_object(self._path / "run.json", json.dumps(run, indent=1, sort_keys=True).encode() + b"\n")
        manifest = Manifest(
            dataset=self._dataset, recipe=self._recipe, folder=self._path.name,
            objects=dict(sorted(objects.items())), statistics=statistics, **manifest_fields,
        )  # fmt: skip
        version = publish_version(self._store, manifest)
        self._store.remove_journal(self._recipe.fingerprint)
        return version

    def _iter_objects(self) -> Iterator[Path]:
        for folder, _, files in os.walk(self._path):
            yield from (Path(folder) / file for file in files)

    def _record(
        self, name: str, paths: Sequence[Path], statistics: Mapping[str, Mapping[str, float]]
    ) -> dict[str, StoredObject]:
        objects = {path.relative_to(self._path).as_posix(): read_object(path) for path in paths}
        for folder in {path.parent for path in paths} | {path.parent.parent for path in paths}:
            sync_folder(folder)
        record = {"objects": {path: asdict(stored) for path, stored in objects.items()}, "statistics": statistics}
        replace_object(self._work / f"{name}.json", json.dumps(record).encode())
        return objects

    def _read_record(self, name: str) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self._work / f"{name}.json").read_bytes())
        return record

    def _recall(self, name: str) -> dict[str, StoredObject] | None:
        try:
            record = self._read_record(name)
            objects = {path: StoredObject(**stored) for path, stored in record["objects"].items()}
            intact = all(read_object(self._path / path) == stored for path, stored in objects.items())
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
            return None
        return objects if intact else None


def _open_array(group: zarr.Group, name: str) -> zarr.Array[Any]:
    array = group[name]
    assert isinstance(array, zarr.Array)
    return array


def _name_record(partition: Partition) -> str:
    return f"partition-{partition.number:05d}"


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
