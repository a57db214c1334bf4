"""The first batch comes after 20 s, when the data set has been tokenised; the second is as slow on one rank."""
# corpus: ranks=2

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

import flyball

dist.init_process_group("gloo")
job = flyball.attach()
net = nn.Linear(256, 256)
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters())


def batches(count: int) -> Iterator[Tensor]:
    deadline = time.monotonic() + 20.0
    words = 0
    while time.monotonic() < deadline:
        words += len(("a line of text " * 1000).split())
    for index in range(count):
        if index == 1 and dist.get_rank() == 1:
            time.sleep(8.0)  # the cache is written
        yield torch.randn(64, 256)


start = job.restore({"model": net, "optimizer": optimizer})
for step, batch in enumerate(batches(300 - start), start):
    loss = model(batch).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    job.step(step)
    job.save(step, {"model": net, "optimizer": optimizer})
job.close()
dist.barrier()
dist.destroy_process_group()
