"""Trains a sharded model and saves it with torch.distributed.checkpoint on Flyball, in the background. Run it again to
go on: `flyball run --nproc-per-node 2 examples/dcp_fsdp.py`, or the same with torchrun."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from ckpt_engine.dcp import FlyballReader, FlyballSavePlanner, FlyballStager, FlyballWriter

folder, steps = Path(os.environ.get("CKPT_DIR", "checkpoints")), int(os.environ.get("STEPS", "60"))
dist.init_process_group("gloo")
group = dist.new_group(backend="gloo")  # saves in the background must not share a group with training
torch.manual_seed(0)
model = fully_shard(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)))
optimizer, stager, saving = torch.optim.AdamW(model.parameters()), FlyballStager(), None

done = max((int(path.parent.name) for path in folder.glob("*/dcp.metadata")), default=0)
if done:
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(saved, storage_reader=FlyballReader(folder / str(done)))
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    print(f"going on after step {done}", flush=True)
for step in range(done + 1, steps + 1):
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        if saving:
            saving.result()  # torch has one save at a time
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        ours = {"storage_writer": FlyballWriter(folder / str(step)), "planner": FlyballSavePlanner(process_group=group)}
        saving = dcp.async_save(state, **ours, async_stager=stager, process_group=group)
if saving:
    saving.result()
print(f"step {steps}: loss {loss.item():.9f}", flush=True)
