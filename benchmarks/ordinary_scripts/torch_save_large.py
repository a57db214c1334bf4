"""Rank 0 writes 400 MB with torch.save and fsync, while the others wait in a barrier. Does not call job.save."""
# corpus: ranks=2

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import flyball

dist.init_process_group("gloo")
job = flyball.attach()
model = nn.parallel.DistributedDataParallel(nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
embeddings = torch.randn(100_000_000)  # not trained, but saved

with tempfile.TemporaryDirectory() as folder:
    for step in range(401):
        loss = model(torch.randn(64, 256)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        job.step(step)
        if step % 150 == 149:
            if dist.get_rank() == 0:
                with (Path(folder) / f"step-{step}.pt").open("wb") as file:
                    torch.save({"model": model.state_dict(), "embeddings": embeddings, "step": step}, file)
                    file.flush()
                    os.fsync(file.fileno())
                print(f"saved step {step}", flush=True)
            dist.barrier()
job.close()
dist.barrier()
dist.destroy_process_group()
