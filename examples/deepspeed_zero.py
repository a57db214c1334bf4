"""DeepSpeed under Flyball: ZeRO on the CPU, with a checkpoint after every tenth step. Needs `pip install deepspeed`.

    torchrun --nproc-per-node 2 examples/deepspeed_zero.py           without Flyball's launcher
    flyball run --job zero --nproc-per-node 2 --injectable examples/deepspeed_zero.py
    flyball inject kill --job zero --rank 1                          in another shell: it goes on from its newest save

Everything that Flyball needs is the import and `use(engine)`; `job.step` shows the supervisor the progress. The last
line has the loss, which is the same to the last bit, killed or not.
"""

import sys
from pathlib import Path

import deepspeed
import torch
from torch import nn

import flyball
from ckpt_engine.frameworks.deepspeed import use

STEPS = 200


def main(stage: str = "2", output: str = "zero") -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo will do: no compiler is needed
    job = flyball.attach()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": int(stage)},
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    use(engine)
    if Path(output, "latest").exists():
        engine.load_checkpoint(output)
    for step in range(engine.global_steps, STEPS):
        data = torch.Generator().manual_seed(1000 * step + job.rank)
        x = torch.randn(16, 64, generator=data)
        loss = nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True))
        engine.backward(loss)
        engine.step()
        job.step(step, loss=loss.detach())
        if step % 10 == 9:
            engine.save_checkpoint(output)
        if step + 1 == STEPS:
            print(f"rank {job.rank}: {loss.item().hex()}", flush=True)
    job.close()
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
