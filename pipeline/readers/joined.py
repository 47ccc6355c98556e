"""Several models' datasets over the texts they have in common: items and batches are tuples, one part a dataset."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int
from numpy import ndarray

from pipeline.readers.batch import Batch, Item
from pipeline.readers.dataset import OlaDataset
from storage_schema.errors import CorruptedObjectError, InvalidRecipeError

if TYPE_CHECKING:
    from pipeline.readers.loader import Loader


class JoinedDataset(torch.utils.data.Dataset[tuple[Item, ...]]):
    """The samples that all of some datasets have, in the order of the first: `join_datasets` makes it."""

    def __init__(self, datasets: tuple[OlaDataset, ...], rows: Int[ndarray, "D S"]) -> None:
        """A join whose sample i is sample `rows[d, i]` of dataset d."""
        self.datasets, self._rows = datasets, rows

    @property
    def ref(self) -> str:
        """The refs of all, as errors name them."""
        return " + ".join(dataset.ref for dataset in self.datasets)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) of the datasets' fingerprints, in order: what a loader's state belongs to."""
        return hashlib.sha256("\n".join(dataset.fingerprint for dataset in self.datasets).encode()).hexdigest()

    @property
    def num_left_out(self) -> tuple[int, ...]:
        """Samples of each dataset that another one does not have."""
        return tuple(len(dataset) - len(self) for dataset in self.datasets)

    def __len__(self) -> int:
        return len(self._rows[0])

    def __repr__(self) -> str:
        return f"JoinedDataset({self.ref}: {len(self)} samples in common, left out {self.num_left_out})"

    def __getitem__(self, index: int) -> tuple[Item, ...]:
        """The sample at `index` in each dataset; errors as `OlaDataset`."""
        (places,) = self._locate([index]).T.tolist()
        return tuple(dataset[place] for dataset, place in zip(self.datasets, places, strict=True))

    def _locate(self, indices: Sequence[int]) -> Int[ndarray, "D B"]:
        for index in indices:
            if not -len(self) <= index < len(self):
                raise IndexError(f"{self.ref} have {len(self)} samples in common, asked for {index}")
        return self._rows[:, list(indices)]

    def read_batch(self, indices: Sequence[int], pad_to_multiple_of: int = 1) -> tuple[Batch, ...]:
        """The samples at `indices`, a batch of each dataset, each padded to its own longest; errors as `OlaDataset`."""
        return self.pad_cells(indices, self.read_cells(indices), pad_to_multiple_of)

    def read_cells(self, indices: Sequence[int]) -> tuple[Any, ...]:
        """What each dataset's `read_cells` gives."""
        return tuple(
            dataset.read_cells(places)
            for dataset, places in zip(self.datasets, self._locate(indices).tolist(), strict=True)
        )

    def pad_cells(
        self, indices: Sequence[int], cells: tuple[Any, ...], pad_to_multiple_of: int = 1
    ) -> tuple[Batch, ...]:
        """What `read_cells` gave for these samples as batches."""
        return tuple(
            dataset.pad_cells(places, part, pad_to_multiple_of)
            for dataset, places, part in zip(self.datasets, self._locate(indices).tolist(), cells, strict=True)
        )

    def collate(self, items: Sequence[tuple[Item, ...]], pad_to_multiple_of: int = 1) -> tuple[Batch, ...]:
        """The items as a batch of each dataset, each padded on the right to its own longest, rounded up."""
        parts = zip(*items, strict=True)
        return tuple(
            dataset.collate(part, pad_to_multiple_of) for dataset, part in zip(self.datasets, parts, strict=True)
        )

    def loader(self, batch_size: int = 32, **options: Any) -> "Loader[tuple[Batch, ...]]":
        """A resumable loader over the join; see `Loader` for the options."""
        from pipeline.readers.loader import Loader

        return Loader(self, batch_size, **options)

    def locate_blocks(self) -> Int[ndarray, " S"]:
        """Each sample's block in the first dataset; texts that stand together there do so in the others, too."""
        blocks: Int[ndarray, " S"] = self.datasets[0].locate_blocks()[self._rows[0]]
        return blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of every dataset, decoded."""
        return sum(dataset.block_bytes for dataset in self.datasets)

    @property
    def cache_bytes(self) -> int:
        """Bytes of decoded chunks that are kept, of all datasets."""
        return sum(dataset.cache_bytes for dataset in self.datasets)

    @property
    def shares_cache(self) -> bool:
        """Whether all of them keep their decoded chunks in files."""
        return all(dataset.shares_cache for dataset in self.datasets)

    @property
    def may_fork(self) -> bool:
        """Whether a forked process can go on reading all of them."""
        return all(dataset.may_fork for dataset in self.datasets)

    def with_cache(self, path: Path | None, least_blocks: int) -> "JoinedDataset":
        """The same join of `OlaDataset.with_cache`."""
        return JoinedDataset(tuple(dataset.with_cache(path, least_blocks) for dataset in self.datasets), self._rows)


def join_datasets(datasets: Sequence[OlaDataset]) -> JoinedDataset:
    """The samples that all datasets have, matched by `sample_id` (with its repetition), in the order of the first.

    Sample ids depend on no model: datasets of one corpus, text unit and text form have the same. What another dataset
    lacks is left out and counted, in `num_left_out`.

    Raises:
        InvalidRecipeError: there are fewer than two datasets, the same maps of one version are given twice, or no
            sample is in all of them.
        CorruptedObjectError: a dataset has two samples of one id.
    """
    if len(datasets) < 2:
        raise InvalidRecipeError(f"a join takes two datasets or more, got {len(datasets)}")
    given = [(dataset.fingerprint, dataset.maps) for dataset in datasets]
    for place, (dataset, one) in enumerate(zip(datasets, given, strict=True)):
        if one in given[:place]:
            raise InvalidRecipeError(
                f"{dataset.ref} with the maps {dataset.maps} is joined with itself; name each version once, or other "
                "maps of it"
            )
    placed = [_place_samples(dataset) for dataset in datasets]
    common = [sample_id for sample_id in placed[0] if all(sample_id in places for places in placed[1:])]
    if not common:
        sizes = ", ".join(
            f"{dataset.ref} ({len(dataset)} samples, {dataset.recipe.text_unit}, {dataset.recipe.text_form})"
            for dataset in datasets
        )
        raise InvalidRecipeError(f"no sample is in all of {sizes}; join datasets of one corpus, split, unit and form")
    rows = np.array([[places[sample_id] for sample_id in common] for places in placed], np.int64)
    return JoinedDataset(tuple(datasets), rows)


def _place_samples(dataset: OlaDataset) -> dict[str, int]:
    places = {sample_id: place for place, sample_id in enumerate(dataset.sample_ids)}
    if len(places) < len(dataset):
        raise CorruptedObjectError(
            f"{dataset.ref} has {len(dataset)} samples of {len(places)} ids; ids are unique within a split, so its "
            f"index is damaged: `ola verify {dataset.ref}`"
        )
    return places
