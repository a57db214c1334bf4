"""Megatron-core's dist_checkpointing in Flyball's format: tensor-parallel on two ranks, killed, and loaded on one."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file
from support.commands.framework_runs import EXAMPLES, Place, losses

ON_ONE_RANK = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from megatron.core import dist_checkpointing, parallel_state
from megatron_mlp import make_model, sharded
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[3]}.store", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
model = make_model()
asked = sharded(model, torch.optim.SGD(model.parameters()), 0)
loaded = dist_checkpointing.load({"model": asked["model"]}, sys.argv[2])
plain = dist_checkpointing.load_plain_tensors(sys.argv[2])
torch.save([{name: tensor for name, tensor in loaded["model"].items() if tensor is not None}, plain], sys.argv[3])
"""


def test_killed_training_has_the_loss_of_one_that_was_not_and_one_rank_loads_what_two_saved(place: Place) -> None:
    script = EXAMPLES / "megatron_mlp.py"
    whole = place.uninterrupted(script, "whole", ranks=2)
    killed = place.killed(script, "killed", kills={100: 1}, lost=20, ranks=2)
    assert len(losses(whole)) == 2
    assert losses(killed.output) == losses(whole)

    newest = max((place.folder / "killed").iterdir())
    assert json.loads((newest / "metadata.json").read_text())["sharded_backend"] == "flyball"
    reader = place.folder / "on_one_rank.py"
    reader.write_text(ON_ONE_RANK)
    place.uninterrupted(reader, str(script.parent), str(newest), str(place.folder / "one.pt"))
    model, plain = torch.load(place.folder / "one.pt", weights_only=True)
    shapes = {name: list(tensor.shape) for name, tensor in model.items() if name.endswith("weight")}
    assert shapes == {"mlp.linear_fc1.weight": [256, 64], "mlp.linear_fc2.weight": [64, 256]}
    assert all(torch.equal(tensor, plain[name]) for name, tensor in model.items())
    parts = [load_file(newest / f"rank{rank}.safetensors") for rank in (0, 1)]
    assert torch.equal(torch.cat([part["mlp.linear_fc1.weight"] for part in parts]), model["mlp.linear_fc1.weight"])
    assert ["mlp.linear_fc2.bias" in part for part in parts] == [True, False], "what is replicated is saved once"
