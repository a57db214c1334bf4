"""Only rank 0 evaluates and writes a report; the others wait in a barrier."""
# corpus: ranks=2

import time

import torch
import torch.distributed as dist
from torch import nn

import flyball

dist.init_process_group("gloo")
job = flyball.attach()
net = nn.Linear(512, 512)
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def evaluate() -> None:
    deadline = time.monotonic() + 6.0
    with torch.no_grad():
        while time.monotonic() < deadline:
            net(torch.randn(256, 512))
    time.sleep(2.0)  # uploads the report


start = job.restore({"model": net, "optimizer": optimizer})
for step in range(start, 601):
    loss = model(torch.randn(64, 512)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    job.step(step)
    job.save(step, {"model": net, "optimizer": optimizer})
    if step and step % 250 == 0:
        if dist.get_rank() == 0:
            evaluate()
        dist.barrier()
job.close()
dist.barrier()
dist.destroy_process_group()
