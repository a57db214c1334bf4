"""`flyball run` of a job that replays: one rank's device flips a bit, and later the computation differs everywhere."""

from __future__ import annotations

import pytest
from support.commands.harmed_runs import run_to_its_end

RANKS, EVERY, BAD_STEP, MORE_STEPS = 2, 20, 40, 30

# In the first generation, which never ends by itself, a bit flips in a gradient of rank 1's replay. In the second the
# results of every rank differ from call to call.
TRAINER = f"""
import json, time
import torch
import torch.distributed as dist
import flyball

torch.set_num_threads(1)
dist.init_process_group("gloo")
job = flyball.attach()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))
trained = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = {{"model": model, "optimizer": optimizer}}
calls = 0

def forward_backward(x, step):
    global calls
    loss = model(x).square().mean()
    loss.backward()
    calls += 1
    gradient = model[0].weight.grad
    if job.generation == 1 and job.rank == 1 and step == {BAD_STEP} and calls % 2 == 0:
        gradient.view(torch.int32)[3, 3] ^= 1 << 9
    if job.generation == 2:
        gradient[0, 0] += calls
    return loss

start = job.restore(state)
equal = []
for step in range(start, start + {MORE_STEPS} if job.generation > 1 else 100_000):
    x = torch.randn(8, 16)
    loss = trained(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    before = model[0].weight.grad.clone()
    optimizer.step()
    job.step(step)
    equal.append(job.replay(forward_backward, x, step, every={EVERY}, model=model, timeout_s=30.0))
    assert torch.equal(before, model[0].weight.grad)
    job.save(step, state)
    time.sleep(0.02)
with open(f"end{{job.rank}}.json", "w") as file:
    json.dump({{"generation": job.generation, "start": start, "differed": equal.count(False)}}, file)
job.wait_until_finished()
job.close()
dist.destroy_process_group()
"""

SETTINGS = """
[checkpoint]
every_steps = 1
disk_dir = "disk"
disk_every_steps = 5
disk_keep_latest = 2
"""


@pytest.mark.proof
def test_a_bad_device_takes_the_job_back_and_a_computation_that_differs_everywhere_does_not() -> None:
    ends, output = run_to_its_end(TRAINER, SETTINGS, ranks=RANKS)
    clean_step = BAD_STEP - EVERY  # kept by the disk tier for this, with two newer ones
    assert [(end["generation"], end["start"], end["differed"]) for end in ends] == [(2, clean_step + 1, 1)] * RANKS
    assert f"Silent corruption: at step {BAD_STEP} rank 1 on " in output and "gradient of 0.weight differed" in output
    assert f"Step {clean_step} is the newest recovery point before the harm" in output
    assert output.count("so the device of rank 1 is bad") == 1
    assert output.count("no device is to blame") == 1
