"""Sequence-length warm-up: steps become ten times as long during the run, in three jumps."""
# corpus: ranks=2

import torch
import torch.distributed as dist
from torch import nn

import flyball

dist.init_process_group("gloo")
job = flyball.attach()
net = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / 100))

start = job.restore({"model": net, "optimizer": optimizer, "schedule": schedule})
for step in range(start, 340):
    length = 16 if step < 200 else 64 if step < 300 else 256 if step < 330 else 1024
    loss = model(torch.randn(2, length, 128)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    job.step(step)
    job.save(step, {"model": net, "optimizer": optimizer, "schedule": schedule})
job.close()
dist.barrier()
dist.destroy_process_group()
