"""What the store costs and how fast it is read, beside other ways to keep the same maps, in turn in one run.

Maps of 20,000 samples, orders 1 to 3. Lengths are those of `ud-ewt` train in tokens of `minilm-l6`, its texts repeated
to that number. Running an LM over all of them would take longer than the rest: the maps of REAL_MAPS texts are
computed, and each sample gets one of the nearest lengths above its own, cut to it, every value changed a little, rows
made to sum to 1 again.

    python -m tests.bench.store_speed MODEL CORPUS_FOLDER NUM_SAMPLES

It runs in a process of its own: the test suite's checks of shapes would be measured, too.
"""

import gc
import importlib.util
import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipeline.extraction import prepare_plans
from pipeline.plan import plan_versions
from storage_schema.arrays import Packing, count_cells, pack_map
from tests.bench.store_peers import (
    BATCH_SIZE,
    CODEC,
    PEERS,
    LmdbBlosc,
    LmdbPickle,
    MemoryMap,
    Ours,
    Peer,
    Source,
)

ROUNDS = 3
REAL_MAPS = 200
NEAREST = 8
NOISE = 0.1
"""Standard deviation of the logarithm of what a value is multiplied with."""
NUM_MAPS = 3
NUM_BATCHES = 64
"""Batches that are read of a store whose epochs are all alike."""
NUM_SINGLE = 2000
"""Items that are read one by one at random."""
GOAL_BYTES = {"full": 0.45, "lower": 0.25}


def read_texts(folder: Path, number: int) -> list[str]:
    lines = (folder / "en_ewt-ud-train.conllu").read_text(encoding="utf-8").splitlines()
    texts = [line.removeprefix("# text = ") for line in lines if line.startswith("# text = ")]
    return list(itertools.islice(itertools.cycle(texts), number))


def compute_real_maps(model: str, corpus: str) -> tuple[list[np.ndarray], Packing, int]:
    """Maps [3, T, T] of REAL_MAPS texts of evenly spread lengths, shortest first; packing; number of layers."""
    (plan,) = plan_versions(model, corpus)
    loaded, tokens = prepare_plans([plan], "auto")
    table = tokens[plan.dataset]
    by_length = np.argsort(table.lengths, kind="stable")
    maps = []
    for index in by_length[np.linspace(0, len(by_length) - 1, REAL_MAPS).astype(int)]:
        start = table.starts[index]
        ids = torch.from_numpy(table.input_ids[start : start + table.lengths[index]])[None].long()
        maps.append(loaded.compute_maps(ids, torch.ones_like(ids), (1, 2, 3))[0].cpu().numpy())
    return maps, loaded.packing, loaded.num_layers


def vary_maps(real: list[np.ndarray], lengths: np.ndarray) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    known = np.array([maps.shape[-1] for maps in real])
    varied = []
    for length in lengths.tolist():
        first = min(int(np.searchsorted(known, length)), len(real) - 1)
        nearest = real[min(first + int(generator.integers(NEAREST)), len(real) - 1)]
        size = min(length, nearest.shape[-1])
        maps = np.zeros((3, length, length), np.float32)
        maps[:, :size, :size] = nearest[:, :size, :size]
        maps[:, range(size, length), range(size, length)] = 1
        maps *= np.exp(NOISE * generator.standard_normal(maps.shape, np.float32))
        varied.append(maps / maps.sum(-1, keepdims=True))
    return varied


def measure_ratio(maps: list[np.ndarray], packing: Packing) -> float:
    raw = np.concatenate([pack_map(one, packing).astype(np.float16) for values in maps for one in values])
    return raw.nbytes / len(CODEC.encode(raw))


def make_source(model: str, corpus: Path, num_samples: int, folder: Path) -> Source:
    file = folder / "ud-ewt.txt"
    file.write_text("\n".join(read_texts(corpus, num_samples)) + "\n", encoding="utf-8")
    (plan,) = plan_versions("minilm-l6", f"text:{file}", maps=(1, 2, 3))
    _, tokens = prepare_plans([plan], "cpu")
    table = tokens[plan.dataset]
    real, packing, num_layers = compute_real_maps(model, f"text:{file}")
    maps = vary_maps(real, table.lengths)
    ratios = [measure_ratio(some, packing) for some in (real, maps[:REAL_MAPS])]
    print(
        f"\n{model}: {len(maps)} samples, {int(table.lengths.sum())} tokens; as float16 real maps compress "
        f"{ratios[0]:.2f} x, varied ones {ratios[1]:.2f} x"
    )
    return Source(maps, (1, 2, 3), packing, plan, table, num_layers)


def sync_files(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def count_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def time_action(action: Callable[[], object]) -> float:
    gc.collect()
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure_epoch(peer: Peer, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Samples and MB of real cells a second.

    A store that keeps nothing of what it read costs the same in every batch: NUM_BATCHES of them are enough, and the
    start of its workers, which a whole epoch would hide, is left out.
    """
    gc.collect()
    began = time.perf_counter()
    iterator = iter(batches)
    if not peer.keeps_what_it_read:
        next(iterator)
        began = time.perf_counter()
    seen = [lengths for _, lengths in itertools.islice(iterator, None if peer.keeps_what_it_read else NUM_BATCHES)]
    seconds = time.perf_counter() - began
    lengths = torch.cat(seen).tolist()
    cells = sum(count_cells(length, peer.packing) for length in lengths)
    return len(lengths) / seconds, 4 * NUM_MAPS * cells / 1e6 / seconds


def measure_peer(peer_class: type[Peer], folder: Path, source: Source, megabytes: float) -> dict[str, float]:
    """One round of one peer: MB (float32 of the real cells) and samples a second. Leaves its store behind."""

    def write() -> None:
        peer_class.write(folder, source)
        sync_files(folder)

    found = {"write MB/s": megabytes / time_action(write), "MB": count_bytes(folder) / 1e6}
    peer = peer_class(folder, source)
    for num_workers in (0, 2):
        loader = peer.loader(num_workers, shuffle=True)
        for epoch in ("first", "later"):
            found[f"{epoch} epoch, {num_workers} workers"], _ = measure_epoch(peer, loader)
        del loader
    _, found["scan MB/s"] = measure_epoch(peer, peer.loader(0, shuffle=False))
    if isinstance(peer, MemoryMap):
        found["cells alone MB/s"] = megabytes / time_action(peer.convert_cells)
    chosen = np.random.default_rng(0).integers(len(source), size=NUM_SINGLE).tolist()
    for state in ("first", "again"):
        found[f"single items, {state}"] = NUM_SINGLE / time_action(lambda: [peer[index] for index in chosen])
    return found


def check_same_maps(peer: Peer, source: Source) -> None:
    """Some maps are what was written, and an epoch of ours holds every row once."""
    for index in range(0, len(source), max(1, len(source) // 50)):
        assert np.abs(peer[index].numpy() - source.maps[index]).max() <= 2.0**-11
    if isinstance(peer, Ours):
        found = [(len(lengths), float(maps.sum())) for maps, lengths in peer.loader(0, shuffle=True)]
        num_rows = NUM_MAPS * int(source.tokens.lengths.sum())
        assert sum(number for number, _ in found) == len(source)
        assert abs(sum(cells for _, cells in found) - num_rows) <= 1e-3 * num_rows


def measure_peers(source: Source, folder: Path) -> None:
    peers = [peer for peer, library in PEERS if library is None or importlib.util.find_spec(library)]
    absent = [peer.name for peer, library in PEERS if peer not in peers]
    print(f"left out, not installed: {'; '.join(absent) or 'none'}")
    cells = sum(len(source.names) * count_cells(int(length), source.packing) for length in source.tokens.lengths)
    megabytes = 4 * cells / 1e6
    rounds: dict[type[Peer], list[dict[str, float]]] = {peer: [] for peer in peers}
    for number in range(ROUNDS):
        print(f"round {number + 1} of {ROUNDS}", flush=True)
        for peer in peers:
            rounds[peer].append(measure_peer(peer, folder / "store", source, megabytes))
            if len(rounds[peer]) == 1:
                check_same_maps(peer(folder / "store", source), source)
            shutil.rmtree(folder / "store")
    medians = {
        peer: {key: statistics.median(found[key] for found in measured) for key in measured[0]}
        for peer, measured in rounds.items()
    }
    print(f"packing {source.packing}: {megabytes:.0f} MB of float32 cells, batches of {BATCH_SIZE}, {ROUNDS} rounds\n")
    print(format_table(medians))
    print(format_goals(medians, source.packing))


def format_table(medians: dict[type[Peer], dict[str, float]]) -> str:
    keys = list(medians[Ours])
    rows = [["store", *keys]] + [
        [peer.name, *(f"{found[key]:,.0f}" for key in keys)] for peer, found in medians.items()
    ]
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def format_goals(medians: dict[type[Peer], dict[str, float]], packing: str) -> str:
    ours = medians[Ours]

    def compare(key: str, other: type[Peer], goal: str) -> str:
        if other not in medians:
            return f"{key}: {other.name} is not installed"
        return f"{key}: {ours[key] / medians[other][key]:.2f} x {other.name} (goal {goal})"

    later = [f"later epoch, {workers} workers" for workers in (0, 2)]
    return "\n".join(
        [
            "",
            compare("MB", LmdbPickle, f"at most {GOAL_BYTES[packing]}"),
            compare("write MB/s", LmdbPickle, "1"),
            *(compare(f"first epoch, {workers} workers", LmdbPickle, "2") for workers in (0, 2)),
            *(compare(key, LmdbPickle, "5") for key in later),
            *(compare(key, LmdbBlosc, "1") for key in [*later, "single items, again"]),
            compare("scan MB/s", MemoryMap, "0.5"),
            f"cells of the memory map alone, not made into maps: {medians[MemoryMap]['cells alone MB/s']:,.0f} MB/s",
        ]
    )


if __name__ == "__main__":
    torch.set_num_threads(1)  # as in a loader's worker; two threads on busy cores wait for one another
    with tempfile.TemporaryDirectory() as made:
        measure_peers(make_source(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Path(made)), Path(made))
