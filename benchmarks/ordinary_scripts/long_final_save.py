"""After the last step, exports and uploads the model for 20 s."""
# corpus: ranks=1

import io
import time

import torch
from torch import nn

import flyball

job = flyball.attach()
model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
optimizer = torch.optim.AdamW(model.parameters())
start = job.restore({"model": model, "optimizer": optimizer})
for step in range(start, 300):
    loss = model(torch.randn(32, 512)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    job.step(step)
    job.save(step, {"model": model, "optimizer": optimizer})

buffer = io.BytesIO()
torch.save(model.state_dict(), buffer)
for _ in range(20):  # a slow upload, in parts
    time.sleep(1.0)
print(f"exported {buffer.tell() >> 10} KiB", flush=True)
job.close()
