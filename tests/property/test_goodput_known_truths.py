"""A log written from a known schedule of delays, by ranks that log everything themselves.

The calculator recovers the schedule to within a step, whatever the order and repetition of lines.
"""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyball.contracts.events import Event, EventKind
from goodput.calculator import AccountOptions, calculate
from goodput.history.step_log import WorldStepLog

RANKS = 4
CATEGORIES = {"data": "data_wait", "checkpoint": "checkpoint_blocked", "eval": "evaluation", "straggler": "straggler"}

interruptions = st.fixed_dictionaries(
    {
        "what": st.sampled_from(sorted(CATEGORIES)),
        "steps": st.floats(0.3, 30.0),  # how long, in steps
        "rank": st.integers(0, RANKS - 1),
    }
)
generations = st.fixed_dictionaries(
    {
        "held_up": st.dictionaries(st.integers(3, 28), interruptions, max_size=5),  # by index of the step
        "lost": st.integers(0, 2),
        "host": st.integers(0, RANKS - 1),
        "detection": st.floats(0.5, 30.0),
        "decision": st.floats(0.1, 2.0),
        "idle_no_hosts": st.one_of(st.just(0.0), st.floats(1.0, 300.0)),
        "stop": st.floats(0.1, 5.0),
        "restart": st.floats(1.0, 60.0),
        "restore": st.floats(1.0, 20.0),
        "ranks_left": st.sampled_from([RANKS, RANKS, RANKS - 1]),
    }
)


class Writer:
    """Writes events, and sums up the true time of each category."""

    def __init__(self, step_s: float, chance: random.Random) -> None:
        self.step_s = step_s
        self.chance = chance
        self.now = 1_000_000.0
        self.log: list[Event] = []
        self.truth: defaultdict[str, float] = defaultdict(float)
        self.by_host: defaultdict[str, float] = defaultdict(float)

    def emit(self, kind: EventKind, /, generation: int = -1, rank: int = -1, incident: str = "", **data) -> None:
        self.emit_at(self.now, kind, generation, rank, incident, **data)

    def emit_at(
        self, at: float, kind: EventKind, /, generation: int = -1, rank: int = -1, incident: str = "", **data
    ) -> None:
        host = f"host-{rank}" if rank >= 0 else ""
        self.log.append(Event(at, kind, "job", generation, rank, host, incident, data))

    def spend(self, category: str, seconds: float, host: int | None = None) -> None:
        self.truth[category] += seconds
        self.now += seconds
        if host is not None:
            self.by_host[f"host-{host}"] += seconds

    def phase(self, generation: int, name: str, ranks: range, at: float | None = None) -> None:
        for rank in ranks:
            self.emit_at(self.now if at is None else at, EventKind.PHASE, generation, rank, phase=name)

    def step(self, generation: int, step: int, ranks: range, held_up: dict | None, *, kept: bool) -> None:
        """One step of all ranks, with its delays. In a generation that lacks ranks, each useful second counts by its
        share of ranks."""
        if held_up is not None and held_up["what"] != "straggler":
            self.wait(generation, ranks, held_up)
        share = len(ranks) / RANKS if kept else 1.0
        self.spend("useful" if kept else "recomputed", self.step_s * share)
        self.spend("reduced_capacity", self.step_s * (1.0 - share))
        late = self.now
        if held_up is not None and held_up["what"] == "straggler":
            self.spend("straggler", held_up["steps"] * self.step_s, held_up["rank"] % len(ranks))
        for rank in ranks:
            is_last = held_up is not None and held_up["what"] == "straggler" and rank == held_up["rank"] % len(ranks)
            at = self.now if is_last else late - self.chance.uniform(0.0, 0.01) * self.step_s
            self.emit_at(at, EventKind.STEPS, generation, rank, first_step=step, completed_at=[at])

    def wait(self, generation: int, ranks: range, held_up: dict) -> None:
        began, seconds = self.now, held_up["steps"] * self.step_s
        slowest = held_up["rank"] % len(ranks) if held_up["what"] == "data" else None
        self.phase(generation, held_up["what"], ranks)
        self.spend(CATEGORIES[held_up["what"]], seconds, slowest)
        for rank in ranks:
            share = 1.0 if slowest is None or rank == slowest else 0.05
            self.phase(generation, "step", range(rank, rank + 1), at=began + seconds * share)


def write(schedule: list[dict], step_s: float, chance: random.Random) -> Writer:
    out = Writer(step_s, chance)
    out.emit(EventKind.JOB_SUBMITTED, world_size=RANKS)
    out.spend("scheduling", 30.0)
    next_step, incident = 0, ""
    start, ranks = {"restart": 10.0, "restore": 2.0}, RANKS
    for number, generation in enumerate([*schedule, None], start=1):
        alive = range(ranks)
        restore_step = next_step - 1 if next_step else None
        out.emit(EventKind.GENERATION_STARTED, number, incident=incident, restore_step=restore_step, world_size=ranks)
        out.phase(number, "init", alive)
        out.spend("restart", start["restart"])
        out.phase(number, "restore", alive)
        out.spend("restore", start["restore"])
        out.phase(number, "step", alive)
        count, lost = (30, generation["lost"]) if generation else (30, 0)
        held_up = generation["held_up"] if generation else {}
        for place in range(count):
            is_kept = place < count - lost
            # The delays of a lost step are lost with it, and would be counted by category.
            out.step(number, next_step + place, alive, held_up.get(place) if is_kept else None, kept=is_kept)
        next_step += count - lost
        if generation is None:
            out.emit(EventKind.JOB_ENDED, outcome="succeeded")
            return out
        incident, host = f"inc-{number}", f"host-{generation['host']}"
        before = out.now - lost * step_s
        out.spend("detection", generation["detection"])
        out.emit(EventKind.INCIDENT_OPENED, number, incident=incident, cause="host_silent", host_id=host)
        out.spend("decision", generation["decision"])
        if generation["idle_no_hosts"]:
            out.emit(EventKind.DECISION, number, incident=incident, kind="hold", rule="wait_for_a_spare")
            out.spend("idle_no_hosts", generation["idle_no_hosts"])
        out.emit(EventKind.DECISION, number, incident=incident, kind="migrate_to_spare", rule="migrate_to_spare")
        out.spend("stop", generation["stop"])
        out.emit(EventKind.WORKERS_STOPPED, number, incident=incident)
        out.by_host[host] += out.now - before + generation["restart"] + generation["restore"]
        start, ranks = generation, generation["ranks_left"]
        out.emit_at(out.now + generation["restart"] + 1.0, EventKind.INCIDENT_CLOSED, number, incident=incident)
    raise AssertionError("the last generation ends the job")


@given(st.lists(generations, max_size=3), st.floats(0.05, 5.0), st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_delays_are_recovered(schedule: list[dict], step_s: float, chance: random.Random) -> None:
    written = write(schedule, step_s, chance)
    log = written.log + chance.choices(written.log, k=20)
    chance.shuffle(log)

    report = calculate(log, options=AccountOptions(gpu_hour_price=1.0))

    assert report.elapsed_s == pytest.approx(sum(written.truth.values()))
    for category, seconds in report.seconds_by_category.items():
        assert seconds == pytest.approx(written.truth[category], abs=step_s), category
    lost_by_host = {host: s for host, s in report.badput_by_host.items() if s > step_s}
    if written.truth["reduced_capacity"] == 0.0:
        for host, seconds in written.by_host.items():
            assert report.badput_by_host.get(host, 0.0) == pytest.approx(seconds, abs=step_s), host
        assert set(lost_by_host) <= set(written.by_host)
    assert report.gpus == RANKS
    assert report.interruptions == len(schedule)
    assert [i.lost_steps for i in report.incidents] == [generation["lost"] for generation in schedule]


@given(st.integers(3, 6), st.integers(4, 20), st.floats(-500.0, 500.0), st.floats(0.1, 5.0))
@settings(max_examples=100, deadline=None)
def test_a_host_whose_clock_is_off_moves_the_steps_of_the_world_by_less_than_one(
    ranks: int, steps: int, off_s: float, step_s: float
) -> None:
    log = WorldStepLog()
    true = [1000.0 + step_s * (step + 1) for step in range(steps)]
    for rank in range(ranks):
        times = [at + off_s for at in true] if rank == 0 else true
        log.add(Event(times[-1], EventKind.STEPS, "j", 1, rank, data={"first_step": 0, "completed_at": times}))
    found = log.world_steps(None).steps
    assert [step.step for step in found] == list(range(steps))
    for step, at in zip(found, true, strict=True):
        assert abs(step.at - at) <= step_s + 1e-6
