"""Writers killed at every stage, and object stores that do not answer, answer partially, or refuse: committed shards
survive, errors name their cause, and the next writer succeeds."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.stores.places import Place

from ckpt_engine.format import integrity
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.settings import EngineSettings
from ckpt_engine.tiers.opening import open_storage
from ckpt_engine.tiers.shard_store import ShardStore
from flyball.contracts.checkpoints import LineageEntry, Tier
from flyball.contracts.errors import (
    CheckpointError,
    ConfigurationError,
    FlyballError,
    StorageFull,
    Unauthorized,
    Unreachable,
)

MakeShard = Callable[..., tuple[Manifest, bytes, memoryview]]
LINEAGE = (LineageEntry(1),)
SMALL_BYTES, FIVE_PARTS_BYTES = 100_000, 36 << 20

WRITER = """
import sys
from pathlib import Path
from ckpt_engine.format import manifest
from ckpt_engine.settings import EngineSettings
from ckpt_engine.tiers.opening import open_storage
from ckpt_engine.tiers.shard_store import ShardStore
from flyball.contracts.checkpoints import Tier
url, tier, folder = sys.argv[1:]
store = ShardStore(open_storage(url, EngineSettings()), tier=Tier(tier), job="job", host_id="")
data = Path(folder, "manifest").read_bytes()
described = manifest.decode(data)
store.write(described, data, memoryview(Path(folder, "shard").read_bytes()))
store.scan_step(1, described.step)
store.seal(1, described.step, 1)
for copy in store.copies():
    store.remove(copy)
"""


def write_in_a_process(place: Place, made: tuple[Manifest, bytes, memoryview], folder: Path, stage: str) -> int:
    """Write, seal and remove this shard in another process with a fault point. Returns its exit status."""
    (folder / "manifest").write_bytes(made[1])
    (folder / "shard").write_bytes(made[2])
    writer = subprocess.run(
        [sys.executable, "-P", "-c", WRITER, place.url, str(place.tier), str(folder)],
        env={**os.environ, "FLYBALL_FAULT_POINT": stage},
        cwd=Path(__file__).parents[3],
        timeout=180.0,
        check=False,
    )
    return writer.returncode


def read(store: ShardStore, step: int) -> bytes:
    with store.reading(1, step, 0) as (manifest, _, stored):
        target = memoryview(bytearray(stored.size_bytes))
        stored.read_into(target, 0)
        integrity.verify(target, manifest.chunk_digests, manifest.chunk_bytes)
        return bytes(target)


def put(store: ShardStore, made: tuple[Manifest, bytes, memoryview]) -> None:
    manifest, data, payload = made
    store.write(manifest, data, payload)
    if store.tier is Tier.PERSISTENT:
        store.seal(1, manifest.step, 1)


STAGES = {  # fault point -> (the shard is complete, its step counts in a shared place)
    "data:1": (False, False),
    "data:4": (False, False),
    "manifest:1": (False, False),
    "written:1": (True, False),
    "world:1": (True, False),
    "sealed:1": (True, True),
    "removed_manifest:1": (False, False),
}


@pytest.mark.processes
@pytest.mark.parametrize("stage", STAGES)
def test_a_writer_killed_at_any_stage_leaves_the_step_before_and_a_place_to_write(
    shared_place: Place, shard: MakeShard, tmp_path: Path, stage: str
) -> None:
    put(shared_place.store(), shard(1, size_bytes=100))
    before = shared_place.get("g1/step1/rank0.safetensors")
    made = shard(2, size_bytes=FIVE_PARTS_BYTES if stage == "data:4" else SMALL_BYTES)
    status = write_in_a_process(shared_place, made, tmp_path, f"persistent.{stage}")
    assert status == -signal.SIGKILL
    whole, counts = STAGES[stage]
    late = shared_place.store()
    assert [copy.step for copy in late.scan()] == ([1, 2] if counts else [1])
    assert late.held(0, LINEAGE) == ((1, 2) if whole else (1,))
    assert read(late, 1) == before
    if stage == "data:4" and shared_place.url.startswith("s3:"):
        assert shared_place.uploads() == ["g1/step2/rank0.safetensors"]  # incomplete uploads are no objects
        assert "g1/step2/rank0.safetensors" not in shared_place.names()
    late.remove_unfinished((0,))
    put(late, made)
    assert [copy.step for copy in shared_place.store().scan()] == [1, 2]
    assert read(late, 2) == bytes(made[2])
    kinds = ("rank0.manifest", "rank0.safetensors", "world.manifest")
    assert shared_place.names() - {"manifest", "shard"} == {f"g1/step{n}/{kind}" for n in (1, 2) for kind in kinds}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("stage", "whole"), [("file.rename:1", False), ("file.renamed:1", False), ("file.renamed:2", True)]
)
def test_a_folder_writer_killed_around_a_rename_leaves_all_or_nothing(
    folder: Place, shard: MakeShard, tmp_path: Path, stage: str, whole: bool
) -> None:
    put(folder.store(), shard(1, size_bytes=100))
    assert write_in_a_process(folder, shard(2, size_bytes=SMALL_BYTES), tmp_path, stage) == -signal.SIGKILL
    late = folder.store()
    assert [copy.step for copy in late.scan()] == ([1, 2] if whole else [1])
    late.remove_unfinished(None)
    assert not [name for name in folder.names() if ".new." in name]
    put(late, shard(2, size_bytes=SMALL_BYTES))
    assert [copy.step for copy in folder.store().scan()] == [1, 2]


# --- servers that misbehave ---


class ScriptedServer:
    """Answers every request with the same bytes, then is silent until the client disconnects."""

    def __init__(self, answer: bytes, *, close: bool = False) -> None:
        self._answer = answer
        self._close = close
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            while connection.recv(1 << 20):
                if self._answer:
                    connection.sendall(self._answer)
                if self._close:
                    connection.shutdown(socket.SHUT_WR)  # read the rest, or the answer could be lost
        except OSError:
            return


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ShardStore]]:
    """A store on a server that answers like this."""
    servers: list[ScriptedServer] = []

    def start(answer: bytes, *, close: bool = False, timeout_s: float = 0.3) -> ShardStore:
        servers.append(ScriptedServer(answer, close=close))
        for name, value in (
            ("AWS_ENDPOINT_URL", servers[-1].endpoint),
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test-secret"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
        ):
            monkeypatch.setenv(name, value)
        settings = EngineSettings(store_timeout_s=timeout_s, store_retry_s=0.2)
        storage = open_storage("s3://bucket/prefix/job", settings)
        return ShardStore(storage, tier=Tier.PERSISTENT, job="job", host_id="")

    yield start
    for server in servers:
        server.close()


def _answer(status: str, code: str) -> bytes:
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>no</Message></Error>'.encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def _every_operation(store: ShardStore, shard: MakeShard) -> dict[str, Callable[[], object]]:
    small, large = shard(1, size_bytes=100), shard(1, size_bytes=20 << 20)
    return {
        "scan": store.scan,
        "write": lambda: store.write(*small),
        "multipart": lambda: store.write(*large),
        "read": lambda: store.reading(1, 1, 0).__enter__(),
        "pin": lambda: store.pin(1, 1),
        "unpin": lambda: store.unpin(1, 1),
    }


@pytest.mark.parametrize("operation", ["scan", "write", "multipart", "read", "unpin"])
@pytest.mark.parametrize(
    ("answer", "close"),
    [
        (b"", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n<?xml", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n<?xml", True),
        (b"HTTP/1.1 200 OK\r\nContent-", True),
    ],
    ids=["silent", "half an answer", "broken off", "half a head"],
)
def test_a_server_that_does_not_answer_is_given_up_in_time(
    serve: Callable[..., ShardStore], shard: MakeShard, operation: str, answer: bytes, close: bool
) -> None:
    store = serve(answer, close=close)
    done = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            _every_operation(store, shard)[operation]()
        except BaseException as error:  # noqa: BLE001 - looked at below
            errors.append(error)
        done.set()

    threading.Thread(target=run, daemon=True).start()
    assert done.wait(120.0)
    assert len(errors) == 1
    assert isinstance(errors[0], FlyballError | FileNotFoundError), errors
    assert store.copies() == []


@pytest.mark.parametrize(
    ("status", "code", "expected", "hint"),
    [
        ("403 Forbidden", "AccessDenied", Unauthorized, "credentials"),
        ("503 Slow Down", "SlowDown", Unreachable, "endpoint"),
        ("507 Insufficient Storage", "XMinioStorageFull", StorageFull, "free space"),
        ("404 Not Found", "NoSuchBucket", ConfigurationError, "create it"),
        ("418 I am a teapot", "Teapot", CheckpointError, "tools"),
    ],
)
def test_a_refusal_of_the_store_has_a_reason_and_a_hint(
    serve: Callable[..., ShardStore], shard: MakeShard, status: str, code: str, expected: type[FlyballError], hint: str
) -> None:
    store = serve(_answer(status, code), close=True, timeout_s=60.0)
    for name, operation in _every_operation(store, shard).items():
        with pytest.raises(expected) as caught:
            operation()
        error: FlyballError = caught.value
        assert hint in error.hint, name
        assert code in error.message, name
        assert "test-secret" not in str(error)


def test_a_bucket_that_does_not_exist_is_named(s3_environment: str, shard: MakeShard) -> None:
    storage = open_storage("s3://no-such-bucket-here/prefix/job", EngineSettings())
    store = ShardStore(storage, tier=Tier.PERSISTENT, job="job", host_id="")
    for name, operation in _every_operation(store, shard).items():
        with pytest.raises(ConfigurationError, match="s3://no-such-bucket-here"):
            operation()
        assert name


@pytest.mark.parametrize("url", ["ftp://host/folder", "memory:///", "file:///tmp", "s3://"])
def test_a_url_that_is_no_store_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_storage(url, EngineSettings())
    assert caught.value.hint


def test_an_object_whose_name_is_no_path_is_named(bucket: Place, shard: MakeShard) -> None:
    bucket.put("g1//step1/rank0.manifest", b"")
    with pytest.raises(ConfigurationError, match="not a valid path"):
        bucket.store().scan()


class FlakyProxy:
    """A proxy that breaks the first connections after so many bytes."""

    def __init__(self, server_port: int, *, breaks: int, after_bytes: int) -> None:
        self._server_port = server_port
        self._breaks = breaks
        self._after_bytes = after_bytes
        self.broken = 0
        self._counting = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._server_port))
            threading.Thread(target=self._pump, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()

    def _breaks_this(self) -> bool:
        with self._counting:
            if self.broken == self._breaks:
                return False
            self.broken += 1
            return True

    def _pump(self, source: socket.socket, target: socket.socket, upward: bool) -> None:
        total = 0
        try:
            while data := source.recv(1 << 16):
                total += len(data)
                if upward and total > self._after_bytes and self._breaks_this():
                    break
                target.sendall(data)
        except OSError:
            pass
        for connection in (source, target):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


def test_parts_whose_connection_breaks_are_sent_again(
    bucket: Place, shard: MakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = FlakyProxy(int(bucket.endpoint.rpartition(":")[2]), breaks=3, after_bytes=4 << 20)
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        made = shard(3, size_bytes=FIVE_PARTS_BYTES)
        put(bucket.store(), made)
        assert proxy.broken == 3
        assert read(bucket.store(), 3) == bytes(made[2])
    finally:
        proxy.close()
