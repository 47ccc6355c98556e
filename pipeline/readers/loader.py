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
from pipeline.readers.cells import POOL_BLOCKS, SHUFFLE_BLOCKS
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
    def shares_cache(self) -> bool: ...
    @property
    def cache_bytes(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def may_fork(self) -> bool: ...
    def __len__(self) -> int: ...
    def locate_blocks(self) -> Int[ndarray, " S"]: ...
    def with_cache(self, path: Path | None, least_blocks: int) -> "BatchSource[Batches]": ...
    def read_cells(self, indices: Sequence[int]) -> Any: ...
    def pad_cells(self, indices: Sequence[int], cells: Any, pad_to_multiple_of: int = 1) -> Batches: ...


def shuffle_blocks(blocks: Int[ndarray, " S"], seed: int, epoch: int) -> Int[ndarray, " S"]:
    """The sample order of an epoch: blocks in random order, in pools of up to `SHUFFLE_BLOCKS`, each pool shuffled.

    Every sample stands in it once. One pool is a uniform shuffle. With more of them a sample moves as far as in a
    uniform shuffle (a third of the corpus on average) and neighbors are as good as uncorrelated (0.01 to 0.02 between
    their corpus positions), but a batch of 32 comes from 24 to 25 blocks, where it would come from 30 to 32: measured
    on 20,000 maps in 233 blocks and on 200,000 in 2,240.
    """
    generator = np.random.default_rng([seed, epoch])
    names, members = np.unique(blocks, return_inverse=True)
    groups = np.split(np.argsort(members, kind="stable"), np.cumsum(np.bincount(members))[:-1])
    # Pools of even size: one block left over would be a pool of its own, and unmixed.
    pools = np.array_split(generator.permutation(len(names)), -(-len(names) // SHUFFLE_BLOCKS))
    return np.concatenate([generator.permutation(np.concatenate([groups[block] for block in pool])) for pool in pools])


class Loader(Generic[Batches]):
    """Batches, epoch after epoch: each `for` loop yields the rest of the current epoch, then the next one begins.

    One loop at a time: they share the position and the workers. A loop that is gone on with after another one began
    raises InvalidRecipeError.
    """

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
            shuffle: another order each epoch, as `shuffle_blocks` makes it. The cache then has room for the blocks
                that are mixed (16 MiB of float16 a map), whatever its budget.
            num_workers: processes that read and decode, from epoch to epoch; 0 for this one. Two or more share a file
                of decoded chunks: in the dataset's `cache_path`, else a temporary one that goes with the loader. They
                end when a loop is left before its end, and with the loader.
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
        self._current: object = None  # the loop that is under way

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
        shares = self.num_workers > 1 and not self.dataset.shares_cache and has_room_for(self.dataset.cache_bytes)
        return SharedFolder() if shares else None

    @cached_property
    def _source(self) -> BatchSource[Batches]:
        """The dataset, with a cache that workers share and that holds what a shuffled epoch reads from at a time."""
        least_blocks = POOL_BLOCKS if self.shuffle else 0
        if self._shared_folder is not None:
            return self.dataset.with_cache(self._shared_folder.path, least_blocks)
        is_enough = self.dataset.cache_bytes >= least_blocks * self.dataset.block_bytes
        return self.dataset if is_enough else self.dataset.with_cache(None, least_blocks)

    @cached_property
    def _steps(self) -> list[list[int]]:
        """The samples of each batch to come; torch's loader goes through this very list, epoch after epoch."""
        return []

    @cached_property
    def _cells(self) -> torch.utils.data.DataLoader[Any]:
        return torch.utils.data.DataLoader(
            _CellReader(self._source),
            batch_size=None,
            sampler=self._steps,
            collate_fn=_hand_on,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            multiprocessing_context=self._start_method,
        )

    def __iter__(self) -> Iterator[Batches]:
        steps = self._plan()
        plan = [(mine, consumed) for mine, consumed in steps if mine]
        epoch = self._epoch
        if self._current is not None:  # its workers read what it planned
            self.__dict__.pop("_cells", None)
        loop = self._current = object()
        self._steps[:] = [mine for mine, _ in plan]
        try:
            # The position moves before a batch is handed out: a state saved inside the loop counts it as consumed.
            for (mine, consumed), cells in zip(plan, self._cells, strict=True):
                batch = self.dataset.pad_cells(mine, cells, self.pad_to_multiple_of)
                is_last = consumed == steps[-1][1]
                self._epoch, self._consumed = (epoch + 1, 0) if is_last else (epoch, consumed)
                yield _pin(batch) if self._pin_memory else batch
                if self._current is not loop:
                    raise InvalidRecipeError(
                        "another loop over this loader began before this one ended, and took its place; "
                        "make a loader for each (`ds.loader(...)`)"
                    )
            self._epoch, self._consumed = epoch + 1, 0
            self._current = None
        finally:
            if self._current is loop:  # a loop that was left, or an error: no worker stays behind
                self.__dict__.pop("_cells", None)
                self._current = None

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


class _CellReader(torch.utils.data.Dataset[Any]):
    """The stored cells of whole batches, as a loader's worker reads them.

    They are padded where the loader is: a padded batch has fifteen times their bytes, or thirty, and its way from
    process to process costs more than reading it.
    """

    def __init__(self, source: BatchSource[Any]) -> None:
        self._source = source

    def __getitem__(self, indices: list[int]) -> Any:
        return self._source.read_cells(indices)


def _pin(batch: Any) -> Any:
    return tuple(part.pin_memory() for part in batch) if isinstance(batch, tuple) else batch.pin_memory()


def _hand_on(cells: Any) -> Any:
    return cells


def _choose_start_method(asked: str | None, dataset: BatchSource[Any]) -> str | None:
    if dataset.may_fork or (asked or multiprocessing.get_start_method()) != "fork":
        return asked
    warnings.warn(
        f"{dataset.ref} is read from a bucket, and its client hangs in forked processes: workers start by `spawn`, so "
        'keep the script\'s own work under `if __name__ == "__main__":`',
        stacklevel=3,
    )
    return "spawn"
