"""torch.compile on two ranks with a backend that needs no compiler; evaluation mode compiles again."""
# corpus: ranks=2

import torch
import torch.distributed as dist
from torch import nn

import flyball

dist.init_process_group("gloo")
job = flyball.attach()
layers = [nn.TransformerEncoderLayer(128, 4, 256, batch_first=True) for _ in range(4)]
net = nn.Sequential(*layers, nn.Linear(128, 32))
model = torch.compile(nn.parallel.DistributedDataParallel(net), backend="aot_eager", dynamic=False)
optimizer = torch.optim.AdamW(net.parameters())

start = job.restore({"model": net, "optimizer": optimizer})
for step in range(start, 301):
    loss = model(torch.randn(4, 16 if step < 200 else 24, 128)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    job.step(step)
    job.save(step, {"model": net, "optimizer": optimizer})
    if step % 100 == 99:
        net.eval()
        with torch.no_grad():
            model(torch.randn(8, 32, 128))
        net.train()
job.close()
dist.barrier()
dist.destroy_process_group()
