"""Ownership in an object store: a small object that its owner keeps renewing.

A bucket has no locks that die with a process. The lease names its owner and counts beats; each beat is a put on the
condition that the lease is still the one that this owner wrote. Whoever sees the same lease for `LEASE_SECONDS` on its
own clock takes it over, by a put on the same condition: of all who try, one succeeds, and clocks need not agree.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import uuid4

from storage_schema.errors import LostOwnershipError, StoreUnavailableError

if TYPE_CHECKING:
    from pipeline.store.bucket import BucketObjects

LEASE_SECONDS = 60.0
"""How long a lease must stay unchanged before others take it over."""
_BEATS_A_LEASE = 6
_BEAT_TIME = timedelta(seconds=10)
"""For one request: a beat that takes longer is late."""
_SAFE_SHARE = 0.5
"""An owner goes on without asking again while its last beat is younger than this share of `LEASE_SECONDS`."""


class Lease:
    """One process's hold on a key, or its wish for it."""

    def __init__(self, objects: "BucketObjects", key: str) -> None:
        self._objects, self._key, self._owner = objects, key, uuid4().hex
        self._beat, self._etag = 0, ""
        self._began = self._confirmed = 0.0
        self._is_lost = False
        self._lock = threading.Lock()

    @contextmanager
    def hold(self, on_wait: Callable[[], None]) -> Iterator["Lease"]:
        """Within it the lease is this process's, and renewed by a thread; others are waited for."""
        self._acquire(on_wait)
        stop = threading.Event()
        thread = threading.Thread(target=self._keep, args=(stop,), daemon=True, name="ola-lease")
        thread.start()
        try:
            yield self
        finally:
            stop.set()
            thread.join()
            self._release()

    def check(self) -> None:
        """Nothing, while the lease is held; asks the store where the last beat is not recent.

        Raises:
            LostOwnershipError: another process has taken the lease over, or it is gone.
            StoreUnavailableError: that cannot be found out.
        """
        with self._lock:
            if not self._is_lost and time.monotonic() - self._confirmed > _SAFE_SHARE * LEASE_SECONDS:
                self._renew()
            if self._is_lost:
                raise LostOwnershipError(
                    f"{self._objects.describe(self._key)}: another process took this work over, since this one gave no "
                    f"sign of life for {LEASE_SECONDS:.0f} seconds; run the same command again to see what became of it"
                )

    def is_renewed(self) -> bool:
        """Whether an owner renews the lease; False once it stayed the same for `LEASE_SECONDS`, or is not there."""
        first, began = self._read(), time.monotonic()
        while first is not None and time.monotonic() - began < LEASE_SECONDS:
            time.sleep(LEASE_SECONDS / _BEATS_A_LEASE / 4)
            found = self._read()
            if found is None or found[2] != first[2]:
                return found is not None
        return False

    def _acquire(self, on_wait: Callable[[], None]) -> None:
        seen, since, is_waiting = "", time.monotonic(), False
        while not self._put(None):
            found = self._read()
            if found is None:
                continue
            etag = found[2]
            if etag != seen:
                seen, since = etag, time.monotonic()
            if self._recognize(found):
                return
            if time.monotonic() - since >= LEASE_SECONDS:
                if self._put(etag):
                    return
                continue
            if not is_waiting:
                on_wait()
                is_waiting = True
            time.sleep(LEASE_SECONDS / _BEATS_A_LEASE / 4)

    def _keep(self, stop: threading.Event) -> None:
        while not stop.wait(LEASE_SECONDS / _BEATS_A_LEASE):
            with self._lock:
                if self._is_lost:
                    return
                try:
                    self._renew()
                except StoreUnavailableError:
                    continue  # the next beat, or the owner's own check, asks again

    def _renew(self) -> None:
        while not self._put(self._etag):
            found = self._read()
            if found is None or found[0] != self._owner:
                self._is_lost = True
                return
            if self._recognize(found):
                return
            self._etag = found[2]  # of an earlier beat, which was thought to have failed

    def _put(self, etag: str | None) -> bool:
        self._began = time.monotonic()
        self._beat += 1
        data = json.dumps({"owner": self._owner, "beat": self._beat}).encode()
        written = self._objects.put_on_condition(self._key, data, etag, _BEAT_TIME)
        if written is None:
            return False
        self._etag, self._confirmed = written, self._began
        return True

    def _recognize(self, found: tuple[str, int, str]) -> bool:
        # A put whose answer was lost on the way is repeated, and refused, since it is in place already.
        if found[:2] != (self._owner, self._beat):
            return False
        self._etag, self._confirmed = found[2], self._began
        return True

    def _read(self) -> tuple[str, int, str] | None:
        try:
            data, etag = self._objects.read_with_etag(self._key, _BEAT_TIME)
        except FileNotFoundError:
            return None
        try:
            values = json.loads(data)
            return str(values["owner"]), int(values["beat"]), etag
        except (ValueError, KeyError, TypeError):
            return "", 0, etag  # whatever it is, nobody renews it

    def _release(self) -> None:
        try:
            self.check()
            self._objects.remove(self._key)
        except (LostOwnershipError, StoreUnavailableError):
            return  # another's by now, or left to run out
