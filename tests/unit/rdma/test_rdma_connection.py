"""A connection over a queue pair, with the NIC of `fake_nics`: keys, reports of the way, and hostile peers."""

from __future__ import annotations

import errno
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.hosts.fake_pyverbs import PyverbsRDMAError, pyverbs
from unit.rdma.fake_nics import FakePath, FakeQueuePair, FakeSlot, readable

from ckpt_engine.contracts.peer_wire import Ping, Reply, ShardVerdict
from ckpt_engine.format.chunk_runs import byte_ranges, runs_of
from ckpt_engine.format.integrity import chunk_digests
from ckpt_engine.format.manifest import MANIFEST_VERSION, Manifest
from ckpt_engine.peers.shard_transfer import receive_chunks, send_ranges
from ckpt_engine.peers.transport.rdma import landing
from ckpt_engine.peers.transport.rdma.completion_errors import DeviceLost, DeviceRefused, QueuePairError, RetryExceeded
from ckpt_engine.peers.transport.rdma.connection import RdmaConnection
from ckpt_engine.peers.transport.rdma.exchange import Exchange
from ckpt_engine.peers.transport.rdma.messages import MAX_SEGMENTS, Kind, Patience, Segment, pack_segments
from ckpt_engine.peers.transport.rdma.queue_pair import RECEIVE_BUFFERS, QueuePair
from ckpt_engine.settings import EngineSettings
from flyball.contracts import wire
from flyball.contracts.errors import InvalidMessage, Unreachable

__all__ = ["pyverbs"]

MIB = 1 << 20
PATIENT = EngineSettings(io_timeout_s=60)
HASTY = EngineSettings(io_timeout_s=0.2)
OK = Reply(ShardVerdict.OK)


@pytest.fixture
def path() -> Iterator[Callable[..., FakePath]]:
    made: list[FakePath] = []

    def make(*slots: FakeSlot, settings: EngineSettings = PATIENT) -> FakePath:
        made.append(FakePath(settings, *slots))
        return made[-1]

    yield make
    for known in made:
        known.close()


@pytest.fixture
def beside() -> Iterator[Callable[..., Future[Any]]]:
    """Runs something in another thread."""
    with ThreadPoolExecutor(1) as threads:
        yield threads.submit


@pytest.fixture
def bounce(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is no slot can be read into."""
    region = SimpleNamespace(lkey=7, close=lambda: None)
    verbs = SimpleNamespace(
        enums=SimpleNamespace(IBV_ACCESS_LOCAL_WRITE=1), mr=SimpleNamespace(MR=lambda *_, **__: region)
    )
    monkeypatch.setattr(landing, "load_pyverbs", lambda: verbs)


def frame(message: object) -> bytes:
    data = wire.encode(message)
    return len(data).to_bytes(4, "little") + data


# --- keys ---


def restore(connection: RdmaConnection, slot: FakeSlot, size_bytes: int) -> None:
    with connection.land_in(slot.descriptor):
        connection.receive_raw(memoryview(slot.memory)[:size_bytes])


def test_a_shard_that_is_read_opens_its_own_bytes_and_is_closed_before_the_next_frame(
    path: Callable[..., FakePath], beside: Callable[..., Future[Any]]
) -> None:
    source, target = FakeSlot(6 * MIB, 1), FakeSlot(6 * MIB)
    made = path(source, target)
    giver, taker = made.connection(made.ours), made.connection(made.theirs)

    def take() -> None:
        restore(taker, target, 5 * MIB - 4096)
        taker.send(OK, timeout_s=60)

    taking = beside(take)
    giver.send_file(source.descriptor, 4096, 5 * MIB - 4096)
    assert giver.receive(Reply, timeout_s=60) == OK
    taking.result()
    assert target.memory[: 5 * MIB - 4096] == source.memory[4096 : 5 * MIB]
    assert made.ours.granted == [(source.registration.address + 4096, 5 * MIB - 4096, False)]
    assert made.ours.keys == {}
    assert source.registration.users == target.registration.users == 0


@pytest.mark.parametrize("says", [b"", frame(OK)])
def test_a_peer_that_never_says_that_it_has_read_a_shard_loses_the_key_and_the_connection(
    path: Callable[..., FakePath], says: bytes
) -> None:
    source = FakeSlot(1 * MIB, 1)
    made = path(source, settings=HASTY)
    giver = made.connection(made.ours)
    giver.send_file(source.descriptor, 0, 1 * MIB)
    if says:
        made.ours.inject(Kind.STREAM, says)
    with pytest.raises(Unreachable, match="timed out"):
        giver.receive(Reply, timeout_s=60)
    assert made.ours.keys == {} and made.ours.closed
    assert source.registration.users == 0


def test_of_chunks_that_are_asked_for_only_their_own_bytes_are_opened(
    path: Callable[..., FakePath], beside: Callable[..., Future[Any]], bounce: None
) -> None:
    """They are read through a buffer of the connection: whoever asks for chunks has no slot for them."""
    source = FakeSlot(5 * MIB, 1)
    source.memory[4 * MIB :] = bytes([2]) * MIB
    made = path(source)
    giver, taker = made.connection(made.ours), made.connection(made.theirs)
    digests = chunk_digests(memoryview(source.memory[:]), MIB)
    manifest = Manifest(MANIFEST_VERSION, "t", "job", 1, 2, 0, 2, 5 * MIB, MIB, digests)
    wanted, taken = [1, 2, 4], {}

    def take() -> None:
        receive_chunks(
            taker, manifest, wanted, lambda chunk, data: taken.update({chunk: bytes(data)}), superseded=lambda: False
        )
        taker.send(OK, timeout_s=60)

    taking = beside(take)
    ranges = byte_ranges(runs_of(wanted), manifest)
    send_ranges(giver, source.descriptor, ranges, piece_bytes=64 * MIB, pace=lambda size_bytes: None)
    assert giver.receive(Reply, timeout_s=60) == OK
    taking.result()
    assert taken == {1: bytes([1]) * MIB, 2: bytes([1]) * MIB, 4: bytes([2]) * MIB}
    begin = source.registration.address
    assert made.ours.granted == [(begin + MIB, 2 * MIB, False), (begin + 4 * MIB, MIB, False)]
    assert made.ours.keys == {} and taker.bytes_received == 3 * MIB


def test_each_range_that_is_written_has_its_own_key_and_too_many_are_read_instead(
    path: Callable[..., FakePath], beside: Callable[..., Future[Any]], bounce: None
) -> None:
    ranges = [(index * 4096, 2048) for index in range(MAX_SEGMENTS + 10)]
    size_bytes = len(ranges) * 4096
    source, target = FakeSlot(size_bytes, 1), FakeSlot(size_bytes)
    made = path(source, target)
    giver, taker = made.connection(made.ours), made.connection(made.theirs)

    def give() -> None:
        giver.receive(Reply, timeout_s=60)
        for offset, count in ranges:
            giver.send_file(source.descriptor, offset, count)
        giver.receive(Reply, timeout_s=60)

    giving = beside(give)
    with taker.expect(target.descriptor, ranges):
        taker.send(Reply(ShardVerdict.SEND), timeout_s=60)
        for offset, count in ranges:
            taker.receive_raw(memoryview(target.memory)[offset : offset + count])
        assert sorted(made.theirs.granted) == [
            (target.registration.address + offset, count, True) for offset, count in ranges[:MAX_SEGMENTS]
        ]
    assert made.theirs.keys == {}
    taker.send(OK, timeout_s=60)
    giving.result()
    assert made.ours.keys == {} and len(made.ours.granted) == 10
    assert target.memory[:] == (bytes([1]) * 2048 + bytes(2048)) * len(ranges)


def test_no_read_write_or_key_goes_beyond_a_region_of_a_slot(
    path: Callable[..., FakePath], beside: Callable[..., Future[Any]]
) -> None:
    source, target = FakeSlot(9 * MIB, region_bytes=2 * MIB), FakeSlot(9 * MIB, region_bytes=7 * MIB // 2)
    source.memory[:] = content = os.urandom(9 * MIB)
    made = path(source, target)
    giver, taker = made.connection(made.ours), made.connection(made.theirs)

    def give() -> None:
        giver.receive(Reply, timeout_s=60)
        for offset, count in ((1, 5 * MIB), (6 * MIB, 3 * MIB)):
            giver.send_file(source.descriptor, offset, count)
        giver.receive(Reply, timeout_s=60)
        giver.send_file(source.descriptor, 0, 9 * MIB)
        giver.receive(Reply, timeout_s=60)

    giving = beside(give)
    with taker.expect(target.descriptor, [(1, 5 * MIB), (6 * MIB, 3 * MIB)]):
        taker.send(Reply(ShardVerdict.SEND), timeout_s=60)
        taker.receive_raw(memoryview(target.memory)[1 : 1 + 5 * MIB])
        taker.receive_raw(memoryview(target.memory)[6 * MIB :])
    assert target.memory[1 : 1 + 5 * MIB] == content[1 : 1 + 5 * MIB]
    assert target.memory[6 * MIB :] == content[6 * MIB :]
    assert len(made.theirs.granted) == 4, "two regions for each range"
    target.memory[:] = bytes(9 * MIB)
    taker.send(OK, timeout_s=60)
    restore(taker, target, 9 * MIB)
    taker.send(OK, timeout_s=60)
    giving.result()
    assert target.memory[:] == content
    assert len(made.ours.granted) == 5
    assert made.ours.keys == made.theirs.keys == {}
    assert source.registration.users == target.registration.users == 0


def test_on_a_device_that_was_given_up_no_transfer_begins(path: Callable[..., FakePath]) -> None:
    made = path()
    idle, asked = made.connection(made.ours), made.connection(made.theirs)
    assert not readable(idle.fileno())
    made.device.is_closing = True
    assert readable(idle.fileno()), "whoever would use it next finds it ended"
    with pytest.raises(Unreachable, match="given up its RDMA device"), asked.expect(0, [(0, 1)]):
        pass


# --- time ---


@pytest.mark.parametrize("kind", [Kind.PLACED, Kind.STREAM])
def test_bytes_that_keep_arriving_extend_the_time_for_the_rest(path: Callable[..., FakePath], kind: Kind) -> None:
    made = path()
    pair: Any = made.ours
    exchange = Exchange(pair, made.our_tcp.fileno())
    exchange.placed_left = 1 << 20
    patience = Patience(time.monotonic() - 50, 60, progress_bytes=1000)
    made.ours.inject(kind, b"x" * 2000 if kind is Kind.STREAM else b"", 2000)
    exchange.turn(patience)
    assert patience.due_s > time.monotonic() + 30


# --- what is reported of the way ---


class Watched:
    def __init__(self, connection: RdmaConnection) -> None:
        self.broken: list[str] = []
        self.carried = 0
        connection.watch(self.broken.append, self._carry)

    def _carry(self) -> None:
        self.carried += 1


@pytest.mark.parametrize("peer_is_there", [True, False])
def test_a_queue_pair_that_breaks_is_reported_unless_the_peer_has_ended(
    path: Callable[..., FakePath], peer_is_there: bool
) -> None:
    made = path()
    connection = made.connection(made.ours)
    watched = Watched(connection)
    if not peer_is_there:
        made.their_tcp.close()
    made.ours.fail(RetryExceeded(RetryExceeded.reason))
    with pytest.raises(RetryExceeded):
        connection.receive(Reply, timeout_s=60)
    assert watched.broken == ([RetryExceeded.reason] if peer_is_there else [])


def test_the_end_of_the_peer_and_silence_are_not_reported(path: Callable[..., FakePath]) -> None:
    made = path()
    connection = made.connection(made.ours)
    watched = Watched(connection)
    made.their_tcp.close()
    with pytest.raises(Unreachable, match="closed the connection"):
        connection.receive(Reply, timeout_s=60)
    silent = path()
    connection = silent.connection(silent.ours)
    other = Watched(connection)
    with pytest.raises(Unreachable, match="timed out"):
        connection.receive(Reply, timeout_s=0.01)
    assert watched.broken == other.broken == []


def test_a_shard_that_arrived_is_reported_by_both_sides_and_a_manifest_is_not(
    path: Callable[..., FakePath], beside: Callable[..., Future[Any]]
) -> None:
    source, target = FakeSlot(1 * MIB, 1), FakeSlot(1 * MIB)
    made = path(source, target)
    giver, taker = made.connection(made.ours), made.connection(made.theirs)
    given, taken = Watched(giver), Watched(taker)

    def take() -> None:
        taker.receive_raw(memoryview(bytearray(100)))
        with taker.expect(target.descriptor, [(0, 1 * MIB)]):
            taker.send(Reply(ShardVerdict.SEND), timeout_s=60)
            taker.receive_raw(memoryview(target.memory))
        taker.send(OK, timeout_s=60)

    taking = beside(take)
    giver.send_raw(memoryview(bytes(100)))
    giver.receive(Reply, timeout_s=60)
    assert given.carried == 0
    giver.send_file(source.descriptor, 0, 1 * MIB)
    giver.receive(Reply, timeout_s=60)
    taking.result()
    assert (given.carried, taken.carried) == (1, 1)
    giving = beside(giver.send_file, source.descriptor, 0, 1 * MIB)
    restore(taker, target, 1 * MIB)
    giving.result()
    assert taken.carried == 2


def test_a_transfer_that_was_given_up_is_not_reported_as_one(path: Callable[..., FakePath]) -> None:
    target = FakeSlot(1 * MIB)
    made = path(target)
    connection = made.connection(made.ours)
    watched = Watched(connection)
    with pytest.raises(RuntimeError), connection.expect(target.descriptor, [(0, 1 * MIB)]):
        raise RuntimeError("a newer generation began")
    assert (watched.carried, watched.broken) == (0, [])
    assert target.registration.users == 0 and made.ours.keys == {}


def test_what_breaks_because_the_other_side_gave_up_is_not_reported(path: Callable[..., FakePath]) -> None:
    source, target = FakeSlot(1 * MIB, 1), FakeSlot(1 * MIB)
    made = path(source, target)
    giver, taker = made.connection(made.ours), made.connection(made.theirs)
    watched = Watched(giver)
    with pytest.raises(RuntimeError), taker.expect(target.descriptor, [(0, 1 * MIB)]):
        taker.send(Reply(ShardVerdict.SEND), timeout_s=60)
        giver.receive(Reply, timeout_s=60)
        raise RuntimeError("a newer generation began")
    with pytest.raises(QueuePairError, match="revoked"):
        giver.send_file(source.descriptor, 0, 1 * MIB)
        giver.receive(Reply, timeout_s=60)
    assert watched.broken == []
    assert not any(target.memory[:])


# --- descriptors ---


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Descriptors to poll that were made."""
    made: list[int] = []

    class Epoll:
        def __init__(self) -> None:
            self._epoll = epoll()
            made.append(self.fileno())

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever one has
            return getattr(self._epoll, name)

    def event(*given: int) -> int:
        made.append(eventfd(*given))
        return made[-1]

    epoll, eventfd = select.epoll, os.eventfd
    monkeypatch.setattr(select, "epoll", Epoll)
    monkeypatch.setattr(os, "eventfd", event)
    return made


def is_open(descriptor: int) -> bool:
    """As what it was made; another thread may have the number by now."""
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith("anon_inode:[event")
    except FileNotFoundError:
        return False


def test_a_connection_costs_no_descriptor_until_it_is_polled(path: Callable[..., FakePath], opened: list[int]) -> None:
    made = path()
    opened.clear()
    connection = made.connection(made.ours)
    assert opened == []
    assert not readable(connection.fileno())
    made.ours.inject(Kind.STREAM, frame(OK))
    assert readable(connection.fileno())
    assert connection.receive(Reply, timeout_s=60) == OK
    assert not readable(connection.fileno())
    assert len(opened) == 2 and all(map(is_open, opened))
    connection.close()
    assert connection.fileno() == -1
    assert not any(map(is_open, opened))


def test_without_a_free_descriptor_a_connection_is_seen_as_ended(
    path: Callable[..., FakePath], opened: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = path()
    connection = made.connection(made.ours)

    def none_free(*_: object) -> int:
        raise OSError(24, "Too many open files")

    opened.clear()
    monkeypatch.setattr(os, "eventfd", none_free)
    assert readable(connection.fileno())
    assert len(opened) == 1 and not is_open(opened[0])
    with pytest.raises(Unreachable, match="Too many open files"):
        connection.receive(Reply, timeout_s=60)


# --- a hostile peer: it has the token, and misbehaves ---

FREE_BYTES = Segment(1 << 40, 4096, 5)


def overflow(pair: FakeQueuePair) -> None:
    pair.inject(Kind.EXPORT, pack_segments([Segment((1 << 64) - 10, 11, 5)]))


def several(pair: FakeQueuePair) -> None:
    pair.inject(Kind.EXPORT, pack_segments([FREE_BYTES, FREE_BYTES]))


def broken_segment(pair: FakeQueuePair) -> None:
    pair.inject(Kind.EXPORT, b"x" * 19)


def empty_segment(pair: FakeQueuePair) -> None:
    pair.inject(Kind.WINDOW, pack_segments([Segment(1, 0, 5)]))


def taken(pair: FakeQueuePair) -> None:
    pair.inject(Kind.TAKEN)


def placed(pair: FakeQueuePair) -> None:
    pair.inject(Kind.PLACED, amount=MIB + 1)


def placed_nothing(pair: FakeQueuePair) -> None:
    pair.inject(Kind.PLACED, amount=0)


def credit(pair: FakeQueuePair) -> None:
    pair.inject(Kind.CREDIT, amount=RECEIVE_BUFFERS + 1)


def windows(pair: FakeQueuePair) -> None:
    pair.inject(Kind.WINDOW, pack_segments([FREE_BYTES] * (MAX_SEGMENTS + 1)))


HOSTILE = [overflow, several, broken_segment, empty_segment, taken, placed, placed_nothing, credit, windows]


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_hostile_message_ends_a_transfer_and_frees_the_slot(
    path: Callable[..., FakePath], attack: Callable[[FakeQueuePair], None]
) -> None:
    target = FakeSlot(1 * MIB)
    made = path(target)
    connection = made.connection(made.ours)
    with pytest.raises(InvalidMessage), connection.expect(target.descriptor, [(0, 1 * MIB)]):
        attack(made.ours)
        connection.receive_raw(memoryview(target.memory))
    assert made.ours.closed and made.ours.keys == {}
    assert target.registration.users == 0
    with pytest.raises(Unreachable):
        connection.send(Ping(), timeout_s=60)


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_hostile_message_ends_the_wait_for_a_frame(
    path: Callable[..., FakePath], attack: Callable[[FakeQueuePair], None]
) -> None:
    made = path()
    connection = made.connection(made.ours)
    attack(made.ours)
    with pytest.raises(InvalidMessage):
        connection.receive(Reply, timeout_s=60)
    assert made.ours.closed


def test_bytes_of_a_shard_where_a_frame_was_expected_are_invalid(path: Callable[..., FakePath]) -> None:
    for kind in (Kind.EXPORT, Kind.PLACED):
        target = FakeSlot(1 * MIB)
        made = path(target)
        connection = made.connection(made.ours)
        with pytest.raises(InvalidMessage, match="frame"), connection.expect(target.descriptor, [(0, 1 * MIB)]):
            made.ours.inject(kind, pack_segments([FREE_BYTES]) if kind is Kind.EXPORT else b"", 1)
            connection.receive(Reply, timeout_s=60)
        assert made.ours.closed and target.registration.users == 0


def test_a_window_beside_the_peers_own_memory_is_the_peers_loss(path: Callable[..., FakePath]) -> None:
    source = FakeSlot(1 * MIB, 1)
    made = path(source)
    connection = made.connection(made.ours)
    made.ours.inject(Kind.WINDOW, pack_segments([Segment(1 << 40, 1 * MIB, 5)]))
    with pytest.raises(QueuePairError, match="refused"):
        connection._exchange.handle()
        connection.send_file(source.descriptor, 0, 1 * MIB)
        connection.receive(Reply, timeout_s=60)
    assert made.ours.closed and source.registration.users == 0


def test_an_export_of_memory_that_the_peer_does_not_have_is_its_loss(path: Callable[..., FakePath]) -> None:
    target = FakeSlot(1 * MIB)
    made = path(target)
    connection = made.connection(made.ours)
    made.ours.inject(Kind.EXPORT, pack_segments([Segment(1 << 40, 1 << 62, 5)]))
    with pytest.raises(QueuePairError, match="refused"):
        restore(connection, target, 1 * MIB)
    assert made.ours.closed and target.registration.users == 0
    assert not any(target.memory[:])


def test_a_flood_of_messages_ends_at_the_deadline(
    path: Callable[..., FakePath], beside: Callable[..., Future[Any]]
) -> None:
    made = path()
    connection = made.connection(made.ours)
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            try:
                made.ours.inject(Kind.CREDIT, amount=0)
            except QueuePairError:
                stop.wait(0.001)

    flooding = beside(flood)
    with pytest.raises(Unreachable, match="timed out"):
        connection.receive(Reply, timeout_s=0.1)
    stop.set()
    flooding.result()


# --- tearing down ---


def torn_down(*keys: Exception | None, step: Exception | None = None) -> tuple[list[str], list[Any]]:
    """Close a queue pair whose keys, and whose next step, fail like this. Returns what was closed, and the log."""
    done: list[str] = []

    def closing(name: str, error: Exception | None) -> Callable[[], None]:
        def close() -> None:
            done.append(name)
            if error is not None:
                raise error

        return close

    pair = QueuePair.__new__(QueuePair)
    pair._port = SimpleNamespace(name="rxe0/1")  # type: ignore[assignment]
    pair._keys = {index: SimpleNamespace(close=closing(f"key {index}", error)) for index, error in enumerate(keys)}
    pair._closers = [closing("device", None), closing("pair", step), pair._end_keys]
    with capture_logs() as logs:
        pair.close()
        pair.close()
    return done, logs


@pytest.mark.usefixtures("pyverbs")
def test_what_cannot_be_torn_down_is_said_once_and_the_rest_is_torn_down() -> None:
    busy = PyverbsRDMAError("no MW", errno.EBUSY)
    done, logs = torn_down(None, busy, None, step=DeviceRefused("no QP either"))
    assert sorted(done) == ["device", "key 0", "key 1", "key 2", "pair"]
    (log,) = logs
    assert (log["event"], log["port"]) == ("queue_pair_not_torn_down", "rxe0/1")
    assert "no MW" in log["reason"] and "; no QP either" in log["reason"]


@pytest.mark.usefixtures("pyverbs")
def test_a_device_that_is_gone_is_nothing_to_say() -> None:
    gone = PyverbsRDMAError("no MW", errno.EIO)
    done, logs = torn_down(gone, DeviceLost("gone"), step=BufferError("still looked at"))
    assert sorted(done) == ["device", "key 0", "key 1", "pair"]
    assert logs == []
