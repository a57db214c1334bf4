"""Event logs of made-up runs: a job that is interrupted now and then, as the supervisor would have written it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from flyball.contracts.events import Event, EventKind

CAUSES = ("worker_killed", "host_silent", "rank_stalled", "preemption_notice")
START = 1_795_000_000.0


def interrupted_run(
    *,
    job: str = "llama",
    seed: int = 1,
    interruptions: int = 6,
    steps_between: int = 900,
    step_s: float = 2.0,
    save_every: int = 100,
    save_s: float = 1.0,
    restart_s: float = 40.0,
    hosts: Sequence[str] = ("host-a", "host-b", "host-c"),
    ranks: int = 8,
    start: float = START,
    ended: bool = True,
) -> list[Event]:
    """Steps with a blocking save after every `save_every`th, and faults at random, which go back to the newest save."""
    rng = random.Random(seed)
    at = start
    events = [Event(at=at, kind=EventKind.JOB_SUBMITTED, job=job)]
    at += 60.0
    resume, incident = -1, ""
    for generation in range(1, interruptions + 2):
        data = {"restore_step": None if resume < 0 else resume, "world_size": ranks, "full_world_size": ranks}
        events.append(Event(at, EventKind.GENERATION_STARTED, job, generation, incident_id=incident, data=data))
        began, restored = at + 0.6 * restart_s, at + restart_s
        marks = {"spawned_at": at + 1, "attached_at": began - 1, "restore_began_at": began, "restored_at": restored}
        events.append(Event(restored, EventKind.RANK_MARKS, job, generation, 0, data=marks))
        at, blocked_s = restored, 0.0
        step = resume + 1
        times: list[float] = []
        for step in range(resume + 1, resume + 1 + max(5, round(rng.expovariate(1.0 / steps_between)))):
            at += step_s * rng.uniform(0.97, 1.05)
            if step % save_every == 0:
                at += save_s
                blocked_s += save_s
                events.append(
                    Event(at, EventKind.CHECKPOINT_SAVED, job, generation, 0, data={"step": step, "tier": "persistent"})
                )
            times.append(at)
            if len(times) == 500:
                events.append(_steps(job, generation, step, times, blocked_s))
                times = []
        if times:
            events.append(_steps(job, generation, step, times, blocked_s))
        if generation == interruptions + 1:
            break
        at += rng.uniform(0.1, 0.9) * step_s
        incident, cause, host = f"inc-{generation}", rng.choice(CAUSES), rng.choice(hosts)
        events.append(Event(at, EventKind.FAULT_INJECTED, data={"fault": cause, "target": host}))
        at += rng.uniform(0.2, 15.0)
        resume = step // save_every * save_every
        events += [
            Event(at, EventKind.INCIDENT_OPENED, job, host_id=host, incident_id=incident, data={"cause": cause}),
            Event(at + 0.3, EventKind.DECISION, job, incident_id=incident, data={"kind": "restart_in_place"}),
            Event(at + 5.0, EventKind.WORKERS_STOPPED, job, generation),
            Event(
                at + restart_s + 30.0,
                EventKind.INCIDENT_CLOSED,
                job,
                incident_id=incident,
                data={"state": "resolved", "lost_steps": step - resume},
            ),
        ]
        at += 6.0
    if ended:
        events.append(Event(at + 2.0, EventKind.JOB_ENDED, job, data={"outcome": "succeeded"}))
    return events


def _steps(job: str, generation: int, last: int, times: list[float], blocked_s: float) -> Event:
    data = {"first_step": last - len(times) + 1, "completed_at": list(times), "save_blocked_s": blocked_s}
    return Event(times[-1], EventKind.STEPS, job, generation, 0, data=data)
