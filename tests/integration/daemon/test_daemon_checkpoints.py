"""The daemon relays commands to the checkpoint engine, with a trainer that saves."""

from __future__ import annotations

import msgspec
from support.clocks.waits import until

from flyball.contracts.checkpoints import RestorePlan, ShardSource, Tier, branch
from flyball.contracts.decisions import SaveEmergency, StartWorkers, UpdateState
from flyball.contracts.reports.rank_columns import statuses_in

TRAINER = """
import threading
import torch
import flyball
job = flyball.attach()
x = torch.zeros(1000)
start = job.restore({"x": x})
print("start", start, float(x[0]), flush=True)
for step in range(start, 100_000):
    x += 1
    job.step(step)
    job.save(step, {"x": x})
    threading.Event().wait(0.02)
"""


def test_emergency_save_stop_and_restore_lose_no_step(shared, make_shared_job):
    supervisor = shared.supervisor
    job = make_shared_job(TRAINER, nproc=2)
    name = job.spec.job
    job.start()

    def newest_step() -> int:
        newest = supervisor.newest
        return max((r.step for r in statuses_in(newest.workers, newest.progress) if r.job == name), default=-1)

    until(lambda: newest_step() >= 3, "a few steps")
    late = job.send(SaveEmergency(name, 1, 0, 20.0), generation=1)
    assert (late.state, late.code) == (UpdateState.FAILED, "too_late")
    assert {p.rank for p in late.result.positions} == {0, 1}

    for ahead in (25, 100, 400, 1600):  # on a busy machine the workers may pass a step before they learn of it
        step = newest_step() + ahead
        command = job.command(SaveEmergency(name, 1, step, 100.0), generation=1)
        supervisor.send(command)
        first = supervisor.answer(command, final=False)
        if first.code != "too_late":
            break
    # The last answer replaces one that is still being sent, if the step comes first.
    assert first.state in (UpdateState.ACKNOWLEDGED, UpdateState.SUCCEEDED), first
    saved = supervisor.answer(command)
    assert saved.state is UpdateState.SUCCEEDED, saved
    assert {c.rank for c in saved.result.copies if c.step == step} == {0, 1}

    stopped = job.stop(1).result
    assert {(p.rank, p.step) for p in stopped.positions} == {(0, step), (1, step)}
    assert {c.rank for c in stopped.copies if c.step == step and c.tier is Tier.MEMORY} == {0, 1}

    before = job.placement(1)
    sources = {str(rank): (ShardSource(rank, 1, Tier.MEMORY, "host-a", ""),) for rank in (0, 1)}
    placement = msgspec.structs.replace(
        job.placement(2, port=stopped.free_port),
        lineage=branch(before.lineage, restored_step=step, generation=2),
        restore=RestorePlan(step, sources),
    )
    assert job.send(StartWorkers(job.spec, placement), generation=2).state is UpdateState.SUCCEEDED
    for rank in (0, 1):
        until(lambda rank=rank: "\n" in job.log(2, rank), "its start, the whole line")
        assert job.log(2, rank).split() == ["start", str(step + 1), str(float(step + 1))]
    restores = until(
        lambda: {(s.rank, s.step, s.source_tier) for r in supervisor.reports for s in r.restores if s.job == name},
        "the restores in a report",
    )
    assert restores <= {(0, step, Tier.MEMORY), (1, step, Tier.MEMORY)}
    until(lambda: newest_step() > step, "a step beyond")
    until(lambda: [c for c in supervisor.newest.copies if c.generation == 2], "its copies in a report")
    marks = [m for r in supervisor.reports for m in r.marks if m.job == name and m.generation == 2]
    assert all(m.spawned_at <= m.attached_at <= m.restored_at <= m.first_step_at for m in marks if m.first_step_at)
    job.end(2)
    assert not [p.name for p in shared.shm_dir.iterdir() if f".{name}." in p.name]
