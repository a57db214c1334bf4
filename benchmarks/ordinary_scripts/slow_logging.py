"""Logs to a slow reader: writes block for seconds when its buffer is full."""
# corpus: ranks=1

import subprocess
import sys

import torch
from torch import nn

import flyball

READS_SLOWLY = "import sys, time\nwhile sys.stdin.buffer.read1(16384):\n    time.sleep(2.5)\n"

job = flyball.attach()
model = nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
service = subprocess.Popen([sys.executable, "-c", READS_SLOWLY], stdin=subprocess.PIPE)
assert service.stdin
start = job.restore({"model": model, "optimizer": optimizer})
for step in range(start, 800):
    loss = model(torch.randn(64, 256)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    job.step(step)
    job.save(step, {"model": model, "optimizer": optimizer})
    if step % 4 == 0:
        service.stdin.write(f"step {step} loss {loss.item()} ".encode() + b"histogram " * 80 + b"\n")
        service.stdin.flush()
service.stdin.close()
service.wait()
job.close()
