"""Python's garbage collector runs only every 100 steps, over millions of objects, longer on one rank than the other."""
# corpus: ranks=2

import gc

import torch
import torch.distributed as dist
from torch import nn

import flyball

dist.init_process_group("gloo")
job = flyball.attach()
net = nn.Linear(256, 256)
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters())
samples = [{"tokens": [index], "meta": {"id": index}} for index in range(1_500_000 * (1 + dist.get_rank()))]
gc.disable()

start = job.restore({"model": net, "optimizer": optimizer})
for step in range(start, 601):
    loss = model(torch.randn(64, 256)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    job.step(step)
    job.save(step, {"model": net, "optimizer": optimizer})
    if step % 100 == 99:
        gc.collect()
job.close()
dist.barrier()
dist.destroy_process_group()
