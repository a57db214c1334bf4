"""An object store as storage, through obstore: S3 and compatible stores, Google Cloud Storage, Azure Blobs.

Credentials, region and endpoint come from the environment, under the names that obstore and the stores' own tools use
(`AWS_*`, `GOOGLE_*`, `AZURE_*`). Large objects are uploaded in parts; an incomplete upload is not an object.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import obstore
from obstore.store import from_url

from ckpt_engine.tiers.arrival import PartSums, Sent
from ckpt_engine.tiers.storage import Entry
from ckpt_engine.worker_thread import WorkerThread
from flyball.contracts.errors import (
    CheckpointError,
    ConfigurationError,
    CorruptShard,
    FlyballError,
    NotAsWritten,
    StorageFull,
    Unauthorized,
    Unreachable,
)

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config

_PART_BYTES = 8 << 20
_MAX_PARTS = 10_000  # S3's limit; larger shards have larger parts
_IN_FLIGHT_BYTES = 24 << 20  # parts being uploaded; with one more being read this stays within 64 MiB per rank
_WINDOW_BYTES = 8 << 20  # per request, whose latency equals the transfer of megabytes
_WINDOWS_AHEAD = 2
_MAX_RETRIES = 10
_MAX_CONNECT_S = 5.0
_MEBIBYTE = 1 << 20


class ObjectStorage:
    """The objects below one URL."""

    def __init__(self, url: str, *, timeout_s: float, retry_s: float) -> None:
        """`timeout_s` limits one request, for at most one part. After `retry_s` a failed request is not repeated. Does
        not access the store yet. Raises ConfigurationError."""
        self.place = url.rstrip("/")
        client: ClientConfig = {
            "timeout": timedelta(seconds=timeout_s),
            "connect_timeout": timedelta(seconds=min(timeout_s, _MAX_CONNECT_S)),
        }
        if os.environ.get("AWS_ENDPOINT_URL", os.environ.get("AWS_ENDPOINT", "")).startswith("http://"):
            client["allow_http"] = True  # as the endpoint's URL says
        retry: RetryConfig = {"max_retries": _MAX_RETRIES, "retry_timeout": timedelta(seconds=retry_s)}
        self._is_s3 = self.place.startswith("s3://")
        with self._explained("open"):
            self._store: ObjectStore = (
                from_url(self.place, config=s3_config(os.environ), client_options=client, retry_config=retry)
                if self._is_s3
                else from_url(self.place, client_options=client, retry_config=retry)
            )

    def write(self, name: str, parts: Iterable[bytes | memoryview], size_bytes: int) -> None:
        part_bytes = max(_PART_BYTES, -(-size_bytes // _MAX_PARTS // _MEBIBYTE) * _MEBIBYTE)
        is_multipart = size_bytes > part_bytes
        sent, sums = Sent(), PartSums(part_bytes, is_multipart=is_multipart)
        # Upload copies: the memory behind the parts may change before a request is complete.
        copies: Iterable[bytes] = (bytes(part) for part in sent.passing(parts))
        if self._is_s3:
            copies = sums.passing(copies)
        with self._explained(name):
            if not is_multipart:
                obstore.put(self._store, name, b"".join(copies), use_multipart=False)
            else:
                obstore.put(
                    self._store,
                    name,
                    copies,
                    use_multipart=True,
                    chunk_size=part_bytes,
                    max_concurrency=max(1, _IN_FLIGHT_BYTES // part_bytes),
                )
            there = obstore.head(self._store, name)
        if self._is_s3 and there["size"] == sent.size_bytes and sums.match(there["e_tag"]):
            return
        try:
            with self.open(name) as stored:
                sent.check(f"{self.place}/{name}", stored.size_bytes, stored.read_into)
        except NotAsWritten:
            with contextlib.suppress(FlyballError, OSError):  # no manifest names it
                self.remove([name])
            raise

    def read(self, name: str, limit_bytes: int) -> bytes:
        with self._explained(name):
            answer = obstore.get(self._store, name)
            size_bytes = answer.meta["size"]
            if size_bytes > limit_bytes:
                raise CorruptShard(f"{self.place}/{name} has {size_bytes} bytes, the limit is {limit_bytes}.")
            return answer.bytes().to_bytes()

    @contextmanager
    def open(self, name: str) -> Iterator[_OpenObject]:
        with self._explained(name):
            size_bytes = obstore.head(self._store, name)["size"]
        yield _OpenObject(size_bytes, lambda begin, length: self._range(name, begin, length))

    def stat(self, name: str) -> Entry | None:
        try:
            with self._explained(name):
                return _entry(obstore.head(self._store, name))
        except FileNotFoundError:
            return None

    def folders(self, folder: str = "") -> list[str]:
        with self._explained(folder):
            return list(obstore.list_with_delimiter(self._store, folder or None)["common_prefixes"])

    def entries(self, folder: str = "") -> Iterator[Entry]:
        with self._explained(folder):
            for page in obstore.list(self._store, folder or None, chunk_size=1000):
                for found in page:
                    yield _entry(found)

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                with self._explained(name):
                    obstore.delete(self._store, name)
            except FileNotFoundError:  # S3 does not report it, other stores do
                continue

    def remove_unfinished(self, wanted: Callable[[str], bool], folders: Iterable[str] = ("",)) -> list[str]:
        """Does nothing: obstore cannot list incomplete uploads. They are never listed as objects. The bucket needs a
        lifecycle rule that ends them (docs/reference/checkpoints.md)."""
        del wanted, folders
        return []

    def _range(self, name: str, begin: int, length: int) -> memoryview:
        with self._explained(name):
            data = memoryview(obstore.get_range(self._store, name, start=begin, length=length))
        if len(data) != length:
            raise CorruptShard(
                f"{self.place}/{name} ends at byte {begin + len(data)}.", hint="nothing to do: another copy is tried"
            )
        return data

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Translate obstore's errors into this project's."""
        try:
            yield
        except FlyballError:
            raise
        except Exception as error:
            raise as_flyball_error(error, place=self.place, name=name) from error


def s3_config(environ: Mapping[str, str]) -> S3Config:
    """What to tell obstore about S3 beside the environment's own settings. AWS checks a SHA-256 of each part as it
    arrives, and keeps it; it is computed for the signature anyway. Compatible stores may refuse its header, so there it
    is used only if the environment asks for it."""
    is_chosen = any(name in environ for name in ("AWS_CHECKSUM_ALGORITHM", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"))
    return {} if is_chosen else {"checksum_algorithm": "SHA256"}


def _entry(found: ObjectMeta) -> Entry:
    # Without entity tags: an object's content never changes under one name, except for its size.
    version = found["e_tag"] or str(found["last_modified"])
    return Entry(found["path"], found["size"], f"{version}-{found['size']}")


class _OpenObject:
    """Read in windows, several of which are fetched ahead in parallel: single requests would mostly wait for the
    network."""

    def __init__(self, size_bytes: int, fetch: Callable[[int, int], memoryview]) -> None:
        self.size_bytes = size_bytes
        self.local_path = self.shard_path = ""
        self._fetch = fetch
        self._windows: dict[int, Future[memoryview]] = {}  # oldest first
        self._lock = threading.Lock()

    def read_into(self, target: memoryview, offset: int) -> None:
        self._check_end(offset + len(target))
        filled = 0
        while filled < len(target):
            window, begin = divmod(offset + filled, _WINDOW_BYTES)
            data = self._window(window)
            count = min(len(target) - filled, len(data) - begin)
            target[filled : filled + count] = data[begin : begin + count]
            filled += count

    def read_exactly(self, target: memoryview, offset: int) -> None:
        self._check_end(offset + len(target))
        for begin in range(0, len(target), _WINDOW_BYTES):
            part = target[begin : begin + _WINDOW_BYTES]
            part[:] = self._fetch(offset + begin, len(part))

    def _check_end(self, end: int) -> None:
        if end > self.size_bytes:
            raise CorruptShard(f"An object of {self.size_bytes} bytes ends before byte {end}.")

    def _window(self, index: int) -> memoryview:
        wanted_now = range(index, index + 1 + _WINDOWS_AHEAD)
        with self._lock:
            for wanted in wanted_now:
                if wanted not in self._windows and wanted * _WINDOW_BYTES < self.size_bytes:
                    begin = wanted * _WINDOW_BYTES
                    length = min(_WINDOW_BYTES, self.size_bytes - begin)
                    self._windows[wanted] = _in_background(self._fetch, begin, length)
            while len(self._windows) > 2 + _WINDOWS_AHEAD:  # keeps one behind: threads that share a window drift apart
                self._windows.pop(next(window for window in self._windows if window not in wanted_now))
            future = self._windows[index]
        return future.result()


def _in_background(fetch: Callable[[int, int], memoryview], begin: int, length: int) -> Future[memoryview]:
    """In a daemon thread, not an executor's: the process may exit while a store does not answer."""
    future: Future[memoryview] = Future()

    def run() -> None:
        try:
            future.set_result(fetch(begin, length))
        except BaseException as error:  # noqa: BLE001 - raised where the window is asked for
            future.set_exception(error)

    WorkerThread("flyball-object", run, retry_s=None).start()
    return future


# --- errors ----------------------------------------------------------------------------------------------------------

# obstore has few kinds of errors; the details are in the store's answer, which they quote.


_MESSAGE_CHARACTERS = 300
_CODE = re.compile(r"<Code>(\w+)</Code>")


@dataclass(frozen=True, slots=True)
class _Meaning:
    phrases: tuple[str, ...]  # any of them, in the error's kind or text
    kind: type[FlyballError]
    message: str  # with {place}, {name} and {reason}
    hint: str


_NO_BUCKET = _Meaning(
    ("NoSuchBucket", "bucket does not exist", "ContainerNotFound"),
    ConfigurationError,
    "The bucket of {place} does not exist ({reason}).",
    "create it, or correct the persistent folder's URL",
)
_MEANINGS = (
    _Meaning(
        ("169.254.169.254", "metadata.google.internal"),  # queried when the environment has no credentials
        ConfigurationError,
        "There are no credentials for {place} ({reason}).",
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or those of your store, in the environment of every host",
    ),
    _Meaning(
        ("PermissionDenied", "Unauthenticated", "403 Forbidden", "401 Unauthorized", "AccessDenied"),
        Unauthorized,
        "{place} denies access to '{name}' ({reason}).",
        "allow these credentials to list, read, write and delete there",
    ),
    _Meaning(
        ("507 Insufficient", "QuotaExceeded", "StorageFull"),
        StorageFull,
        "{place} has no room for {name} ({reason}).",
        "free space there, or keep fewer checkpoints",
    ),
    _Meaning(
        ("Encountered object with invalid path",),
        ConfigurationError,
        "{place} has an object whose name is not a valid path ({reason}).",
        "remove it, or use a separate prefix for checkpoints",
    ),
    _Meaning(
        ("error sending request", "timed out", "TimeoutError", "ConnectionError", " 500 ", " 502 ", " 503 ", " 504 "),
        Unreachable,
        "{place} does not answer ({reason}).",
        "check its endpoint (AWS_ENDPOINT_URL) and the network",
    ),
    _Meaning(("ValueError",), ConfigurationError, "{place} cannot be used ({reason}).", "write s3://BUCKET/PREFIX"),
)
_OTHER = _Meaning((), CheckpointError, "{place}, '{name}': {reason}", "check with the store's own tools")


def as_flyball_error(error: Exception, *, place: str, name: str) -> Exception:
    """The error to raise instead of obstore's: FileNotFoundError if the object does not exist, else a FlyballError with
    a hint."""
    text = f"{type(error).__name__}: {error}".lower()

    def says(meaning: _Meaning) -> bool:
        return any(phrase.lower() in text for phrase in meaning.phrases)

    if isinstance(error, FileNotFoundError) and not says(_NO_BUCKET):
        return FileNotFoundError(f"{place} has no {name}")
    meaning = next((known for known in (_NO_BUCKET, *_MEANINGS) if says(known)), _OTHER)
    message = meaning.message.format(place=place, name=name, reason=_shortened(str(error)))
    return meaning.kind(message, hint=meaning.hint)


def _shortened(text: str) -> str:
    """The first line, and the store's own error code."""
    first = text.strip().splitlines()[0] if text.strip() else "no reason given"
    code = _CODE.search(text)
    head = first.partition(": <?xml")[0][:_MESSAGE_CHARACTERS]
    return f"{head} {code[1]}" if code else head
