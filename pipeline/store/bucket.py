"""Objects in an S3 bucket, through obstore.

Every object is one put, which S3 makes visible whole or not at all and checks against the SHA-256 that travels with it.
Endpoint, region and credentials come from the usual environment variables (AWS_ENDPOINT_URL, AWS_REGION,
AWS_ACCESS_KEY_ID, ...). What a server answers may hold keys and tokens: no message here repeats it.
"""

import errno
import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from pipeline.store.folder import FolderObjects
from pipeline.store.lease import Lease
from pipeline.store.objects import describe_bytes
from storage_schema.errors import CorruptedObjectError, MissingObjectError, StoreAccessError, StoreUnavailableError
from storage_schema.manifest import StoredObject
from storage_schema.paths import find_cache

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutMode, PutResult

_Answer = TypeVar("_Answer")

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX_PART = re.compile(r"[A-Za-z0-9_+=-][A-Za-z0-9._+=-]*")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_ENDPOINT = re.compile(
    r"(https?)://(?:[^@/?#\s]*@)?([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(?::(\d{1,5}))?(?:/[!-~]*)?", re.IGNORECASE
)
_SERVER_CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")
_NO_BUCKET = "<Code>NoSuchBucket</Code>"
_STATUS = re.compile(r"status code: (\d{3})")

REQUEST_TIME = timedelta(minutes=5)
"""For one request, with the largest shard over a slow line in mind."""
_RETRIES = 6  # over about 6 seconds
_NEVER_AN_ETAG = '"00000000000000000000000000000000"'

_processes: set[int] = set()
"""The processes that have used obstore, as far as this one's memory knows: itself, and those it was forked from."""


def open_bucket(url: str) -> "BucketObjects":
    """The objects below `s3://bucket/prefix`; sends no request.

    Raises:
        StoreAccessError: another scheme, credentials or a query in the URL (which is not repeated), or names that are
            no bucket or prefix.
    """
    scheme = url.partition("://")[0].lower()
    if scheme != "s3":
        raise StoreAccessError(
            f"the store {scheme}://... cannot be used: a store is a folder, or s3://bucket/prefix with --store"
        )
    if any(char in url for char in "@?#"):
        raise StoreAccessError(
            "the store s3://... has credentials or a query in its URL; credentials belong into the environment "
            "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), the URL is s3://bucket/prefix"
        )
    bucket, _, path = url.partition("://")[2].partition("/")
    parts = path.strip("/").split("/") if path.strip("/") else []
    if not _BUCKET.fullmatch(bucket):
        raise StoreAccessError(
            f"the store {url} names no bucket: expected s3://bucket/prefix, a bucket of 3 to 63 small letters, digits, "
            "'-' and '.'; another server than Amazon's is named by AWS_ENDPOINT_URL"
        )
    if wrong := [part for part in parts if not _PREFIX_PART.fullmatch(part)]:
        raise StoreAccessError(f"the store {url}: {wrong[0]!r} may not stand in its prefix; use letters, digits, ._-+=")
    return BucketObjects(bucket, "/".join(parts))


@dataclass(frozen=True)
class BucketObjects:
    """Objects below a prefix of a bucket."""

    bucket: str
    prefix: str
    """Without a `/` at either end; empty for the bucket itself."""
    _clients: dict[timedelta, S3Store] = field(default_factory=dict, init=False, compare=False, repr=False)
    _etags: dict[str, str] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Of what was put here, so that a later put by a process that should have stopped does not go unseen."""
    _copies: dict[str, Path] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Local copies by digest, once this process has checked them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return BucketObjects, (self.bucket, self.prefix)

    @property
    def is_local(self) -> bool:
        return False

    def describe(self, key: str = "") -> str:
        return "/".join(part for part in ("s3:/", self.bucket, self.prefix, key) if part)

    def read(self, key: str) -> bytes:
        return self.read_with_etag(key)[0]

    def find_size(self, key: str) -> int | None:
        try:
            return self._ask(key, obstore.head)["size"]
        except FileNotFoundError:
            return None

    def list_names(self, prefix: str) -> list[str]:
        found = self._ask(prefix, lambda client, place: obstore.list_with_delimiter(client, place or None))
        names = [meta["path"] for meta in found["objects"]] + [f"{path}/" for path in found["common_prefixes"]]
        return sorted(name.removeprefix(f"{self._locate(prefix)}/") for name in names)

    def list_sizes(self, prefix: str) -> dict[str, int]:
        return {name: meta["size"] for name, meta in self._list(prefix).items()}

    def _list(self, prefix: str) -> "dict[str, ObjectMeta]":
        metas = self._ask(prefix, lambda client, place: obstore.list(client, place or None).collect())
        return {meta["path"].removeprefix(f"{self._locate(prefix)}/"): meta for meta in metas}

    def find_changed(self, prefix: str, recorded: Mapping[str, StoredObject]) -> set[str]:
        found = self._list(prefix)
        return {
            name
            for name, stored in recorded.items()
            if (meta := found.get(name)) is None
            or meta["size"] != stored.num_bytes
            or self._etags.get(meta["path"], meta["e_tag"]) != meta["e_tag"]
        }

    def localize(self, key: str, stored: StoredObject) -> Path:
        path = self._copies.get(stored.sha256)
        if path is None or not path.is_file():
            # A copy is checked by every process that reads it: caches are damaged, too.
            cache, name = FolderObjects(find_cache("objects")), f"{stored.sha256[:2]}/{stored.sha256}"
            if cache.find_changed("", {name: stored}):
                cache.replace(name, self._fetch(key, stored))
            path = self._copies[stored.sha256] = cache.localize(name, stored)
        return path

    def _fetch(self, key: str, stored: StoredObject) -> bytes:
        place = self.describe(key)
        try:
            data = self.read(key)
        except FileNotFoundError:
            raise MissingObjectError(f"object {place} is missing; restore it from a copy") from None
        if (found := describe_bytes(data)) != stored:
            raise CorruptedObjectError(
                f"object {place} is not the one that was written: {found.num_bytes} bytes with SHA-256 "
                f"{found.sha256[:16]}..., expected {stored.num_bytes} with {stored.sha256[:16]}...; "
                "restore it from a copy"
            )
        return data

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._put(key, data, "create", REQUEST_TIME) is not None

    def replace(self, key: str, data: bytes) -> None:
        if self._put(key, data, "overwrite", REQUEST_TIME) is None:
            raise StoreUnavailableError(f"{self.describe(key)}: the server refused a put without a condition")

    def put_on_condition(self, key: str, data: bytes, etag: str | None, time: timedelta = REQUEST_TIME) -> str | None:
        """The object's new ETag, where it had the given one (None: where it was absent); None where not."""
        return self._put(key, data, "create" if etag is None else {"e_tag": etag}, time)

    def _put(self, key: str, data: bytes, mode: "PutMode", time: timedelta) -> str | None:
        def put(client: S3Store, place: str) -> "PutResult":
            # In one part: an upload in several would leave invisible, paid-for parts behind a killed process.
            return obstore.put(client, place, data, mode=mode, use_multipart=False)

        try:
            result = self._ask(key, put, time)
        except (AlreadyExistsError, PreconditionError):
            return None
        etag = self._etags[self._locate(key)] = result["e_tag"] or ""
        return etag

    def read_with_etag(self, key: str, time: timedelta = REQUEST_TIME) -> tuple[bytes, str]:
        """An object's bytes and ETag; raises as `read`."""

        def get(client: S3Store, place: str) -> tuple[bytes, str]:
            result = obstore.get(client, place)
            return bytes(result.bytes()), result.meta["e_tag"] or ""

        return self._ask(key, get, time)

    def remove(self, key: str) -> None:
        """Removes an object, if it is there."""
        self._ask(key, lambda client, place: obstore.delete(client, [place]))

    def remove_tree(self, prefix: str) -> None:
        if places := [meta["path"] for meta in self._list(prefix).values()]:
            self._ask(prefix, lambda client, _: obstore.delete(client, places))

    def sweep(self, prefix: str, *, deep: bool = False) -> None:
        pass  # an upload that was cut off leaves nothing

    def is_owned(self, prefix: str) -> bool:
        return Lease(self, f"{prefix}.lease").is_renewed()

    def own(self, prefix: str, on_wait: Callable[[], None]) -> AbstractContextManager[Lease]:
        return Lease(self, f"{prefix}.lease").hold(on_wait)

    def check_writable(self) -> None:
        # A put on a condition that no object meets writes nothing, and is refused first where the right is missing.
        try:
            self.put_on_condition("_work/probe", b"", _NEVER_AN_ETAG)
        except StoreUnavailableError as error:
            raise StoreAccessError(f"the store {self.describe()} cannot be written: {error}") from None

    def _locate(self, key: str) -> str:
        return "/".join(part for part in (self.prefix, key) if part)

    def _connect(self, time: timedelta) -> S3Store:
        if _processes and os.getpid() not in _processes:
            raise StoreUnavailableError(
                f"{self.describe()}: this process was forked from one that has used the store already, and would hang; "
                "start workers with `spawn` or `forkserver`"
            )
        _processes.add(os.getpid())
        if time not in self._clients:
            self._clients[time] = S3Store(
                self.bucket,
                conditional_put="etag",
                checksum_algorithm="SHA256",
                client_options={"allow_http": _find_endpoint()[0] == "http", "timeout": time},
                retry_config={"max_retries": _RETRIES},
            )
        return self._clients[time]

    def _ask(self, key: str, request: Callable[[S3Store, str], _Answer], time: timedelta = REQUEST_TIME) -> _Answer:
        """What a request gives; what obstore raises becomes an error without a word of what a server answered."""
        try:
            return request(self._connect(time), self._locate(key))
        except (AlreadyExistsError, PreconditionError):
            raise  # both end in `_put`
        except FileNotFoundError as error:
            problem = _explain(error) if _NO_BUCKET in str(error) else None
        except (BaseError, ValueError, OSError) as error:
            problem = _explain(error)
        # Outside the handlers, so that the errors do not carry obstore's as their context.
        if problem is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.describe(key))
        raise StoreUnavailableError(f"{self.describe(key)}: {problem}")


def _find_endpoint() -> tuple[str, str]:
    """The scheme and the host of the server that the environment names; Amazon's where it names none."""
    name = next((name for name in _ENDPOINTS if os.environ.get(name)), None)
    if name is None:
        return "https", "Amazon S3"
    # A client that is given anything else aborts with a stack of its own, which repeats it.
    match = _ENDPOINT.fullmatch(os.environ[name])
    if not match or int(match[3] or 0) >= 2**16:
        raise StoreAccessError(f"{name} is no server's URL: expected http://host:port or https://host[:port][/path]")
    return match[1].lower(), match[2]


def _explain(error: Exception) -> str:
    text = str(error)
    code, status = _SERVER_CODE.search(text), _STATUS.search(text)
    answer = " ".join(match[1] for match in (status, code) if match)
    _, server = _find_endpoint()
    if _NO_BUCKET in text:
        return f"{server} has no such bucket; make it, or look at AWS_ENDPOINT_URL"
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or answer[:3] in ("401", "403"):
        return f"{server} refuses it to these credentials ({answer}); look at AWS_ACCESS_KEY_ID and what it may do"
    if answer:
        return f"{server} answers {answer}; run the same command again when it works"
    return (
        f"{server} cannot be reached ({type(error).__name__}); look at AWS_ENDPOINT_URL, AWS_REGION, the network, "
        "and whether credentials are set (AWS_ACCESS_KEY_ID)"
    )
