"""Epochs of different length. The shuffle between them takes longer after a longer epoch."""
# corpus: ranks=2

import time

import torch
import torch.distributed as dist
from torch import nn

import flyball

dist.init_process_group("gloo")
job = flyball.attach()
net = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128))
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters())

start = job.restore({"model": net, "optimizer": optimizer})
step = 0
for length in (20, 400, 60, 300, 5, 200):
    for _ in range(length):
        step += 1
        if step <= start:
            continue
        loss = model(torch.randn(64, 128)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        job.step(step - 1)
        job.save(step - 1, {"model": net, "optimizer": optimizer})
    time.sleep(length / 80)  # shuffles on a slow file system
job.close()
dist.barrier()
dist.destroy_process_group()
