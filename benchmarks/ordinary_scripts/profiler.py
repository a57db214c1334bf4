"""torch.profiler occasionally records some steps and writes large traces."""
# corpus: ranks=1

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

import flyball

job = flyball.attach()
model = nn.Sequential(*[layer for _ in range(30) for layer in (nn.Linear(64, 64), nn.ReLU())])
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
folder = Path(tempfile.mkdtemp())


def write(profiler: profile) -> None:
    path = folder / f"trace-{profiler.step_num}.json"
    profiler.export_chrome_trace(str(path))
    print(f"trace of {path.stat().st_size >> 20} MiB", flush=True)
    path.unlink()


plan = schedule(wait=150, warmup=10, active=60, repeat=0)
with profile(
    activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=write, record_shapes=True, with_stack=True
) as profiler:
    start = job.restore({"model": model, "optimizer": optimizer})
    for step in range(start, 661):
        loss = model(torch.randn(32, 64)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        job.step(step)
        job.save(step, {"model": model, "optimizer": optimizer})
        profiler.step()
job.close()
folder.rmdir()
