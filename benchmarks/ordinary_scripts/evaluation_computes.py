"""All ranks evaluate on a held-out set every 200 steps, which takes 300 times as long as a step."""
# corpus: ranks=2

import torch
import torch.distributed as dist
from torch import nn

import flyball

dist.init_process_group("gloo")
job = flyball.attach()
torch.manual_seed(dist.get_rank())
net = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
held_out = torch.randn(2048, 256)


@torch.no_grad()
def evaluate() -> float:
    total = 0.0
    for _ in range(120):
        total += (net(held_out) - held_out).pow(2).mean().item()
    mean = torch.tensor(total / 120)
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


start = job.restore({"model": net, "optimizer": optimizer})
for step in range(start, 601):
    x = torch.randn(32, 256)
    loss = (model(x) - x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    job.step(step)
    job.save(step, {"model": net, "optimizer": optimizer})
    if step % 200 == 199:
        error = evaluate()
        if dist.get_rank() == 0:
            print(f"step {step}: error {error:.4f}", flush=True)
job.close()
dist.barrier()
dist.destroy_process_group()
