"""Known truths: logs written from a schedule of outages, which must be recovered."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyball.contracts.events import Event, EventKind
from goodput.calculator import calculate

outages = st.lists(
    st.fixed_dictionaries(
        {
            "steps": st.integers(3, 25),  # completed before it
            "into_step": st.floats(0.05, 0.9),  # of the step in progress
            "lost": st.integers(0, 2),
            "detection": st.floats(0.01, 30),
            "decision": st.floats(0.01, 2),
            "stop": st.floats(0.01, 5),
            "restart": st.floats(0.1, 60),
            "restore": st.floats(0.1, 20),
            "warm_up": st.floats(0.0, 5),
            "stamped": st.booleans(),
        }
    ),
    max_size=4,
)


@given(outages, st.floats(0.05, 3.0), st.integers(1, 3), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_a_known_schedule_is_recovered(
    schedule: list[dict[str, float]], step_s: float, ranks: int, chance: random.Random
) -> None:
    log, truth, lost_steps = write_log(schedule, step_s, ranks)
    chance.shuffle(log)

    report = calculate(log)

    assert report.elapsed_s == pytest.approx(sum(truth.values()))
    for category, truth_s in truth.items():
        # Without the injector's stamp the progress of the step that was cut off is unknown: up to one step per outage.
        unstamped = sum(1 for outage in schedule if not outage["stamped"])
        allowed = unstamped * step_s if category in ("recomputed", "detection") else 0.0
        assert report.seconds_by_category[category] == pytest.approx(truth_s, abs=allowed + 1e-6), category
    assert [i.lost_steps for i in report.incidents] == lost_steps
    assert report.interruptions == len(schedule)


def write_log(
    schedule: list[dict[str, float]], step_s: float, ranks: int
) -> tuple[list[Event], dict[str, float], list[int]]:
    """Events of a job interrupted as scheduled, and the true time of each category."""
    truth = dict.fromkeys(
        ("scheduling", "useful", "recomputed", "detection", "decision", "stop", "restart", "restore", "warm_up"), 0.0
    )
    log: list[Event] = []
    lost_steps: list[int] = []
    now = 1_000_000.0

    def spend(category: str, seconds: float) -> float:
        nonlocal now
        truth[category] += seconds
        now += seconds
        return now

    def write(
        kind: EventKind, /, *, generation: int = -1, rank: int = -1, incident: str = "", **fields: object
    ) -> None:
        log.append(Event(now, kind, "job", generation, rank, "", incident, fields))

    write(EventKind.JOB_SUBMITTED)
    spend("scheduling", 2.0)
    start = {"restart": 3.0, "restore": 1.0, "warm_up": 0.5}
    restored_step, incident = -1, ""
    ends = [*schedule, {"steps": 6}]
    for generation, outage in enumerate(ends, start=1):
        write(
            EventKind.GENERATION_STARTED,
            generation=generation,
            incident=incident,
            restore_step=None if restored_step < 0 else restored_step,
        )
        spawned_at = now
        restore_began_at = spend("restart", start["restart"])
        restored_at = spend("restore", start["restore"])
        for rank in range(ranks):
            write(
                EventKind.RANK_MARKS,
                generation=generation,
                rank=rank,
                spawned_at=spawned_at,
                attached_at=restore_began_at,
                restore_began_at=restore_began_at,
                restored_at=restored_at,
                save_blocked_s=0.0,
            )
        spend("warm_up", start["warm_up"])
        completed_at = []
        count = int(outage["steps"])
        lost = int(outage.get("lost", 0))
        for index in range(count):
            completed_at.append(spend("useful" if index < count - lost else "recomputed", step_s))
        for rank in range(ranks):
            write(
                EventKind.STEPS,
                generation=generation,
                rank=rank,
                first_step=restored_step + 1,
                completed_at=completed_at,
            )
        if incident:
            write(EventKind.INCIDENT_CLOSED, incident=incident, state="resolved")
        if outage is ends[-1]:
            write(EventKind.JOB_ENDED, outcome="succeeded")
            break
        restored_step += count - lost
        lost_steps.append(lost)
        spend("recomputed", outage["into_step"] * step_s)
        if outage["stamped"]:
            write(EventKind.FAULT_INJECTED, fault="kill", target="rank 0")
        spend("detection", outage["detection"])
        incident = f"inc-{generation}"
        write(EventKind.INCIDENT_OPENED, incident=incident, cause="worker_killed")
        spend("decision", outage["decision"])
        write(EventKind.DECISION, incident=incident, kind="restart_in_place")
        spend("stop", outage["stop"])
        write(EventKind.WORKERS_STOPPED, generation=generation, incident=incident)
        start = outage
    return log, truth, lost_steps
