"""Every 250 steps a child process evaluates the checkpoint with its own script; the trainer waits for it."""
# corpus: ranks=1

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import flyball

EVALUATE = """
import sys, time, torch
state = torch.load(sys.argv[1], weights_only=True)
time.sleep(6)
print("norm", sum(v.norm().item() for v in state.values()))
"""

job = flyball.attach()
model = nn.Linear(256, 256)
optimizer = torch.optim.AdamW(model.parameters())
start = job.restore({"model": model, "optimizer": optimizer})
with tempfile.TemporaryDirectory() as folder:
    checkpoint = Path(folder) / "model.pt"
    for step in range(start, 751):
        loss = model(torch.randn(64, 256)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        job.step(step)
        job.save(step, {"model": model, "optimizer": optimizer})
        if step % 250 == 249:
            torch.save(model.state_dict(), checkpoint)
            subprocess.run([sys.executable, "-c", EVALUATE, str(checkpoint)], check=True)
job.close()
