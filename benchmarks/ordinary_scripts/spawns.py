"""A pool of spawned processes prepares the data of each epoch; each process imports this script again."""
# corpus: ranks=1

import multiprocessing
import time

import torch
from torch import nn

import flyball


def tokenise(part: int) -> list[float]:
    time.sleep(1.0)
    return [float(value % (part + 2)) for value in range(256)]


def main() -> None:
    job = flyball.attach()
    model = nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    step = job.restore({"model": model, "optimizer": optimizer})
    for _ in range(2):
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            rows = torch.tensor(pool.map(tokenise, range(4)))
        for _ in range(250):
            loss = model(rows).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            job.step(step)
            job.save(step, {"model": model, "optimizer": optimizer})
            step += 1
    job.close()


if __name__ == "__main__":
    main()
