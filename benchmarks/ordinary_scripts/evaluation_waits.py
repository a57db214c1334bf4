"""The README's snippet, with an evaluation that waits for 8 s every 300 steps (a metrics service, a file system)."""
# corpus: ranks=1

import time

import torch
from torch import nn

import flyball

model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.AdamW(model.parameters())


def evaluate() -> float:
    time.sleep(8.0)
    with torch.no_grad():
        return model(torch.randn(64, 256)).abs().mean().item()


job = flyball.attach()
start = job.restore({"model": model, "optimizer": optimizer})
for step in range(start, 901):
    x, y = torch.randn(64, 256), torch.randint(10, (64,))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    job.step(step, loss=loss.detach())
    job.save(step, {"model": model, "optimizer": optimizer})
    if step % 300 == 299:
        print(f"step {step}: evaluation {evaluate():.4f}", flush=True)
job.close()
