"""A loader that shuffles by blocks, shards over ranks, and resumes exactly.

The order of an epoch is a pure function of dataset, seed and epoch; the position in it is a count of samples over all
ranks. So neither workers nor the store's place matter to where a run goes on.
"""

import multiprocessing
import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int
from numpy import ndarray

from pipeline.readers.cache import SharedFolder, has_room_for
from pipeline.readers.dataset import SHUFFLE_BLOCKS
from storage_schema.errors import InvalidRecipeError

Batches = TypeVar("Batches")


@runtime_checkable
class BatchSource(Protocol[Batches]):
    """What a loader reads from: one dataset, or several joined."""

    @property
    def ref(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def cache_path(self) -> Path | None: ...
    @property
    def cache_bytes(self) -> int: ...
    @property
    def may_fork(self) -> bool: ...
    def __len__(self) -> int: ...
    def locate_blocks(self) -> Int[ndarray, " S"]: ...
    def with_cache(self, path: Path) -> "BatchSource[Batches]": ...
    def read_batch(self, indices: Sequence[int], pad_to_multiple_of: int = 1) -> Batches: ...
    def strip_rows(self, batch: Batches) -> Batches: ...
    def attach_rows(self, batch: Batches, indices: Sequence[int]) -> Batches: ...


def shuffle_blocks(blocks: Int[ndarray, " S"], seed: int, epoch: int) -> Int[ndarray, " S"]:
    """The sample order of an epoch: blocks in random order, samples in random order within `SHUFFLE_BLOCKS` of them.

    Every sample stands in it once. Where the dataset has no more than `SHUFFLE_BLOCKS` blocks it is a uniform shuffle.
    """
    generator = np.random.default_rng([seed, epoch])
    names, members = np.unique(blocks, return_inverse=True)
    groups = np.split(np.argsort(members, kind="stable"), np.cumsum(np.bincount(members))[:-1])
    order = generator.permutation(len(names))
    pools = [
        generator.permutation(np.concatenate([groups[block] for block in order[first : first + SHUFFLE_BLOCKS]]))
        for first in range(0, len(order), SHUFFLE_BLOCKS)
    ]
    return np.concatenate(pools)


class Loader(Generic[Batches]):
    """Batches, epoch after epoch: each `for` loop yields the rest of the current epoch, then the next one begins."""

    def __init__(
        self,
        dataset: BatchSource[Batches],
        batch_size: int = 32,
        *,
        shuffle: bool = False,
        seed: int = 0,
        num_workers: int = 0,
        pad_to_multiple_of: int = 1,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        start_method: str | None = None,
        pin_memory: bool = False,
    ) -> None:
        """A loader at the first sample of epoch 0.

        Args:
            batch_size: samples in a batch of one rank.
            num_workers: processes that read and collate, from epoch to epoch; 0 for this one. They share one file of
                decoded chunks among temporary files, or in the dataset's `cache_path`.
            pad_to_multiple_of: batches are padded to a multiple of so many tokens.
            drop_last: leaves out the last samples of an epoch that do not fill a batch on every rank. Without it they
                are spread evenly over the ranks, none twice, and a rank may get a smaller last batch or none.
            rank: which part of each step this process takes, of `world_size`.
            start_method: how workers start: `fork`, `spawn` or `forkserver`; default the platform's. Where the store is
                a bucket, `spawn` takes the place of `fork`, with a warning.

        Raises:
            InvalidRecipeError: a number is out of range.
        """
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("num_workers", num_workers, 0),
            ("pad_to_multiple_of", pad_to_multiple_of, 1),
            ("world_size", world_size, 1),
            ("seed", seed, 0),
        ):
            if value < least:
                raise InvalidRecipeError(f"loader: {name} is {value}; expected {least} or more")
        if not 0 <= rank < world_size:
            raise InvalidRecipeError(f"loader: rank is {rank}; expected 0 to {world_size - 1}")
        self.dataset, self.batch_size, self.shuffle, self.seed = dataset, batch_size, shuffle, seed
        self.num_workers, self.pad_to_multiple_of, self.drop_last = num_workers, pad_to_multiple_of, drop_last
        self.rank, self.world_size = rank, world_size
        self._start_method = _choose_start_method(start_method, dataset) if num_workers else None
        self._pin_memory = pin_memory
        self._epoch = self._consumed = 0

    def _plan(self) -> list[tuple[list[int], int]]:
        size = len(self.dataset)
        order = (
            shuffle_blocks(self.dataset.locate_blocks(), self.seed, self._epoch) if self.shuffle else np.arange(size)
        )
        step = self.batch_size * self.world_size
        plan = []
        for first in range(self._consumed, size, step):
            window = order[first : first + step]
            if len(window) < step and self.drop_last:
                break
            mine = np.array_split(window, self.world_size)[self.rank].tolist()
            plan.append((mine, first + len(window)))
        return plan

    def __len__(self) -> int:
        """Batches that the next loop yields on this rank."""
        return sum(bool(mine) for mine, _ in self._plan())

    @cached_property
    def _shared_folder(self) -> SharedFolder | None:
        shares = self.num_workers > 1 and self.dataset.cache_path is None and has_room_for(self.dataset.cache_bytes)
        return SharedFolder() if shares else None

    @cached_property
    def _steps(self) -> list[list[int]]:
        """The samples of each batch to come; torch's loader goes through this very list, epoch after epoch."""
        return []

    @cached_property
    def _batches(self) -> torch.utils.data.DataLoader[Batches]:
        dataset = self.dataset if self._shared_folder is None else self.dataset.with_cache(self._shared_folder.path)
        return torch.utils.data.DataLoader(
            _BatchReader(dataset, self.pad_to_multiple_of),
            batch_size=None,
            sampler=self._steps,
            collate_fn=_hand_on,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            multiprocessing_context=self._start_method,
            pin_memory=self._pin_memory,
        )

    def __iter__(self) -> Iterator[Batches]:
        steps = self._plan()
        plan = [(mine, consumed) for mine, consumed in steps if mine]
        epoch = self._epoch
        self._steps[:] = [mine for mine, _ in plan]
        # The position moves before a batch is handed out, so that a state saved inside the loop counts it as consumed.
        for (mine, consumed), batch in zip(plan, self._batches, strict=True):
            is_last = consumed == steps[-1][1]
            self._epoch, self._consumed = (epoch + 1, 0) if is_last else (epoch, consumed)
            yield self.dataset.attach_rows(batch, mine)
        self._epoch, self._consumed = epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """The position as JSON values; at the end of an epoch it is step 0 of the next one."""
        return {
            "fingerprint": self.dataset.fingerprint,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "epoch": self._epoch,
            "samples_consumed": self._consumed,
            "batch_size": self.batch_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken, with its seed; batch size, ranks and workers may be others.

        Raises:
            InvalidRecipeError: the state belongs to another version, to another shuffling, or is no loader state.
        """
        try:
            fingerprint, shuffle = str(state["fingerprint"]), state["shuffle"]
            seed, epoch, consumed = int(state["seed"]), int(state["epoch"]), int(state["samples_consumed"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InvalidRecipeError(f"not a loader state: {type(error).__name__}: {error}") from None
        if fingerprint != self.dataset.fingerprint:
            raise InvalidRecipeError(
                f"the loader state is of version {fingerprint[:12]}, this loader reads {self.dataset.ref} "
                f"({self.dataset.fingerprint[:12]}); open the dataset at @{fingerprint[:12]}"
            )
        if shuffle != self.shuffle:
            raise InvalidRecipeError(
                f"the loader state was taken with shuffle={shuffle}, this loader has {self.shuffle}"
            )
        if seed < 0 or epoch < 0 or not 0 <= consumed <= len(self.dataset):
            raise InvalidRecipeError(
                f"not a loader state: seed {seed}, epoch {epoch}, {consumed} of {len(self.dataset)} samples"
            )
        self.seed, self._epoch, self._consumed = seed, epoch, consumed


class _BatchReader(torch.utils.data.Dataset[Batches]):
    """Whole batches by their samples, as a loader's worker reads them: its rows are taken where the loader is."""

    def __init__(self, source: BatchSource[Batches], pad_to_multiple_of: int) -> None:
        self._source, self._pad_to_multiple_of = source, pad_to_multiple_of

    def __getitem__(self, indices: list[int]) -> Batches:
        return self._source.strip_rows(self._source.read_batch(indices, self._pad_to_multiple_of))


def _hand_on(batch: Batches) -> Batches:
    return batch


def _choose_start_method(asked: str | None, dataset: BatchSource[Any]) -> str | None:
    if dataset.may_fork or (asked or multiprocessing.get_start_method()) != "fork":
        return asked
    warnings.warn(
        f"{dataset.ref} is read from a bucket, and its client hangs in forked processes: workers start by `spawn`, so "
        'keep the script\'s own work under `if __name__ == "__main__":`',
        stacklevel=3,
    )
    return "spawn"
