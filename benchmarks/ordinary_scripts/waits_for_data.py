"""Does not use Flyball. Both ranks wait 25 s for the next file of a slow store, without using the CPU."""
# corpus: ranks=2

import time

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(128, 128))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for part in range(2):
    for _ in range(200):
        loss = model(torch.randn(64, 128)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if part == 0:
        time.sleep(25.0)
dist.barrier()
dist.destroy_process_group()
