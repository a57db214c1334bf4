"""torchtitan's parts under Flyball: FSDP2, its containers of optimizers and schedulers, its data loader and checkpoint
manager, in a loop as small as its trainer's is large. (Its trainer needs an accelerator; there, name
`FlyballCheckpointManager.Config` in the configuration.) Needs `pip install torchtitan`.

    torchrun --nproc-per-node 2 examples/torchtitan_parts.py         without Flyball
    flyball run --job titan --nproc-per-node 2 --injectable examples/torchtitan_parts.py
    flyball inject kill --job titan --rank 1                         in another shell: a second later it trains on

Everything that Flyball needs is the import and `FlyballCheckpointManager`. The last line has the loss, which is the
same to the last bit, killed or not.
"""

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from ckpt_engine.frameworks.torchtitan import FlyballCheckpointManager

STEPS = 600


class Numbers(IterableDataset):
    """Rows of numbers without an end. It knows its position, as torchtitan's datasets do."""

    def __init__(self, rank: int) -> None:
        self.rank, self.position = rank, 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.position += 1
            yield torch.randn(64, generator=torch.Generator().manual_seed(1000 * self.position + self.rank))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class TrainState:
    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def main(output: str = "titan") -> None:
    torch.distributed.init_process_group("gloo")
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3})]
    optimizers = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=20).build(optimizers=optimizers, training_steps=STEPS)
    loader = ParallelAwareDataloader(Numbers(rank), rank, world_size, batch_size=16)
    state = TrainState()
    checkpointer = FlyballCheckpointManager.Config(enable=True, interval=300).build(
        dataloader=loader,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": state},
        sd_adapter=None,
        base_folder=output,
    )
    checkpointer.load()
    batches = iter(loader)
    while state.step < STEPS:
        state.step += 1
        x = next(batches)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizers.zero_grad()
        loss.backward()
        optimizers.step()
        schedulers.step()
        if state.step == STEPS:
            print(f"rank {rank}: {loss.item().hex()}", flush=True)
        checkpointer.save(state.step, last_step=state.step == STEPS)
    checkpointer.close()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
