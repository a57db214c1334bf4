"""Catches errors in a step and retries: a batch that does not fit, a store that answers late."""
# corpus: ranks=1

import time

import torch
from torch import nn

import flyball

job = flyball.attach()
model = nn.Linear(256, 256)
optimizer = torch.optim.AdamW(model.parameters())


def train(step: int, attempt: int) -> None:
    if step % 200 == 150 and attempt < 3:
        raise RuntimeError("DataLoader worker is killed by signal: Killed")
    loss = model(torch.randn(64, 256)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


start = job.restore({"model": model, "optimizer": optimizer})
for step in range(start, 600):
    for attempt in range(4):
        try:
            train(step, attempt)
            break
        except RuntimeError as error:
            print(f"step {step}: {error}; trying again", flush=True)
            time.sleep(2.0 ** (attempt - 1))
    job.step(step)
    job.save(step, {"model": model, "optimizer": optimizer})
job.close()
