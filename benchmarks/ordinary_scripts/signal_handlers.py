"""Installs its own signal handlers: a timer prints, SIGUSR1 saves, SIGCHLD counts. Children come and go."""
# corpus: ranks=1

import os
import signal
import subprocess
import tempfile
from pathlib import Path
from types import FrameType

import torch
from torch import nn

counts = dict.fromkeys((signal.SIGALRM, signal.SIGUSR1, signal.SIGCHLD), 0)
model = nn.Linear(256, 256)
folder = tempfile.TemporaryDirectory()


def handle(number: int, frame: FrameType | None) -> None:
    counts[signal.Signals(number)] += 1
    if number == signal.SIGUSR1:
        torch.save(model.state_dict(), Path(folder.name) / "model.pt")


for number in counts:
    signal.signal(number, handle)
signal.signal(signal.SIGTERM, lambda number, frame: (_ for _ in ()).throw(SystemExit(0)))
signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4000):
    loss = model(torch.randn(256, 256)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
        subprocess.run(["true"], check=True)
signal.setitimer(signal.ITIMER_REAL, 0)
assert all(counts.values()), counts
print(counts, flush=True)
