"""What every `SignalBus` must do: the embedded one on each database, the one in Redis, and the simulator's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
from sqlalchemy import delete, insert, select

from flyball.contracts.errors import TooBusy
from services.bus.embedded import EmbeddedBus
from services.bus.redis_client import RedisServer
from services.bus.redis_streams import RedisBus
from services.rules.stream import Cursor, SignalBus
from services.store.sql.database import Database
from services.store.sql.tables import bus_messages, bus_streams
from simulator.ports.bus import MemoryBus

DEADLINE_S = 120.0
LENGTH = 40

Connect = Callable[[], SignalBus]  # to the same stream, of at most LENGTH signals


@pytest.fixture(params=["sqlite", "mariadb", "redis", "memory"])
def connect(request: pytest.FixtureRequest, new_ready_url: Callable[[str], str]) -> Iterator[Connect]:
    with ExitStack() as stack:
        if request.param == "memory":
            bus = MemoryBus(max_length=LENGTH)
            yield lambda: bus
        elif request.param == "redis":
            yield _in_redis(request.getfixturevalue("own_redis")().url, stack)
        else:
            db = Database(new_ready_url(request.param))
            stack.callback(db.close)
            yield lambda: EmbeddedBus(db, max_length=LENGTH)


def _in_redis(url: str, stack: ExitStack) -> Connect:
    def connect() -> SignalBus:
        return RedisBus(stack.enter_context(closing(RedisServer(url))), prefix="t", max_length=LENGTH)

    return connect


@pytest.fixture
def bus(connect: Connect) -> SignalBus:
    return connect()


def seqs(bus: SignalBus, after: Cursor | None = None, limit: int = 1000) -> list[int]:
    return [delivered.signal.seq for delivered in bus.read(after, limit=limit)]


def test_an_empty_stream_has_nothing_to_read(bus) -> None:
    assert bus.read(None, limit=10) == []
    assert bus.read(Cursor("elsewhere", 7), limit=10) == []


def test_signals_come_out_whole_and_in_order(bus, make) -> None:
    signals = [make.signal(seq) for seq in range(1, 6)]
    bus.publish(signals[:2])
    bus.publish(signals[2:])
    assert [delivered.signal for delivered in bus.read(None, limit=10)] == signals


def test_a_reader_continues_after_its_cursor(bus, make) -> None:
    bus.publish([make.signal(seq) for seq in range(1, 6)])
    first = bus.read(None, limit=2)
    assert [d.signal.seq for d in first] == [1, 2]
    assert seqs(bus, first[-1].cursor) == [3, 4, 5]
    assert seqs(bus, bus.read(None, limit=10)[-1].cursor) == []


def test_another_connection_sees_the_same_stream(connect, make) -> None:
    connect().publish([make.signal(1)])
    (delivered,) = connect().read(None, limit=10)
    connect().publish([make.signal(2)])
    assert seqs(connect(), delivered.cursor) == [2]


def test_the_same_signal_twice_is_delivered_twice(bus, make) -> None:
    bus.publish([make.signal(1)])
    bus.publish([make.signal(1)])
    assert seqs(bus) == [1, 1]


def test_a_cursor_of_another_stream_begins_at_the_beginning(bus, make) -> None:
    bus.publish([make.signal(1), make.signal(2)])
    last = bus.read(None, limit=10)[-1].cursor
    assert seqs(bus, Cursor("a stream that was flushed", last.position)) == [1, 2]


def test_trimming_forgets_what_is_stored_and_nothing_else(bus, make) -> None:
    bus.publish([make.signal(seq) for seq in range(1, 6)])
    delivered = bus.read(None, limit=3)
    bus.trim(delivered[-1].cursor)
    assert seqs(bus) == [4, 5]
    bus.trim(delivered[0].cursor)  # an older cursor, from a slow leader
    bus.trim(Cursor("another stream", 10_000))
    assert seqs(bus) == [4, 5]
    bus.publish([make.signal(6)])
    assert seqs(bus, delivered[-1].cursor) == [4, 5, 6]


def test_positions_go_on_after_everything_was_trimmed(bus, make) -> None:
    bus.publish([make.signal(1)])
    (first,) = bus.read(None, limit=10)
    bus.trim(first.cursor)
    bus.publish([make.signal(2)])
    (second,) = bus.read(first.cursor, limit=10)
    assert second.signal.seq == 2
    assert second.cursor.stream == first.cursor.stream


def test_a_full_stream_refuses_all_of_a_batch_until_it_is_trimmed(bus, make) -> None:
    bus.publish([make.signal(seq) for seq in range(LENGTH - 1)])
    with pytest.raises(TooBusy) as caught:
        bus.publish([make.signal(500), make.signal(501)])
    assert caught.value.retry_after_s > 0
    assert seqs(bus)[-1] == LENGTH - 2
    bus.trim(bus.read(None, limit=1)[0].cursor)
    bus.publish([make.signal(500), make.signal(501)])
    assert seqs(bus)[-2:] == [500, 501]


def test_a_reader_beside_many_publishers_misses_nothing(connect, make) -> None:
    publishers, each = 4, 8
    done = threading.Event()

    def publish(number: int) -> None:
        bus = connect()
        for seq in range(each):
            bus.publish([make.signal(seq, source=f"host-{number}")])

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(publishers)]
    seen: list[tuple[str, int]] = []

    def read() -> None:
        bus, cursor = connect(), None
        while len(seen) < publishers * each and not done.is_set():
            for delivered in bus.read(cursor, limit=3):
                seen.append((delivered.signal.source, delivered.signal.seq))
                cursor = delivered.cursor

    reader = threading.Thread(target=read)
    for thread in (*threads, reader):
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    reader.join(DEADLINE_S)
    done.set()
    assert sorted(seen) == [(f"host-{n}", seq) for n in range(publishers) for seq in range(each)]
    for number in range(publishers):
        assert [seq for source, seq in seen if source == f"host-{number}"] == list(range(each))


# --- of the embedded bus alone ----------------------------------------------------------------------------------------


def test_a_message_of_another_release_is_skipped(db: Database, make) -> None:
    bus = EmbeddedBus(db)
    bus.publish([make.signal(1), make.signal(2), make.signal(3)])
    with db.write() as connection:
        stored = connection.execute(select(bus_messages).order_by(bus_messages.c.position)).all()
        connection.execute(delete(bus_messages).where(bus_messages.c.position == stored[1].position))
        connection.execute(insert(bus_messages).values(position=stored[1].position, document='{"body": 1}'))
    assert seqs(bus) == [1, 3]
    first = bus.read(None, limit=1)[0].cursor
    assert seqs(bus, first, limit=1) == [3]  # a page of only such messages is not the end


def test_a_stream_that_was_emptied_by_hand_is_another_one(db: Database, make) -> None:
    bus = EmbeddedBus(db)
    bus.publish([make.signal(1), make.signal(2)])
    last = bus.read(None, limit=10)[-1].cursor
    with db.write() as connection:
        connection.execute(delete(bus_messages))
        connection.execute(delete(bus_streams))
    bus.publish([make.signal(3)])
    assert seqs(bus, last) == [3]
