"""The load generator: each host on its own connection at a fixed interval (`run_paced`), or as many reports as a few
connections carry (`run_flood`)."""

from __future__ import annotations

import asyncio
import heapq
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import cast

import msgspec

from control_plane_bench.fleet import INTERVAL_S, STEP_S, FakeHost
from flyball.contracts.clock import SystemClock

TICK_S = 0.002
CONNECT_AT_ONCE = 200
ANSWER_TIMEOUT_S = 30.0
_LENGTH = b"content-length: "
_CLOCK = SystemClock()


class LoadResult(msgspec.Struct):
    """The result of a run. Latencies are in seconds, from the moment when a report was due."""

    connections: int
    seconds: float
    sent: int
    taken: int
    refused: int
    lost: int  # unanswered at the end, or on a closed connection
    latencies: array[float]
    lateness: array[float]  # the generator's own delay, from due to sent
    joining: array[float]  # latencies of reports due while the hosts join
    starting: array[float]  # of those due while their jobs start
    first_refusal: str = ""

    @property
    def dropped(self) -> int:
        return self.refused + self.lost

    @property
    def per_s(self) -> float:
        """Return the accepted reports per second."""
        return self.taken / self.seconds


def joined(results: Sequence[LoadResult]) -> LoadResult:
    """Combine several runs into one result."""
    return LoadResult(
        connections=max(result.connections for result in results),
        seconds=sum(result.seconds for result in results),
        sent=sum(result.sent for result in results),
        taken=sum(result.taken for result in results),
        refused=sum(result.refused for result in results),
        lost=sum(result.lost for result in results),
        latencies=sum((result.latencies for result in results), array("d")),
        lateness=sum((result.lateness for result in results), array("d")),
        joining=sum((result.joining for result in results), array("d")),
        starting=sum((result.starting for result in results), array("d")),
        first_refusal=next((result.first_refusal for result in results if result.first_refusal), ""),
    )


class Link(asyncio.Protocol):
    """One connection. At most `run.at_once` reports are in flight; those due together are sent together."""

    def __init__(self, run: _Run, hosts: Sequence[FakeHost]) -> None:
        self._run = run
        self._hosts = hosts
        self._next = 0
        self._transport: asyncio.Transport
        self._answer = b""
        self._sent: deque[float] = deque()  # when each report in flight was due
        self._due: deque[float] = deque()
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports do not inherit from it

    def send(self, due_s: float, count: int = 1) -> None:
        """Send the reports of the next `count` hosts: now, or after the answers to those in flight."""
        self._due.extend([due_s] * count)
        self._send_due()

    def _send_due(self) -> None:
        run = self._run
        if self._sent or self.closed or not self._due:
            return
        requests = []
        now_s = monotonic()
        step = int(now_s / STEP_S)
        while self._due and len(requests) < run.at_once:
            due_s = self._due.popleft()
            host = self._hosts[self._next]
            self._next = (self._next + 1) % len(self._hosts)
            run.result.lateness.append(now_s - due_s)
            self._sent.append(due_s)
            has_stepped = run.has_ranks and run.has_stepped(host, step)
            requests.append(host.request(_CLOCK.wall_s(), step, has_ranks=run.has_ranks, has_stepped=has_stepped))
        run.result.sent += len(requests)
        self._transport.write(b"".join(requests))

    def data_received(self, data: bytes) -> None:
        if self._answer:
            data = self._answer + data
        while size_bytes := _answer_bytes(data):
            self._take(data[:size_bytes])
            data = data[size_bytes:]
        self._answer = data
        if self._sent:
            return
        if self._run.floods:
            self.send(monotonic(), self._run.at_once)
        else:
            self._send_due()

    def _take(self, answer: bytes) -> None:
        result, due_s = self._run.result, self._sent.popleft()
        if answer.startswith(b"HTTP/1.1 200 "):
            result.taken += 1
            self._run.latencies(due_s).append(monotonic() - due_s)
        else:
            result.refused += 1
            result.first_refusal = result.first_refusal or answer.decode(errors="replace")

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True

    def close(self) -> None:
        self._transport.close()

    @property
    def outstanding(self) -> int:
        return len(self._due) + len(self._sent)


class _Run:
    def __init__(
        self, hosts: Sequence[FakeHost], connections: int, at_once: int = 1, *, has_ranks: bool = True
    ) -> None:
        self.at_once = at_once
        self.has_ranks = has_ranks
        self.links = [Link(self, hosts[n::connections]) for n in range(connections)]
        self.result = LoadResult(connections, 0.0, 0, 0, 0, 0, *(array("d") for _ in range(4)))
        self.floods = False
        self.joins_until_s = self.counts_from_s = 0.0
        self._last_step: dict[str, int] = {}

    def latencies(self, due_s: float) -> array[float]:
        if due_s >= self.counts_from_s:
            return self.result.latencies
        return self.result.joining if due_s < self.joins_until_s else self.result.starting

    def has_stepped(self, host: FakeHost, step: int) -> bool:
        """Whether this report is the host's first with this step."""
        is_new = self._last_step.get(host.host_id) != step
        self._last_step[host.host_id] = step
        return is_new

    async def connect(self, port: int) -> None:
        loop = asyncio.get_running_loop()
        for first in range(0, len(self.links), CONNECT_AT_ONCE):
            await asyncio.gather(
                *(
                    loop.create_connection(lambda link=link: link, "127.0.0.1", port)  # type: ignore[misc]
                    for link in self.links[first : first + CONNECT_AT_ONCE]
                )
            )

    async def finish(self) -> LoadResult:
        """Wait for the last answers, close the connections, and return the result."""
        deadline_s = monotonic() + ANSWER_TIMEOUT_S
        while any(link.outstanding and not link.closed for link in self.links) and monotonic() < deadline_s:
            await asyncio.sleep(0.01)
        self.result.lost = sum(link.outstanding for link in self.links)
        for link in self.links:
            link.close()
        await asyncio.sleep(0)
        return self.result


async def run_paced(
    port: int,
    hosts: Sequence[FakeHost],
    seconds: float,
    *,
    joining_s: float,
    starting_s: float,
    start: Callable[[], None],
) -> LoadResult:
    """Send one report per host and interval, each host on its own connection, spread evenly over the interval.

    For `joining_s` the hosts have no ranks. Then `start` is called in a thread, and they have some. `starting_s` later
    the run counts, for `seconds`.
    """
    run = _Run(hosts, len(hosts), has_ranks=False)
    await run.connect(port)
    began_s = monotonic() + 0.1
    run.joins_until_s = began_s + joining_s
    run.counts_from_s = run.joins_until_s + starting_s
    end_s = run.counts_from_s + seconds
    queue = [(began_s + INTERVAL_S * n / len(run.links), n) for n in range(len(run.links))]
    heapq.heapify(queue)
    started: asyncio.Task[None] | None = None
    while queue:
        now_s = monotonic()
        if started is None and now_s >= run.joins_until_s:
            started = asyncio.create_task(asyncio.to_thread(start))
        run.has_ranks = started is not None and started.done()
        while queue and queue[0][0] <= now_s:
            due_s, n = queue[0]
            if due_s + INTERVAL_S < end_s:
                heapq.heapreplace(queue, (due_s + INTERVAL_S, n))
            else:
                heapq.heappop(queue)
            run.links[n].send(due_s)
        await asyncio.sleep(TICK_S)
    if started is not None:
        await started
    result = await run.finish()
    result.seconds = monotonic() - began_s
    return result


async def run_flood(
    port: int,
    hosts: Sequence[FakeHost],
    connections: int,
    seconds: float,
    *,
    at_once: int = 1,
    has_ranks: bool = True,
) -> LoadResult:
    """Send all hosts' reports over `connections` connections. Each sends its next `at_once` reports as soon as the last
    ones were answered."""
    run = _Run(hosts, connections, at_once, has_ranks=has_ranks)
    await run.connect(port)
    run.floods = True
    began_s = monotonic()
    for link in run.links:
        link.send(began_s, at_once)
    await asyncio.sleep(seconds)
    run.floods = False
    run.result.seconds = monotonic() - began_s
    return await run.finish()


def _answer_bytes(data: bytes) -> int:
    """Return the size of the first answer in `data`; 0 if it is incomplete."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return 0
    at = data.lower().find(_LENGTH, 0, end) + len(_LENGTH)
    size_bytes = end + 4 + int(data[at : data.index(b"\r\n", at)])
    return size_bytes if len(data) >= size_bytes else 0
