"""Follows a supervisor's event log as server-sent events, also after lost connections."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from flyball.cli.reach.client import ApiClient
from flyball.contracts.errors import FlyballError, TooBusy, Unreachable

RECONNECT_S = 1.0
SILENCE_S = 30.0  # a supervisor that has no event to send sends a heartbeat every 10 s


class StreamedEvent(NamedTuple):
    """An event, and its position in the log."""

    position: int
    event: dict[str, Any]


def follow(
    client: ApiClient,
    *,
    after: int,
    kinds: Sequence[str],
    job: str = "",
    lost: Callable[[FlyballError], None],
) -> Iterator[StreamedEvent]:
    """Yield the events after a position, for ever. After a lost connection, which `lost` is told once, it goes on where
    it was. Raises what ApiClient does if the first connection fails, and for a wrong token."""
    has_connected = is_lost = False
    while True:
        try:
            with client.lines(
                "/v1/stream", silence_s=SILENCE_S, headers={"Last-Event-ID": str(after)}, kind=kinds, job=job or None
            ) as lines:
                has_connected, is_lost = True, False
                for found in parse(lines):
                    after = found.position
                    yield found
        except (Unreachable, TooBusy) as error:
            if not has_connected:
                raise
            if not is_lost:
                lost(error)
            is_lost = True
        time.sleep(RECONNECT_S)


def parse(lines: Iterable[str]) -> Iterator[StreamedEvent]:
    """The events in the lines of a stream. Skips heartbeats, and an event that the end of the stream cut off."""
    position, data = -1, ""
    for line in lines:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "id" and value.isdecimal():
            position = int(value)
        elif name == "data":
            data += value
        elif not line:
            if data:
                yield StreamedEvent(position, msgspec.json.decode(data))
            data = ""
