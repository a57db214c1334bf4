"""The event log of the demo's supervisor, followed and asked. All times are wall clock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from flyball.cli.client import ApiClient
from flyball.contracts.events import Event, EventKind

PAGE = 1000


class EventFeed:
    """Every event so far, in the order of the log. `pull` fetches what is new."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._after = 0
        self.events: list[Event] = []

    def pull(self) -> list[Event]:
        """The events since the last call."""
        new: list[Event] = []
        while True:
            page: dict[str, Any] = self._client.get("/v1/events", after=self._after, limit=PAGE)
            new += [msgspec.convert(item["event"], Event) for item in page["items"]]
            self._after = page["next_after"]
            if len(page["items"]) < PAGE:
                self.events += new
                return new

    def of(self, kind: EventKind, **fields: str | int) -> Iterator[Event]:
        """Events of a kind whose fields have these values."""
        for event in self.events:
            if event.kind is kind and all(getattr(event, name) == value for name, value in fields.items()):
                yield event

    def completions(self) -> Iterator[tuple[int, int, int, float]]:
        """(generation, rank, step, completed at) of every step that every rank completed."""
        for event in self.of(EventKind.STEPS):
            first, moments = event.data.get("first_step"), event.data.get("completed_at")
            if isinstance(first, int) and isinstance(moments, list):
                for offset, at in enumerate(moments):
                    yield event.generation, event.rank, first + offset, float(at)

    def newest_world_step(self, world_size: int) -> int:
        """The newest step that every rank has completed in the newest generation, -1 before the first."""
        newest: dict[int, dict[int, int]] = {}
        for generation, rank, step, _ in self.completions():
            ranks = newest.setdefault(generation, {})
            ranks[rank] = max(step, ranks.get(rank, -1))
        ranks = newest[max(newest)] if newest else {}
        return min(ranks.values()) if len(ranks) == world_size else -1

    def resumed_at(self, generation: int, beyond_step: int, world_size: int) -> float | None:
        """When the last rank completed its first step beyond `beyond_step` in `generation` or a later one."""
        first: dict[int, float] = {}
        for g, rank, step, at in self.completions():
            if g >= generation and step > beyond_step:
                first[rank] = min(at, first.get(rank, at))
        return max(first.values()) if len(first) == world_size else None
