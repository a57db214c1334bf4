"""FSDP2 on gloo. Reports its steps, and writes its own sharded checkpoint after each part."""
# corpus: ranks=2

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import flyball

dist.init_process_group("gloo")
job = flyball.attach()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(folders)

start = job.restore({"model": model, "optimizer": optimizer})
for step in range(start, 301):
    loss = model(torch.randn(32, 512)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    job.step(step)
    job.save(step, {"model": model, "optimizer": optimizer})
    if step % 100 == 99:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"weights": weights, "moments": moments}, checkpoint_id=f"{folders[0]}/{step}")
job.close()
dist.barrier()
dist.destroy_process_group()
