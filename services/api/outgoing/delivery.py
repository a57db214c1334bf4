"""Sends what happened to somebody else's server: in order, at least once, with retries that end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import structlog

from flyball import __version__, backoff
from flyball.contracts.clock import Clock
from services.runtime.outages import OUTAGES, Outage

Json = dict[str, Any]

LOOK_INTERVAL_S = 1.0
TIMEOUT_S = 10.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0
MAX_ATTEMPTS = 24  # about an hour and a half
_AGAIN = frozenset({408, 425, 429})  # of the 4xx; the others will not get better

log = structlog.get_logger(__name__)


class Unsent(Protocol):
    """What was not sent yet, in order."""

    def leads(self) -> bool: ...

    def following(self) -> tuple[int, Json] | None: ...

    def passed(self, number: int) -> None: ...


Send = Callable[[int, Json], tuple[str, bool]]  # why it failed ('': it did not), and whether another attempt is useless


class DeliveryLoop:
    """One loop. A failed delivery is repeated; later ones wait for it, so that they arrive in order."""

    def __init__(self, *, name: str, unsent: Unsent, send: Send, clock: Clock) -> None:
        self._name = name
        self._unsent = unsent
        self._send = send
        self._clock = clock

    def run(self, stop: threading.Event) -> None:
        """Run until stopped. Outages of the database are waited out."""
        outage = Outage(self._name, self._clock)
        while not stop.is_set():
            wait_s = LOOK_INTERVAL_S
            try:
                if self._unsent.leads():
                    while not stop.is_set() and (found := self._unsent.following()) is not None:
                        self._deliver(*found, stop)
                outage.ended()
            except OUTAGES as error:
                wait_s = outage.pause_s(error)
            stop.wait(wait_s)

    def _deliver(self, number: int, story: Json, stop: threading.Event) -> None:
        """Send one story until it is accepted, refused for good, or MAX_ATTEMPTS failed."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            why, is_final = self._send(number, story)
            if not why or is_final or attempt == MAX_ATTEMPTS:
                if why:
                    log.error(f"{self._name}_given_up", delivery=number, attempts=attempt, why=why)
                self._unsent.passed(number)
                return
            log.warning(f"{self._name}_failed", delivery=number, attempt=attempt, why=why)
            pause_s = backoff.pause_s(attempt, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
            if stop.wait(pause_s) or not self._unsent.leads():
                return  # the next leader sends it


def post(url: str, body: bytes, headers: Mapping[str, str]) -> tuple[str, bool]:
    """Send JSON. Return why it failed ('': it did not), and whether another attempt is useless."""
    import httpx  # takes long to import, and few supervisors send anything

    known = {"Content-Type": "application/json", "User-Agent": f"flyball/{__version__}"}
    try:
        response = httpx.post(url, content=body, headers={**known, **headers}, timeout=TIMEOUT_S)
    except httpx.InvalidURL as error:
        return str(error), True
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}", False
    status = response.status_code
    if response.is_success:
        return "", False
    return f"it answered {status}", 400 <= status < 500 and status not in _AGAIN
