"""torch.compile with the default backend: the first steps take many seconds, and a new shape compiles again."""
# corpus: ranks=1 needs=g++

import torch
from torch import nn

import flyball

job = flyball.attach()
net = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 128))
model = torch.compile(net, dynamic=False)
optimizer = torch.optim.AdamW(net.parameters())

start = job.restore({"model": net, "optimizer": optimizer})
for step in range(start, 901):
    rows = 32 if step % 300 < 299 else 16 + step // 300  # the last batch of an epoch is smaller
    x = torch.randn(rows, 128)
    loss = (model(x) - x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    job.step(step)
    job.save(step, {"model": net, "optimizer": optimizer})
print(f"loss {loss.item():.4f}", flush=True)
job.close()
