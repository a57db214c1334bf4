"""Names its evaluation with `with job.phase("eval"):`, for 8 s every 200 steps."""
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
for step in range(start, 450):
    loss = model(torch.randn(64, 256)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    job.step(step, loss=loss.detach())
    job.save(step, {"model": net, "optimizer": optimizer})
    if step % 200 == 199:
        with job.phase("eval"):
            time.sleep(8.0)
            dist.barrier()
job.close()
dist.barrier()
dist.destroy_process_group()
