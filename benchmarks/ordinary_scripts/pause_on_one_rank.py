"""Somebody inspects rank 1 for 15 s: it sleeps, and rank 0 waits for its gradients."""
# corpus: ranks=2

import time

import torch
import torch.distributed as dist
from torch import nn

import flyball

dist.init_process_group("gloo")
job = flyball.attach()
net = nn.Linear(256, 256)
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters())

start = job.restore({"model": net, "optimizer": optimizer})
for step in range(start, 501):
    loss = model(torch.randn(64, 256)).pow(2).mean()
    if step == 400 and dist.get_rank() == 1:
        time.sleep(15.0)  # breakpoint()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    job.step(step)
    job.save(step, {"model": net, "optimizer": optimizer})
job.close()
dist.barrier()
dist.destroy_process_group()
