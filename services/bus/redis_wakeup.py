"""Wake-ups between processes, over Redis' publish/subscribe.

Wake-ups within the process stay immediate and need no Redis. A thread sends them to other processes, so the notifier
never waits for the network. Wake-ups that cannot be sent are dropped: every loop polls too.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Collection, Iterable

import msgspec
import structlog

from flyball.contracts.clock import Clock
from flyball.contracts.errors import InvalidMessage, Unreachable
from flyball.contracts.wire import decode, encode
from services.bus.redis_client import RedisServer
from services.runtime.outages import OUTAGES, Outage
from services.runtime.wakeup import LocalWakeup

SPACING_S = 0.002  # between two messages; notifications in between are sent together
IDLE_S = 0.5  # how often a thread checks whether it should end
PING_AFTER_S = 2.0  # of silence
GIVE_UP_S = 5.0  # without a reply to the ping
MAX_HOSTS = 1000  # named in one message; with more, it addresses all hosts

_log = structlog.get_logger(__name__)


class _Message(msgspec.Struct, frozen=True):
    sender: str
    hosts: tuple[str, ...] = ()


class RedisWakeup(LocalWakeup):
    """A `Wakeup` that reaches other processes too. Run `run_sender` and `run_listener` in a thread each."""

    def __init__(self, server: RedisServer, *, prefix: str, topics: Iterable[str], clock: Clock) -> None:
        """`topics`: the ones that this process receives from others."""
        super().__init__()
        self._server = server
        self._channel = f"{prefix}:wakeup:"
        self._topics = tuple(topics)
        self._clock = clock
        self._me = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._pending: dict[str, set[str] | None] = {}  # topic -> hosts; None: any host
        self._ready = threading.Event()

    def notify(self, topic: str, hosts: Collection[str] = ()) -> None:
        """Wake waiters in this process at once, those in other processes a moment later."""
        super().notify(topic, hosts)
        with self._lock:
            pending = self._pending.setdefault(topic, set())
            if not hosts or pending is None or len(pending) + len(hosts) > MAX_HOSTS:
                self._pending[topic] = None
            else:
                pending.update(hosts)
        self._ready.set()

    def run_sender(self, stop: threading.Event) -> None:
        """Send until stopped. Waits out outages of Redis."""
        outage = Outage("wakeup-sender", self._clock)
        while not stop.is_set():
            if not self._ready.wait(IDLE_S):
                continue
            self._ready.clear()
            with self._lock:
                pending, self._pending = self._pending, {}
            try:
                self._send(pending)
                outage.ended()
                pause_s = SPACING_S
            except OUTAGES as error:
                pause_s = outage.pause_s(error)
            stop.wait(pause_s)

    def run_listener(self, stop: threading.Event) -> None:
        """Receive until stopped. Waits out outages of Redis."""
        outage = Outage("wakeup-listener", self._clock)
        while not stop.is_set():
            try:
                self._listen(stop, outage)
            except OUTAGES as error:
                stop.wait(outage.pause_s(error))

    def _send(self, pending: dict[str, set[str] | None]) -> None:
        with self._server.translated(), self._server.client.pipeline(transaction=False) as pipeline:
            for topic, hosts in pending.items():
                pipeline.publish(self._channel + topic, encode(_Message(self._me, tuple(hosts or ()))))
            pipeline.execute()

    def _listen(self, stop: threading.Event, outage: Outage) -> None:
        with self._server.translated(), self._server.client.pubsub() as pubsub:  # type: ignore[no-untyped-call]
            pubsub.subscribe(*(self._channel + topic for topic in self._topics))
            since_s, is_asked = self._clock.monotonic_s(), False
            while not stop.is_set():
                message = pubsub.get_message(timeout=IDLE_S)
                now_s = self._clock.monotonic_s()
                if message is not None:
                    since_s, is_asked = now_s, False
                    self._receive(message, outage)
                elif is_asked and now_s - since_s > GIVE_UP_S:
                    raise Unreachable(f"Redis at {self._server.name} did not answer for {GIVE_UP_S:.0f} s.")
                elif not is_asked and now_s - since_s > PING_AFTER_S:
                    pubsub.ping()
                    since_s, is_asked = now_s, True

    def _receive(self, message: dict[str, object], outage: Outage) -> None:
        channel, data = message["channel"], message["data"]
        if not isinstance(channel, bytes):
            return
        topic = channel.decode().removeprefix(self._channel)
        if message["type"] == "subscribe":  # also after a broken connection, which may have lost wake-ups
            outage.ended()
            super().notify(topic)
        elif message["type"] == "message" and isinstance(data, bytes):
            try:
                received = decode(data, _Message)
            except InvalidMessage as error:
                _log.warning("wakeup_not_understood", topic=topic, error=str(error))
                return
            if received.sender != self._me:
                super().notify(topic, received.hosts)
