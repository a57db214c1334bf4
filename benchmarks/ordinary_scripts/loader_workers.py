"""A DataLoader whose workers restart with every epoch, and spend seconds opening files before the first batch."""
# corpus: ranks=2

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import flyball


class Rows(Dataset):
    def __len__(self) -> int:
        return 6400

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64,), float(index % 7))


def open_files(worker: int) -> None:
    time.sleep(4.0 + worker)


def main() -> None:
    dist.init_process_group("gloo")
    job = flyball.attach()
    net = nn.Linear(64, 64)
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = DistributedSampler(Rows())
    loader = DataLoader(Rows(), batch_size=16, sampler=sampler, num_workers=2, worker_init_fn=open_files)
    step = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = (model(batch) - batch).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            job.step(step)
            step += 1
    job.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
