"""Megatron-core under Flyball: a tensor-parallel MLP on the CPU, with a sharded checkpoint after every twentieth step.
Needs `pip install megatron-core`.

    torchrun --nproc-per-node 2 examples/megatron_mlp.py             without Flyball's launcher
    flyball run --job mlp --nproc-per-node 2 --injectable examples/megatron_mlp.py
    flyball inject kill --job mlp --rank 1                           in another shell: it goes on from its newest save

Everything that Flyball needs is the import and `FlyballSaveStrategy()`; `job.step` shows the supervisor the progress.
The last line has the loss, which is the same to the last bit, killed or not.
"""

import sys
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, optim_state_to_sharding_state
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig

import flyball
from ckpt_engine.frameworks.megatron import FlyballSaveStrategy

STEPS = 600


def make_model() -> MLP:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
    )
    return MLP(config, get_mlp_module_spec(use_te=False).submodules)


def sharded(model: MLP, optimizer: torch.optim.Optimizer, step: int) -> dict[str, object]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    tensors = model.sharded_state_dict(prefix="mlp.", metadata={"dp_cp_group": group})
    state = optimizer.state_dict()
    optim_state_to_sharding_state(state, get_param_id_to_sharded_param_map(tensors, model.parameters()))
    return {"model": tensors, "optimizer": state, "step": step}


def main(output: str = "mlp") -> None:
    job = flyball.attach()
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=job.world_size)
    torch.manual_seed(1)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    start, saved = 0, sorted(Path(output).glob("*/metadata.json"))
    if saved:
        for parameter in model.parameters():  # the optimizer has tensors to load into only after a step
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        loaded = dist_checkpointing.load(sharded(model, optimizer, 0), str(saved[-1].parent))
        model.load_state_dict({name.removeprefix("mlp."): value for name, value in loaded["model"].items()})
        optimizer.load_state_dict(loaded["optimizer"])
        start = loaded["step"] + 1
    for step in range(start, STEPS):
        x = torch.randn(8, 4, 64, generator=torch.Generator().manual_seed(step))
        predicted, bias = model(x)
        loss = (predicted + bias - x.flip(-1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        job.step(step, loss=loss.detach())
        if step + 1 == STEPS:
            print(f"rank {job.rank}: {loss.item().hex()}", flush=True)
        if step % 20 == 19:
            folder = Path(output, f"{step:06d}")
            folder.mkdir(parents=True, exist_ok=True)
            dist_checkpointing.save(sharded(model, optimizer, step), str(folder), FlyballSaveStrategy())
    job.close()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
