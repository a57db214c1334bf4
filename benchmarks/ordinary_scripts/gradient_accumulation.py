"""Accumulates gradients of 1 to 400 micro-batches until there are enough tokens: step times vary widely."""
# corpus: ranks=2

import random

import torch
import torch.distributed as dist
from torch import nn

import flyball

dist.init_process_group("gloo")
job = flyball.attach()
net = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters())
chance = random.Random(7)  # the same on all ranks

start = job.restore({"model": net, "optimizer": optimizer})
for step in range(start, 250):
    micro_batches = chance.choice([1, 1, 1, 2, 2, 4, 16, 64]) if step % 100 != 99 else 400
    for index in range(micro_batches):
        x = torch.randn(32, 256)
        if index < micro_batches - 1:
            with model.no_sync():
                (model(x) - x).pow(2).mean().backward()
        else:
            (model(x) - x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    job.step(step)
    job.save(step, {"model": net, "optimizer": optimizer})
job.close()
dist.barrier()
dist.destroy_process_group()
