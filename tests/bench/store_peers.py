"""The stores that are compared: each takes the same maps, and gives them back as padded float32 batches.

Axis names: B batch, M maps, T tokens. `source.maps` holds one float32 [M, T, T] array a sample.
"""

import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numcodecs import Blosc
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pipeline.extraction import build_index, count_losses
from pipeline.plan import Plan
from pipeline.readers import open_dataset
from pipeline.store.layout import open_store_for_writing
from pipeline.store.ownership import own_work
from pipeline.store.samples import write_samples
from pipeline.store.writer import VersionWriter
from pipeline.tokens.encode import TokenTable
from storage_schema.arrays import CHUNK_CELLS, Packing, count_cells, name_array, pack_map, plan_partitions, unpack_map

BATCH_SIZE = 32
CODEC = Blosc("zstd", 5, Blosc.BITSHUFFLE)  # what ours has


@dataclass(frozen=True)
class Source:
    """What is stored: maps, and for ours the texts and tokens that stand beside them."""

    maps: list[np.ndarray]
    names: tuple[int, ...]
    packing: Packing
    plan: Plan
    tokens: TokenTable
    num_layers: int

    def __len__(self) -> int:
        return len(self.maps)

    def pack(self, index: int) -> np.ndarray:
        """The stored cells of a sample's maps in float16, [M, cells]."""
        return np.stack([pack_map(values, self.packing) for values in self.maps[index].astype(np.float16)])


def collate(items: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Padded float32 [B, M, T, T], and lengths [B]."""
    lengths = torch.tensor([item.shape[-1] for item in items])
    longest = int(lengths.max())
    batch = torch.zeros(len(items), items[0].shape[0], longest, longest)
    for row, item in enumerate(items):
        batch[row, :, : item.shape[-1], : item.shape[-1]] = item
    return batch, lengths


class Peer(Dataset):
    """A store that is open. Each process that reads opens it for itself."""

    name: str
    keeps_what_it_read = False
    """Whether epochs differ, so that only whole ones tell something."""

    def __init__(self, folder: Path, source: Source) -> None:
        self.folder, self.num_samples, self.packing = folder, len(source), source.packing
        self.lengths = source.tokens.lengths
        self._opened: dict[int, Any] = {}

    @staticmethod
    def write(folder: Path, source: Source) -> None:
        raise NotImplementedError

    def open(self) -> Any:
        raise NotImplementedError

    @property
    def opened(self) -> Any:
        if os.getpid() not in self._opened:
            self._opened = {os.getpid(): self.open()}
        return self._opened[os.getpid()]

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Tensor:
        raise NotImplementedError

    def loader(self, num_workers: int, *, shuffle: bool) -> Any:
        """Epoch after epoch of batches (maps, lengths), of a store opened anew."""
        self._opened.clear()
        return DataLoader(
            self, BATCH_SIZE, shuffle=shuffle, num_workers=num_workers, collate_fn=collate,
            persistent_workers=num_workers > 0,
        )  # fmt: skip


class Ours(Peer):
    name = "ours"
    keeps_what_it_read = True

    @staticmethod
    def write(folder: Path, source: Source) -> None:
        plan, tokens = source.plan, source.tokens
        store = open_store_for_writing(folder)
        partitions = plan_partitions(
            tokens.lengths, packing=source.packing, partition_samples=plan.recipe.partition_samples
        )
        with own_work(store, plan.recipe) as owner:
            samples_path, samples = write_samples(
                store, plan.dataset.corpus, plan.recipe.split, plan.recipe.corpus_sha256, plan.samples.samples
            )
            writer = VersionWriter(
                store, plan.dataset, plan.recipe, partitions, build_index(plan, tokens, partitions, source.packing),
                packing=source.packing, num_layers=source.num_layers, owner=owner,
            )  # fmt: skip
            for partition in partitions:
                packed = [source.pack(index) for index in range(partition.start, partition.stop)]
                cells = np.concatenate(packed, axis=1)
                writer.write_partition(partition, dict(zip(map(name_array, source.names), cells, strict=True)))
            writer.finish(
                run={}, packing=source.packing, num_layers=source.num_layers, pad_token_id=tokens.pad_token_id,
                samples_path=samples_path, samples=samples, counts=count_losses(plan, tokens, partitions),
                model_licence="", corpus_licence="",
            )  # fmt: skip

    def __init__(self, folder: Path, source: Source) -> None:
        super().__init__(folder, source)
        self.ref = str(source.plan.dataset)

    def open(self) -> Any:
        return open_dataset(self.ref, self.folder)

    def __getitem__(self, index: int) -> Tensor:
        return self.opened[index].maps

    def loader(self, num_workers: int, *, shuffle: bool) -> Any:
        self._opened.clear()
        return _MapsAndLengths(self.open().loader(BATCH_SIZE, shuffle=shuffle, num_workers=num_workers))


@dataclass(frozen=True)
class _MapsAndLengths:
    loader: Any

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.loader:
            yield batch.maps, batch.attention_mask.sum(1)


class LmdbPickle(Peer):
    """The paper's way of keeping a sample. What is unpickled is what this process wrote a moment ago."""

    name = "LMDB, pickled float32 tensors"

    @staticmethod
    def write(folder: Path, source: Source) -> None:
        _write_lmdb(
            folder,
            (
                pickle.dumps(
                    {f"order_{name}": torch.from_numpy(values) for name, values in zip(source.names, maps, strict=True)}
                )
                for maps in source.maps
            ),
        )

    def open(self) -> Any:
        return _open_lmdb(self.folder)

    def __getitem__(self, index: int) -> Tensor:
        return torch.stack(list(pickle.loads(self.opened.get(b"%08d" % index)).values()))


class LmdbBlosc(Peer):
    name = "LMDB, float16 Blosc"

    @staticmethod
    def write(folder: Path, source: Source) -> None:
        _write_lmdb(folder, (CODEC.encode(source.pack(index)) for index in range(len(source))))

    def open(self) -> Any:
        return _open_lmdb(self.folder)

    def __getitem__(self, index: int) -> Tensor:
        cells = np.frombuffer(CODEC.decode(self.opened.get(b"%08d" % index)), np.float16)
        return _unpack(cells, int(self.lengths[index]), self.packing)


def _write_lmdb(folder: Path, values: Iterator[bytes]) -> None:
    import lmdb

    with lmdb.open(str(folder), map_size=1 << 40) as environment, environment.begin(write=True) as transaction:
        for index, value in enumerate(values):
            transaction.put(b"%08d" % index, value, append=True)


def _open_lmdb(folder: Path) -> Any:
    import lmdb

    return lmdb.open(str(folder), readonly=True, lock=False, readahead=False).begin(buffers=True)


def _unpack(cells: np.ndarray, length: int, packing: Packing) -> Tensor:
    rows = cells.reshape(-1, count_cells(length, packing))
    return torch.from_numpy(np.stack([unpack_map(row, length, packing) for row in rows]).astype(np.float32))


class Hdf5(Peer):
    name = "HDF5, a float32 dataset a sample"

    @staticmethod
    def write(folder: Path, source: Source) -> None:
        import h5py

        folder.mkdir()
        with h5py.File(folder / "maps.h5", "w", libver="latest") as file:
            for index, maps in enumerate(source.maps):
                file.create_dataset(f"{index:08d}", data=maps)

    def open(self) -> Any:
        import h5py

        return h5py.File(self.folder / "maps.h5", "r", libver="latest")

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.opened[f"{index:08d}"][()])


class Arrow(Peer):
    name = "Arrow (datasets), float32 lists"

    @staticmethod
    def write(folder: Path, source: Source) -> None:
        from datasets import Features, List, Value
        from datasets.arrow_writer import ArrowWriter

        folder.mkdir()
        features = Features({"maps": List(Value("float32"))})
        with ArrowWriter(features=features, path=str(folder / "maps.arrow")) as writer:
            for maps in source.maps:
                writer.write({"maps": maps.reshape(-1)})
            writer.finalize()

    def open(self) -> Any:
        import datasets

        return datasets.Dataset.from_file(str(self.folder / "maps.arrow")).with_format("numpy")

    def __getitem__(self, index: int) -> Tensor:
        length = int(self.lengths[index])
        return torch.from_numpy(self.opened[int(index)]["maps"].reshape(-1, length, length).copy())


class LitData(Peer):
    name = "LitData, float32 tensors"

    @staticmethod
    def write(folder: Path, source: Source) -> None:
        from litdata.streaming.writer import BinaryWriter

        folder.mkdir()
        writer = BinaryWriter(str(folder), chunk_bytes="64MB")
        for index, maps in enumerate(source.maps):
            writer[index] = torch.from_numpy(maps)
        writer.done()
        writer.merge()

    def open(self) -> Any:
        from litdata import StreamingDataset

        return StreamingDataset(str(self.folder))

    def __getitem__(self, index: int) -> Tensor:
        return self.opened[int(index)]

    def loader(self, num_workers: int, *, shuffle: bool) -> Any:
        self._opened.clear()
        from litdata import StreamingDataLoader, StreamingDataset

        dataset = StreamingDataset(str(self.folder), shuffle=shuffle)
        return StreamingDataLoader(
            dataset,
            batch_size=BATCH_SIZE,
            num_workers=num_workers,
            collate_fn=collate,
            persistent_workers=num_workers > 0,
        )


class MemoryMap(Peer):
    """Packed float16 cells, one sample after another, without compression, checksum or index."""

    name = "raw memory map, float16 cells"
    keeps_what_it_read = True  # as the page cache does

    @staticmethod
    def write(folder: Path, source: Source) -> None:
        folder.mkdir()
        with (folder / "cells").open("wb") as file:
            for index in range(len(source)):
                file.write(source.pack(index).tobytes())

    @cached_property
    def starts(self) -> np.ndarray:
        return np.cumsum([0, *(3 * count_cells(int(length), self.packing) for length in self.lengths)])

    def open(self) -> Any:
        return np.memmap(self.folder / "cells", np.float16, "r")

    def convert_cells(self) -> None:
        """Reads every cell in order as float32: what reading costs without making maps of them."""
        for start in range(0, len(self.opened), CHUNK_CELLS):
            np.asarray(self.opened[start : start + CHUNK_CELLS], np.float32)

    def __getitem__(self, index: int) -> Tensor:
        cells = self.opened[self.starts[index] : self.starts[index + 1]]
        return _unpack(cells, int(self.lengths[index]), self.packing)


PEERS: tuple[tuple[type[Peer], str | None], ...] = (
    (Ours, None),
    (LmdbPickle, "lmdb"),
    (LmdbBlosc, "lmdb"),
    (Hdf5, "h5py"),
    (Arrow, None),
    (LitData, "litdata"),
    (MemoryMap, None),
)
"""Every peer, with the library that it needs beside ours."""
