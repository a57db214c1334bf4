"""`flyball run` of a training that goes wrong while all ranks run: it goes on from before the harm, and ends well."""

from __future__ import annotations

import pytest
from support.commands.harmed_runs import run_to_its_end

RANKS, FLIP_STEP, NAN_STEP, MORE_STEPS = 4, 70, 140, 20

# In the first generation a bit flips in a parameter of one rank, in the second the loss is no number from a step on.
# Without the restarts it never ends.
TRAINER = f"""
import json, time
import torch
import flyball

job = flyball.attach()
state = {{"x": torch.zeros(400_000)}}
start = job.restore(state)
end = start + {MORE_STEPS} if job.generation > 2 else 100_000
for step in range(start, end):
    state["x"] += 1
    if job.generation == 1 and job.rank == 2 and step == {FLIP_STEP}:
        state["x"].view(torch.int32)[17] ^= 1 << 9
    is_bad = job.generation == 2 and step >= {NAN_STEP}
    job.step(step, float("nan") if is_bad else 1.0 + 1.0 / (step + 1))
    job.save(step, state)
    time.sleep(0.05)
good = bool((state["x"] == end).all())
with open(f"end{{job.rank}}.json", "w") as file:
    json.dump({{"generation": job.generation, "start": start, "end": end, "good": good}}, file)
job.wait_until_finished()
job.close()
"""

SETTINGS = """
[checkpoint]
every_steps = 1
disk_dir = "disk"
disk_every_steps = 20
disk_keep_latest = 2
"""


@pytest.mark.proof
def test_a_job_that_is_harmed_twice_goes_on_from_clean_steps() -> None:
    ends, output = run_to_its_end(TRAINER, SETTINGS, ranks=RANKS)
    assert all(end["good"] for end in ends), ends
    assert {end["generation"] for end in ends} == {3}
    (start,) = {end["start"] for end in ends}
    assert FLIP_STEP < start <= NAN_STEP
    assert output.count("newest recovery point before the harm") == 2
    assert "Rank 2 on " in output and "it is nan" in output


# The loss is computed before the update, so that of step 20 is usual, and the state of step 20 is no number. Steps take
# longer than reports: each is seen.
SLOW_TRAINER = """
import json, time
import torch
import flyball

job = flyball.attach()
state = {"x": torch.ones(1000)}
start = job.restore(state)
end = start + 3 if job.generation > 1 else 100_000
for step in range(start, end):
    loss = float(state["x"].mean())
    state["x"] += float("nan") if job.generation == 1 and step == 20 else 0.001
    job.step(step, loss)
    job.save(step, state)
    time.sleep(0.7)
with open(f"end{job.rank}.json", "w") as file:
    json.dump({"start": start, "good": bool(state["x"].isfinite().all())}, file)
job.wait_until_finished()
job.close()
"""


@pytest.mark.proof
def test_a_state_that_no_loss_vouches_for_is_not_gone_back_to() -> None:
    settings = SETTINGS.replace("disk_every_steps = 20", "disk_every_steps = 1").replace("latest = 2", "latest = 20")
    ends, output = run_to_its_end(SLOW_TRAINER, settings, ranks=1)
    assert ends == [{"start": 19, "good": True}], output
