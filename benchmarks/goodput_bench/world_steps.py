"""Steps that ranks told of one by one, summed up as Flyball's sensor does it before they come into its event log. Pure.

Without this the calculator would see on one side only by how much each step's last rank was late, and count it apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from flyball.contracts.events import Event, EventKind


def summed_up(events: Iterable[Event], world_size: int) -> list[Event]:
    """The events, those of the kind STEPS replaced by one per generation: when the last rank completed each step that
    all of them did. Steps of a generation have no gaps."""
    others: list[Event] = []
    completed: dict[tuple[str, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        first, times = event.data.get("first_step"), event.data.get("completed_at")
        if event.kind is EventKind.STEPS and isinstance(first, int) and isinstance(times, list):
            for step, at in enumerate(times, first):
                completed[event.job, event.generation][step].append(float(at))
        else:
            others.append(event)
    for (job, generation), of_step in sorted(completed.items()):
        latest = {step: max(times) for step, times in sorted(of_step.items()) if len(times) == world_size}
        if latest:
            others.append(_summary(job, generation, latest, world_size))
    return others


def _summary(job: str, generation: int, latest: dict[int, float], world_size: int) -> Event:
    times: list[int | float | str] = list(latest.values())
    return Event(
        at=max(latest.values()),
        kind=EventKind.STEPS,
        job=job,
        generation=generation,
        data={
            "first_step": min(latest),
            "completed_at": times,
            "slowest_step": max(latest),
            "ranks": world_size,
            "sensor": "benchmark",
        },
    )
