"""Unreadable signals count as committed, and lost ones are waited for.

Otherwise their sender's watermark would stand still for ever, or pass signals that nobody has read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import msgspec
import pytest
from sqlalchemy import delete, select
from support.stores.job_stores import SEALS

from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import Phase
from flyball.contracts.events import EventKind
from flyball.contracts.reports.signals import RankStalled, SignalUnreadable
from services.bus.embedded import EmbeddedBus
from services.bus.messaging import MeasuredBus
from services.bus.redis_client import RedisServer
from services.bus.redis_streams import RedisBus
from services.controller.loop import ControllerLoop
from services.controller.round.view import PolicySettings
from services.rules.stream import SignalBus
from services.runtime.telemetry import Metrics
from services.runtime.wakeup import LocalWakeup
from services.store.decisions.decision_store import SqlDecisionStore
from services.store.sql.tables import bus_messages

Lose = Callable[[], None]


class OfAnotherRelease(msgspec.Struct, tag="gpu_on_fire"):
    degrees: int


class ItsSignal(msgspec.Struct):
    source: str
    incarnation: str
    seq: int
    at: float
    body: OfAnotherRelease


A = ("host-a", "inc-a")


def strange(seq: int) -> ItsSignal:
    return ItsSignal("host-a", "inc-a", seq, 5.0, OfAnotherRelease(451))


@pytest.fixture(params=["embedded", "redis"])
def bus_and_loss(request: pytest.FixtureRequest, stores) -> Iterator[tuple[SignalBus, Lose]]:
    """A bus, and a function that makes it lose its oldest entry."""
    with ExitStack() as stack:
        if request.param == "redis":
            server = stack.enter_context(closing(RedisServer(request.getfixturevalue("own_redis")().url)))

            def lose() -> None:
                ((entry, _),) = server.client.xrange("t:signals", count=1)
                assert server.client.xdel("t:signals", entry) == 1

            yield RedisBus(server, prefix="t"), lose
            return

        def lose_row() -> None:
            with stores.db.write() as connection:
                oldest = connection.scalar(select(bus_messages.c.position).order_by(bus_messages.c.position).limit(1))
                connection.execute(delete(bus_messages).where(bus_messages.c.position == oldest))

        yield EmbeddedBus(stores.db), lose_row


@pytest.fixture
def loop(stores, bus_and_loss) -> ControllerLoop:
    return ControllerLoop(
        store=SqlDecisionStore(stores.db, SystemClock(), SEALS),
        bus=bus_and_loss[0],
        wakeup=LocalWakeup(),
        clock=SystemClock(),
        settings=PolicySettings(),
        holder="controller#1",
        lease_ttl_s=3600.0,  # each round is stepped by hand
    )


def logged_kinds(stores) -> list[str]:
    """The kinds of the signals in the event log, in order."""
    events = [event for _, event in stores.log.read(None, 0, 1000)]
    return [str(event.data["kind"]) for event in events if event.kind is EventKind.SIGNAL]


def test_an_unreadable_signal_is_logged_and_counts_as_committed(stores, make, bus_and_loss, loop) -> None:
    bus, _ = bus_and_loss
    bus.publish([make.signal(1), strange(2), make.signal(3)])
    loop.run_once()
    assert stores.status.committed([A]) == {A: 3}
    assert logged_kinds(stores) == ["worker_exited", "signal_unreadable", "worker_exited"]
    bus.publish([strange(2)])  # like a daemon whose reply was lost
    loop.run_once()
    assert len(logged_kinds(stores)) == 3


def test_what_the_bus_lost_is_waited_for_and_arrives_again(stores, make, bus_and_loss, loop) -> None:
    bus, lose = bus_and_loss
    signals = [make.signal(seq) for seq in (1, 2, 3)]
    bus.publish(signals)
    lose()
    loop.run_once()
    assert stores.status.committed([A]).get(A, 0) == 0  # the daemon keeps all of them
    bus.publish(signals)  # and sends them again
    loop.run_once()
    assert stores.status.committed([A]) == {A: 3}
    assert logged_kinds(stores) == ["worker_exited"] * 3


def test_the_stand_in_for_an_unreadable_signal_describes_it(bus_and_loss) -> None:
    bus, _ = bus_and_loss
    metrics = Metrics()
    bus.publish([strange(2)])
    (delivered,) = MeasuredBus(bus, metrics, SystemClock()).read(None, limit=10)
    signal, body = delivered.signal, delivered.signal.body
    assert isinstance(body, SignalUnreadable)
    assert (signal.source, signal.incarnation, signal.seq, signal.at) == ("host-a", "inc-a", 2, 5.0)
    assert body.kind == "gpu_on_fire"
    assert "gpu_on_fire" in body.reason
    assert '"degrees":451' in body.document
    assert metrics.registry.get_sample_value("flyball_signals_unreadable_total") == 1.0


def test_a_signal_that_fits_no_column_counts_as_committed_too(stores, make) -> None:
    huge = make.signal(2, RankStalled("job", 1, (0,), Phase.STEP, 2**63, 1.0, 1.0))
    unseen = stores.decisions.unseen([make.signal(1), huge, make.signal(3)])
    assert [type(signal.body).__name__ for signal in unseen] == ["WorkerExited", "SignalUnreadable", "WorkerExited"]
    stores.commit(signals=unseen)
    assert stores.status.committed([A]) == {A: 3}
    assert stores.decisions.unseen([huge]) == []
