"""Real gloo processes save with one sharding, and others load with another: what they hold together is what was saved,
bit for bit. Beside each save, one with torch's own FileSystemWriter."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands.warm_python import WarmPython
from support.jobs.sharded_models import COMPARISONS, run_ranks

PREAMBLE = (
    COMPARISONS
    + """
import os, sys, warnings
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from ckpt_engine.dcp import FlyballReader, FlyballSavePlanner, FlyballStager, FlyballWriter
from ckpt_engine.trainer.restore.load_step import load_step
warnings.simplefilter("ignore")
folder = sys.argv[1]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=os.environ["RENDEZVOUS"], rank=rank, world_size=world)
"""
)

# Trains, saves and loads a model that is sharded over all ranks, or whole on each.
MODEL = (
    PREAMBLE
    + """
phase, layout, truth = sys.argv[2:]
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.GELU(), torch.nn.Linear(9, 3, bias=False))
if layout == "hsdp":
    fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "fsdp")))
elif layout == "fsdp":
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

def train():
    for step in range(2):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(8, 7)).square().mean().backward()
        optimizer.step()

def state():
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "epoch": 5 if phase == "save" else 0}

if phase == "save":
    train()
    saved = state()
    dcp.save(saved, storage_writer=FlyballWriter(folder), planner=FlyballSavePlanner())
    dcp.save(saved, storage_writer=dcp.FileSystemWriter(folder + "-theirs"))
    found = whole(saved)
    if rank == 0:
        torch.save(found, truth)
else:
    train()
    expected = torch.load(truth, weights_only=True)
    for reader in (FlyballReader(folder), dcp.FileSystemReader(folder + "-theirs"), None):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        target = state()
        if reader is None:  # without DCP
            load_step(folder, target, rank=rank)
        else:
            dcp.load(target, storage_reader=reader)
        set_state_dict(model, optimizer, model_state_dict=target["model"], optim_state_dict=target["optimizer"])
        assert target["epoch"] == 5
        phase = "save"
        compare(whole(state()), expected)
        phase = "load"
    train()
dist.destroy_process_group()
"""
)


def run(warm: WarmPython, tmp_path: Path, world: int, script: str, *arguments: str, name: str = "") -> None:
    rendezvous = tmp_path / f"rendezvous-{name or '-'.join(arguments[1:3])}-{world}"
    run_ranks(warm, script, *arguments, world=world, rendezvous=rendezvous)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (("fsdp", 2), [("plain", 1), ("fsdp", 3)]),
        (("plain", 1), [("fsdp", 2)]),
        pytest.param(("hsdp", 4), [("fsdp", 2), ("plain", 1)], marks=pytest.mark.proof),
        pytest.param(("fsdp", 3), [("hsdp", 4), ("fsdp", 1)], marks=pytest.mark.proof),
        pytest.param(("plain", 2), [("hsdp", 4), ("fsdp", 3)], marks=pytest.mark.proof),
    ],
    ids=["fsdp", "plain", "hsdp", "fsdp3", "ddp"],
)
def test_what_one_layout_saved_another_loads(
    warm_python: WarmPython, tmp_path: Path, saved: tuple[str, int], loaded: list[tuple[str, int]]
) -> None:
    folder, truth = str(tmp_path / "step-2"), str(tmp_path / "truth.pt")
    run(warm_python, tmp_path, saved[1], MODEL, folder, "save", saved[0], truth)
    for layout, world in loaded:
        run(warm_python, tmp_path, world, MODEL, folder, "load", layout, truth)


# Every rank has a plan of its own for the structure, and all of them do the same with it.
CACHE = (
    PREAMBLE
    + """
mesh = init_device_mesh("cpu", (world,))

def tensors(rows=4, dtype=torch.float32, placement=Shard(0), own_dtype=None):
    whole = torch.arange(rows * 6).reshape(rows, 6)
    return {
        "sharded": distribute_tensor(whole.to(dtype), mesh, [placement], src_data_rank=None),
        "plain": torch.full((3,), 2.0, dtype=own_dtype or torch.float32),
        **{f"own{rank}": torch.full((2,), float(rank), dtype=own_dtype or torch.float32)},
        "value": rows,
    }

def save(**changes):
    planner = FlyballSavePlanner()
    state = tensors(**changes)
    dcp.save(state, storage_writer=FlyballWriter(folder), planner=planner)
    used = [None] * world
    dist.all_gather_object(used, planner.used_cache)
    assert len(set(used)) == 1, used
    target = tensors(**changes)
    expected = whole(state)
    for tensor in target.values():
        if isinstance(tensor, torch.Tensor):
            tensor.zero_()
    target["value"] = 0
    dcp.load(target, storage_reader=FlyballReader(folder))
    compare(whole(target), expected)
    return used[0]

assert [save(), save(), save()] == [False, True, True]
assert [save(dtype=torch.bfloat16), save(dtype=torch.bfloat16)] == [False, True]
assert [save(rows=6), save(rows=6)] == [False, True]
assert [save(placement=Shard(1)), save(placement=Shard(1))] == [False, True]
assert save() and save(rows=6), "the last few structures are remembered"
# Only one rank's structure changes, and all plan anew.
only_one = {"own_dtype": torch.float16} if rank == world - 1 else {}
assert [save(**only_one), save(**only_one)] == [False, True]
only_one = {"own_dtype": torch.bfloat16} if rank == 0 else {}
assert [save(**only_one), save(**only_one)] == [False, True]

# A save that fails before it is planned makes all plan anew.
class Fails(FlyballWriter):
    def prepare_global_plan(self, plans):
        raise RuntimeError("no plan")
try:
    dcp.save(tensors(), storage_writer=Fails(folder), planner=FlyballSavePlanner())
except BaseException as error:
    assert "no plan" in str(error)
assert [save(), save()] == [False, True]

# Another process group is another world, whoever is in it.
dist.destroy_process_group()
dist.init_process_group("gloo", init_method=os.environ["RENDEZVOUS"] + "-2", rank=world - 1 - rank, world_size=world)
rank = world - 1 - rank
mesh = init_device_mesh("cpu", (world,))
assert [save(), save()] == [False, True]

# Groups of some ranks: remembered if the planner is told. Saves without collectives or without a group are not, and
# leave what is remembered as it is.
groups = [dist.new_group([number]) for number in range(world)]
def alone(told, **how):
    planner = FlyballSavePlanner(process_group=groups[rank] if told else None)
    state = {**tensors(), "sharded": torch.ones(3)} if how else tensors()
    dcp.save(state, storage_writer=FlyballWriter(f"{folder}-{rank}"), planner=planner, **how)
    return planner.used_cache
one = {"process_group": groups[rank]}
assert [alone(True, **one), alone(True, **one), alone(False, **one), alone(False, **one)] == [False, True, False, False]
assert [alone(False, no_dist=True), alone(False, no_dist=True)] == [False, False]
def without():
    planner = FlyballSavePlanner()
    dcp.save(tensors(), storage_writer=FlyballWriter(folder + "-w"), planner=planner, use_collectives=False)
    return planner.used_cache
assert [save(), without(), save(), without(), save()] == [True, False, True, False, True]
dist.barrier()
dist.destroy_process_group()
"""
)


def test_a_plan_is_used_again_by_all_ranks_or_by_none(warm_python: WarmPython, tmp_path: Path) -> None:
    run(warm_python, tmp_path, 2, CACHE, str(tmp_path / "c"), name="cache")


# Without collectives each rank describes what it has saved. `theirs` shows what torch makes of another sharding.
RANK_LOCAL = (
    PREAMBLE
    + """
phase = sys.argv[2]
mesh = init_device_mesh("cpu", (world,))
expected = torch.arange(24.0).reshape(6, 4)

def state(value, placement):
    tensor = distribute_tensor(value, mesh, [placement], src_data_rank=None)
    return {"w": tensor, "own": rank if phase == "save" else -1}

if phase == "save":
    for writer in (FlyballWriter(folder), dcp.FileSystemWriter(folder + "-theirs")):
        dcp.save(state(expected, Shard(0)), storage_writer=writer, use_collectives=False)
    same = state(torch.zeros(6, 4), Shard(0))
    same["own"] = -1
    dcp.load(same, storage_reader=FlyballReader(folder))
    assert torch.equal(same["w"].full_tensor(), expected) and same["own"] == rank
else:
    theirs = state(torch.zeros(6, 4), Shard(1))
    dcp.load(theirs, storage_reader=dcp.FileSystemReader(folder + "-theirs"))
    lost = (whole(theirs)["w"] != expected).sum()
    assert lost > 0, "torch leaves what it has no chunk for, without a word"
    ours = state(torch.zeros(6, 4), Shard(1))
    if phase == "load":
        dcp.load(ours, storage_reader=FlyballReader(folder))
        assert torch.equal(whole(ours)["w"], expected)
    else:
        try:
            dcp.load(ours, storage_reader=FlyballReader(folder))
            raise SystemExit("it was loaded")
        except (Exception, dcp.api.CheckpointException) as error:
            assert "'w'" in str(error) and "are in no shard" in str(error), error
if world > 1 and phase == "save":
    dist.barrier()
dist.destroy_process_group()
"""
)


def test_saves_without_collectives_load_whole_or_not_at_all(warm_python: WarmPython, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    run(warm_python, tmp_path, 2, RANK_LOCAL, str(folder), "save", name="save")
    run(warm_python, tmp_path, 1, RANK_LOCAL, str(folder), "load", name="load")
    (folder / "dcp.rank1.metadata").unlink()
    run(warm_python, tmp_path, 1, RANK_LOCAL, str(folder), "refuse", name="refuse")
