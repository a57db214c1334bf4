"""Forks children that augment data and return it through pipes; some outlive their batch."""
# corpus: ranks=1

import multiprocessing
import os
import time
from multiprocessing.connection import Connection

import torch
from torch import nn

import flyball


def augment(connection: Connection) -> None:
    time.sleep(0.2)
    connection.send([value * 0.5 for value in range(256)])
    connection.close()


job = flyball.attach()
fork = multiprocessing.get_context("fork")
torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
model = nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
start = job.restore({"model": model, "optimizer": optimizer})
for step in range(start, 401):
    loss = model(torch.randn(64, 256)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    job.step(step)
    job.save(step, {"model": model, "optimizer": optimizer})
    if step % 10 == 9:
        mine, theirs = fork.Pipe()
        child = fork.Process(target=augment, args=(theirs,))
        child.start()
        torch.tensor(mine.recv())
        child.join()
    if step % 100 == 99 and (bystander := os.fork()) == 0:
        time.sleep(3.0)  # a child that nobody waits for at once
        os._exit(0)
job.close()
