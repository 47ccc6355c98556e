"""Decoded chunks, kept in numbered slots: in the memory of a process, or in a file that processes share.

Chunks are numbered so that a sample's cells are one run of cell addresses (`chunk * CHUNK_CELLS + place`). The first
ones have slots of their own, as many as the budget allows; the others pass through a short queue.
"""

import fcntl
import mmap
import os
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

import google_crc32c
import numpy as np
from jaxtyping import Float
from numpy import ndarray

from storage_schema.arrays import CHUNK_CELLS

_SUM_BYTES = 8
_PAGE = 4096
_FOLDER, _OWNER = "ola-cache-", "owner"


class ChunkCache:
    """Runs of cells, decoded at their first use."""

    def __init__(
        self,
        num_chunks: int,
        dtype: np.dtype[np.generic],
        decode: Callable[[int, Float[ndarray, " cells"]], None],
        *,
        budget: int,
        queued: int,
        file: "SlotFile | None" = None,
    ) -> None:
        """An empty cache, or one over what `file` holds already.

        Args:
            decode: fills an array with the cells of a chunk, by its number.
            budget: bytes of decoded chunks that are kept.
            queued: chunks that are in use at a time, if not all of them fit into the budget.
        """
        chunk_bytes = CHUNK_CELLS * dtype.itemsize
        self._dtype, self._decode = dtype, decode
        most = max(2, budget // chunk_bytes)
        self._num_queued = 0 if num_chunks <= most else min(most, queued)
        self._num_slots = min(num_chunks, most - self._num_queued)
        self._queue: OrderedDict[int, Float[ndarray, " cells"]] = OrderedDict()
        self._is_filled = bytearray(self._num_slots)
        self._file = file.open(self._num_slots, chunk_bytes) if file and self._num_slots else None
        # Memory that nobody has written to takes no room.
        self._slots: Float[ndarray, " cells"] = (
            np.empty(self._num_slots * CHUNK_CELLS, dtype)
            if self._file is None
            else np.frombuffer(self._file.data, dtype, self._num_slots * CHUNK_CELLS)
        )

    def read_run(self, start: int, stop: int) -> Float[ndarray, " cells"]:
        """Cells `[start, stop)` by address, not to be written to."""
        first, last = start // CHUNK_CELLS, (stop - 1) // CHUNK_CELLS
        if last < self._num_slots and all(
            self._is_filled[chunk] or self._fill(chunk) for chunk in range(first, last + 1)
        ):
            return self._slots[start:stop]
        parts = []
        for chunk in range(first, last + 1):
            base = chunk * CHUNK_CELLS
            parts.append(self._get(chunk)[max(start - base, 0) : stop - base])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _fill(self, chunk: int) -> bool:
        """Whether the chunk's slot holds it now; a full disk leaves it empty."""
        cells = self._slots[chunk * CHUNK_CELLS : (chunk + 1) * CHUNK_CELLS]
        if self._file is None:
            self._decode(chunk, cells)
        elif not self._file.holds(chunk):
            fresh = np.empty(CHUNK_CELLS, self._dtype)
            self._decode(chunk, fresh)
            if not self._file.put(chunk, fresh):
                self._enqueue(chunk, fresh)
                return False
        self._is_filled[chunk] = 1
        return True

    def _get(self, chunk: int) -> Float[ndarray, " cells"]:
        if chunk < self._num_slots and (self._is_filled[chunk] or self._fill(chunk)):
            return self._slots[chunk * CHUNK_CELLS : (chunk + 1) * CHUNK_CELLS]
        cells = self._queue.get(chunk)
        if cells is None:
            cells = np.empty(CHUNK_CELLS, self._dtype)
            self._decode(chunk, cells)
            self._enqueue(chunk, cells)
        return cells

    def _enqueue(self, chunk: int, cells: Float[ndarray, " cells"]) -> None:
        # Threads may do the same at once; each step is atomic, and a chunk that went too early is decoded again.
        self._queue[chunk] = cells
        while len(self._queue) > max(1, self._num_queued):
            self._queue.popitem(last=False)


class SlotFile:
    """A file of slots that processes write to without a lock.

    A table at its head has a checksum of each slot, written after the slot and bound to its number and to what the
    file is for. A slot counts only if its checksum is right, so that two writers, a killed one, or another's file do no
    harm.
    """

    def __init__(self, path: Path, purpose: str) -> None:
        self._path, self._purpose = path, google_crc32c.value(purpose.encode())
        self._descriptor, self._is_writable = -1, True

    def open(self, num_slots: int, slot_bytes: int) -> "SlotFile":
        """The file, made where it is missing and lengthened (with a hole) where it is short."""
        self._slot_bytes = slot_bytes
        self._first = -(-num_slots * _SUM_BYTES // _PAGE) * _PAGE
        size = self._first + num_slots * slot_bytes
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        if os.fstat(self._descriptor).st_size < size:
            os.truncate(self._descriptor, size)
        mapped = memoryview(mmap.mmap(self._descriptor, size, prot=mmap.PROT_READ))
        self._sums, self.data = mapped[: self._first].cast("Q"), mapped[self._first :]
        return self

    def holds(self, slot: int) -> bool:
        """Whether a slot holds what was written to it."""
        recorded = self._sums[slot]
        start = slot * self._slot_bytes
        return recorded != 0 and recorded == self._sum(slot, self.data[start : start + self._slot_bytes])

    def put(self, slot: int, cells: Float[ndarray, " cells"]) -> bool:
        """Writes a slot; False, from the first time on, where there is no room for it."""
        if self._is_writable:
            try:
                # Written, not mapped: a mapped write to a full disk kills the process.
                data = cells.tobytes()
                os.pwrite(self._descriptor, data, self._first + slot * self._slot_bytes)
                checksum = self._sum(slot, data)
                os.pwrite(self._descriptor, checksum.to_bytes(_SUM_BYTES, "little"), slot * _SUM_BYTES)
            except OSError:
                self._is_writable = False
        return self._is_writable

    def _sum(self, slot: int, data: bytes | memoryview) -> int:
        checksum: int = google_crc32c.extend(self._purpose ^ slot, bytes(data))
        return checksum | 1 << 32

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


class SharedFolder:
    """A temporary folder for slot files, gone with this object; those of killed processes are swept by the next one."""

    def __init__(self) -> None:
        for stale in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
            with suppress(OSError), (stale / _OWNER).open("rb") as others:
                fcntl.flock(others, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(stale, ignore_errors=True)
        # It gets the name that is swept once its owner is locked; the lock dies with its process.
        hidden = Path(tempfile.mkdtemp(prefix=f".{_FOLDER}"))
        owner = (hidden / _OWNER).open("wb")
        fcntl.flock(owner, fcntl.LOCK_EX)
        self.path = hidden.rename(hidden.with_name(hidden.name.removeprefix(".")))
        self.remove = weakref.finalize(self, _remove_folder, self.path, owner, os.getpid())


def has_room_for(num_bytes: int) -> bool:
    """Whether the place of temporary files has twice as much room."""
    return shutil.disk_usage(tempfile.gettempdir()).free > 2 * num_bytes


def _remove_folder(path: Path, owner: IO[bytes], process: int) -> None:
    if os.getpid() == process:  # a forked worker has a copy of the object
        shutil.rmtree(path, ignore_errors=True)
    owner.close()
