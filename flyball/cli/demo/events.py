"""Follows and queries the event log of the demo's supervisor. All times are wall clock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flyball.cli.reach.client import ApiClient
from flyball.contracts import wire
from flyball.contracts.events import Event, EventKind, per_rank

PAGE = 1000


class EventFeed:
    """All events so far, in the order of the log. `pull` fetches new ones."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._after = 0
        self.events: list[Event] = []

    def pull(self) -> list[Event]:
        """Fetch the events since the last call."""
        new: list[Event] = []
        while True:
            page: dict[str, Any] = self._client.get("/v1/events", after=self._after, limit=PAGE)
            for item in page["items"]:
                new += per_rank(wire.convert(item["event"], Event))
            self._after = page["next_after"]
            if len(page["items"]) < PAGE:
                self.events += new
                return new

    def select(self, kind: EventKind, **fields: str | int) -> Iterator[Event]:
        """The events of a kind whose fields have these values."""
        for event in self.events:
            if event.kind is kind and all(getattr(event, name) == value for name, value in fields.items()):
                yield event

    def newest_world_step(self, world_size: int) -> int:
        """The newest step that all ranks have completed in the newest generation, -1 if none."""
        newest = max((event.generation for event in self.select(EventKind.STEPS)), default=-1)
        return max(self._slowest(newest, world_size), default=-1)

    def resumed_at(self, generation: int, beyond_step: int, world_size: int) -> float | None:
        """When the last rank completed its first step beyond `beyond_step` in `generation` or a later one."""
        for number in sorted(
            {event.generation for event in self.select(EventKind.STEPS) if event.generation >= generation}
        ):
            if max(self._slowest(number, world_size), default=-1) <= beyond_step:
                continue
            latest: dict[int, float] = {}
            for event in self.select(EventKind.STEPS, generation=number):
                first, moments = event.data.get("first_step"), event.data.get("completed_at")
                if isinstance(first, int) and isinstance(moments, list):
                    for step, at in enumerate(moments, first):
                        latest[step] = max(float(at), latest.get(step, 0.0))
            beyond = [step for step in latest if step > beyond_step]
            if beyond:
                return latest[min(beyond)]
        return None

    def _slowest(self, generation: int, world_size: int) -> Iterator[int]:
        """Steps that all ranks have completed. Relies on the demo having one sensor, whose summaries have all ranks."""
        for event in self.select(EventKind.STEPS, generation=generation):
            step = event.data.get("slowest_step")
            if event.data.get("ranks") == world_size and isinstance(step, int):
                yield step
