"""Live output of the demo: one line per event and, on a terminal, a status line below."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status
from rich.text import Text

from flyball.contracts.decisions import DecisionKind
from flyball.contracts.events import Event, EventKind

PROGRESS_INTERVAL_S = 10.0  # between progress lines without a terminal

_MARKS = {
    EventKind.FAULT_INJECTED: ("fault", "bold red"),
    EventKind.SIGNAL: ("signal", "yellow"),
    EventKind.INCIDENT_OPENED: ("incident", "yellow"),
    EventKind.DECISION: ("decision", "bold cyan"),
    EventKind.WORKERS_STOPPED: ("stopped", "cyan"),
    EventKind.GENERATION_STARTED: ("started", "cyan"),
    EventKind.RESTORED: ("restored", "green"),
    EventKind.INCIDENT_CLOSED: ("closed", "bold green"),
    EventKind.HOST_JOINED: ("host", "blue"),
    EventKind.HOST_LEFT: ("host", "blue"),
    EventKind.JOB_ENDED: ("job", "blue"),
}


class DemoTimeline:
    """Prints on stdout, or on stderr if stdout is for JSON."""

    def __init__(self, *, on_stderr: bool) -> None:
        self._console = Console(file=sys.stderr if on_stderr else sys.stdout, highlight=False, soft_wrap=True)
        self._began_at: float | None = None
        self._status: Status | None = None
        self._step = -1
        self._acting = False  # during an action, signals are its own effects, for example stopped workers
        self._progress_at = time.monotonic()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status = self._console.status("starting")
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status:
            self._status.stop()

    def print(self, text: str, style: str = "bold") -> None:
        """Print a line about the demo itself."""
        self._console.print(Text(text, style=style))

    def show_activity(self, text: str) -> None:
        """Show what the demo is waiting for now."""
        if self._status:
            self._status.update(Text(f"step {self._step}  {text}" if self._step >= 0 else text))
        elif time.monotonic() - self._progress_at > PROGRESS_INTERVAL_S:
            self._progress_at = time.monotonic()
            self._console.print(Text(f"          ...        {f'step {self._step}: ' if self._step >= 0 else ''}{text}"))

    def show(self, events: Iterable[Event], step: int) -> None:
        """Show new events, oldest first, and the step that training has reached."""
        self._step = max(step, self._step)
        for event in events:
            if event.kind is EventKind.DECISION:
                self._acting = event.data.get("kind") != DecisionKind.HOLD.value
            elif event.kind is EventKind.INCIDENT_CLOSED or event.kind is EventKind.FAULT_INJECTED:
                self._acting = False
            if event.kind in _MARKS and not (self._acting and event.kind is EventKind.SIGNAL):
                self._line(event)

    def _line(self, event: Event) -> None:
        self._began_at = event.at if self._began_at is None else self._began_at
        mark, style = _MARKS[event.kind]
        line = Text(f"{event.at - self._began_at:8.2f} s  ")
        line.append(f"{mark:<9}", style=style)
        line.append(_describe(event))
        self._console.print(line)


def _describe(event: Event) -> str:
    data = {k: v for k, v in event.data.items() if v not in (None, "", [])}
    target = data.get("target") or (f"rank {event.rank}" if event.rank >= 0 else event.host_id)
    step = data.get("restore_step")
    reason = f": {data['reason']}" if "reason" in data else ""
    texts = {
        EventKind.FAULT_INJECTED: f"{data.get('fault')} injected: {target}",
        EventKind.SIGNAL: f"{data.get('kind')} from {data.get('source')}",
        EventKind.INCIDENT_OPENED: f"{event.incident_id} opened: {data.get('cause')}",
        EventKind.DECISION: f"{data.get('decision_id')} {data.get('kind')}{reason}",
        EventKind.WORKERS_STOPPED: f"all workers of generation {event.generation} stopped",
        EventKind.GENERATION_STARTED: f"generation {event.generation}, "
        f"{'from scratch' if step is None else f'from step {step}'}",
        EventKind.RESTORED: f"rank {event.rank} has step {data.get('step')}, {_source(event)}",
        EventKind.INCIDENT_CLOSED: f"{event.incident_id} {data.get('state')}, lost steps: {data.get('lost_steps')}",
        EventKind.HOST_JOINED: f"{event.host_id} joined",
        EventKind.HOST_LEFT: f"{event.host_id} left",
        EventKind.JOB_ENDED: f"{event.job} {data.get('outcome')}",
    }
    return texts[event.kind]


def _source(event: Event) -> str:
    size, by_socket = (float(str(event.data.get(k) or 0)) / 1e6 for k in ("size_bytes", "socket_bytes"))
    source = f"{event.data.get('source_tier')} of {event.data.get('source_host') or event.host_id}"
    over = str(event.data.get("transport") or "socket").upper()
    return f"{size:.1f} MB from {source}" + (f", {by_socket:.1f} MB over {over}" if by_socket else "")
