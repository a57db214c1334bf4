"""Wake-ups over Redis reach every other process, do not delay this one, and cost only time while Redis is away."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
from support.clocks.waits import until

from flyball.contracts.clock import SystemClock
from services.bus import redis_wakeup
from services.bus.redis_client import RedisServer
from services.bus.redis_wakeup import MAX_HOSTS, RedisWakeup
from services.runtime.wakeup import TOPICS

DEADLINE_S = 90.0


@pytest.fixture
def server(own_redis):
    return own_redis()


@pytest.fixture
def process(server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RedisWakeup]]:
    """Makes the wake-up of one more process, which listens when this returns. It gives up no live connection: it
    would subscribe again, and receive more than was sent."""
    monkeypatch.setattr(redis_wakeup, "GIVE_UP_S", 3600.0)
    with ExitStack() as stack:
        stop = threading.Event()

        def new(*topics: str, prefix: str = "t") -> RedisWakeup:
            redis = stack.enter_context(closing(RedisServer(server.url)))
            wakeup = RedisWakeup(redis, prefix=prefix, topics=topics or TOPICS, clock=SystemClock())
            for run in (wakeup.run_sender, wakeup.run_listener):
                thread = threading.Thread(target=run, args=(stop,))
                thread.start()
                stack.callback(thread.join, DEADLINE_S)
            for topic in topics or TOPICS:
                assert wakeup.wait(topic, DEADLINE_S)  # a new listener may have missed something
            return wakeup

        yield new
        stop.set()


class Heard:
    def __init__(self, wakeup: RedisWakeup, topic: str = "commands") -> None:
        self.calls: list[frozenset[str]] = []
        self._changed = threading.Condition()
        wakeup.subscribe(topic, self._hear)

    def _hear(self, hosts) -> None:
        with self._changed:
            self.calls.append(frozenset(hosts))
            self._changed.notify_all()

    def until(self, condition: Callable[[list[frozenset[str]]], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.calls), DEADLINE_S), self.calls


def test_another_process_is_woken_with_the_hosts(process) -> None:
    one, other = process(), process()
    here, there = Heard(one), Heard(other)
    one.notify("commands", ["host-a", "host-b"])
    assert here.calls == [{"host-a", "host-b"}]
    there.until(lambda calls: calls == [{"host-a", "host-b"}])
    one.notify("signals")
    assert other.wait("signals", DEADLINE_S)
    other.notify("commands")
    here.until(lambda calls: calls[1:] == [frozenset()])  # and not its own


def test_too_many_hosts_to_name_address_all_hosts(process) -> None:
    one, other = process(), process()
    there = Heard(other)
    one.notify("commands", [f"host-{number}" for number in range(MAX_HOSTS + 1)])
    there.until(lambda calls: calls == [frozenset()])


def test_a_process_receives_its_topics_of_its_own_cluster(process) -> None:
    one, other, stranger = process(), process("actions"), process(prefix="u")
    for topic in TOPICS:
        one.notify(topic)
    assert other.wait("actions", DEADLINE_S)
    assert not other.wait("signals", 0.0)
    assert not stranger.wait("actions", 0.0)


def test_what_is_no_wake_up_is_ignored(server, process) -> None:
    one = process()
    there = Heard(one)
    for junk in ("", "{", "[]", "\xff" * 100):
        server.client.publish("t:wakeup:commands", junk)
    process().notify("commands", ["host-a"])
    there.until(lambda calls: calls == [{"host-a"}])


def test_a_dead_connection_is_replaced(server, process, monkeypatch) -> None:
    monkeypatch.setattr(redis_wakeup, "PING_AFTER_S", 0.0)
    monkeypatch.setattr(redis_wakeup, "IDLE_S", 0.05)

    def pings() -> int:
        return int(server.client.info("commandstats")["cmdstat_ping"]["calls"])

    before, one = pings(), process("actions")
    until(lambda: pings() >= before + 4)
    assert not one.wait("actions", 0.0)  # replies to pings are no wake-ups, and keep the connection
    given_up = threading.Event()

    def note(*_: object) -> float:
        given_up.set()
        return 0.05

    monkeypatch.setattr(redis_wakeup.Outage, "pause_s", note)
    monkeypatch.setattr(redis_wakeup, "GIVE_UP_S", 0.1)
    server.process.send_signal(signal.SIGSTOP)
    assert given_up.wait(DEADLINE_S)
    server.process.send_signal(signal.SIGCONT)
    assert one.wait("actions", DEADLINE_S)  # because it subscribed again


def test_without_redis_the_process_goes_on_and_afterwards_all_loops_wake(server, process, monkeypatch) -> None:
    one, other = process(), process()
    server.kill()
    sent_by: set[threading.Thread] = set()
    really = one._send

    def send(pending) -> None:
        sent_by.add(threading.current_thread())
        really(pending)

    monkeypatch.setattr(one, "_send", send)
    for _ in range(100):
        one.notify("signals")
    assert threading.current_thread() not in sent_by  # a notifier never waits for Redis
    assert one.wait("signals", 0.0)
    assert not other.wait("signals", 0.0)
    server.start()
    assert other.wait("signals", DEADLINE_S)  # it subscribes again, and so wakes
    one.notify("actions")
    assert other.wait("actions", DEADLINE_S)
