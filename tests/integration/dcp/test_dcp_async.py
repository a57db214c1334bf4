"""`dcp.async_save` through FlyballWriter and FlyballStager, in a thread and in a process: what was in the state at the
call is saved, and whatever breaks is an exception on the future of every rank, which nobody waits for long."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from support.commands.warm_python import WarmPython

TIMEOUT_S = 240.0

PREAMBLE = """
import os, resource, signal, sys, warnings
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from ckpt_engine.dcp import FlyballReader, FlyballSavePlanner, FlyballStager, FlyballWriter
warnings.simplefilter("ignore")
folder, mode, here = sys.argv[1:]
sys.path.insert(0, here)
from dying_planner import DyingPlanner
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=os.environ["RENDEZVOUS"], rank=rank, world_size=world)
mesh = init_device_mesh("cpu", (world,))
kind = AsyncCheckpointerType(mode)
WAIT_S = 120

def made(value):
    sharded = distribute_tensor(torch.full((512, 1024), value), mesh, [Shard(0)], src_data_rank=None)
    return {"sharded": sharded, "mine": {f"w{rank}": torch.full((256, 1024), value)}, "step": int(value)}

def save(state, name, stager=None, planner=None):
    return dcp.async_save(
        state, storage_writer=FlyballWriter(f"{folder}/{name}"), planner=planner or FlyballSavePlanner(),
        async_checkpointer_type=kind, async_stager=stager,
    )

def failure(future):
    try:
        future.result(timeout=WAIT_S)
    except TimeoutError:
        raise SystemExit("the future hangs")
    except (Exception, dcp.api.CheckpointException) as error:
        return error
    raise SystemExit("the save did not fail")

def check(name, value):
    target = made(-1.0)
    dcp.load(target, storage_reader=FlyballReader(f"{folder}/{name}"))
    assert target["step"] == int(value)
    assert (target["sharded"].to_local() == value).all() and (target["mine"][f"w{rank}"] == value).all(), name
"""

WORKS = (
    PREAMBLE
    + """
stager = FlyballStager()
state = made(1.0)

def train_on(value):
    with torch.no_grad():
        state["sharded"].to_local().fill_(value)
        state["mine"][f"w{rank}"].fill_(value)
    state["step"] = int(value)

for number in (1, 2, 3):
    saving = save(state, f"step-{number}", stager)
    train_on(number + 1.0)  # at once
    saving.result(timeout=WAIT_S)  # torch has one save of a group at a time
    check(f"step-{number}", float(number))
assert len(stager._buffers) == 1, "a buffer is used again once it is written"
save(state, "step-4").result(timeout=WAIT_S)  # with torch's own stager
check("step-4", 4.0)

if mode == "thread":  # saves of one rank each need no group, and may overlap
    def alone(number):
        return dcp.async_save(
            state["mine"], storage_writer=FlyballWriter(f"{folder}/{rank}-{number}"), async_stager=stager, no_dist=True
        )
    futures = []
    for number in range(5, 11):
        train_on(float(number))
        futures.append(alone(number))
    train_on(-1.0)
    for number, future in enumerate(futures, 5):
        future.result(timeout=WAIT_S)
        target = {f"w{rank}": torch.zeros(256, 1024)}
        dcp.load(target, storage_reader=FlyballReader(f"{folder}/{rank}-{number}"), no_dist=True)
        assert (target[f"w{rank}"] == number).all(), number
    assert len(stager._buffers) == 2
stager.close()
dist.barrier()
"""
)

FULL = (
    PREAMBLE
    + """
if rank == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
error = failure(save(made(1.0), "step-1"))
assert "has no room for" in str(error), error
assert not os.path.exists(f"{folder}/step-1/dcp.metadata")
dist.barrier()
if mode == "thread":  # the process has its own limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    save(made(2.0), "step-1").result(timeout=WAIT_S)
    check("step-1", 2.0)
    assert sorted(os.listdir(f"{folder}/step-1")) == [
        "dcp.metadata", "rank0.manifest", "rank0.safetensors", "rank1.manifest", "rank1.safetensors"
    ]
"""
)

KILLED = (
    PREAMBLE
    + """
save(made(1.0), "step-1").result(timeout=WAIT_S)
dies = save(made(2.0), "step-1", planner=DyingPlanner() if rank == int(os.environ["VICTIM"]) else None)
print(type(failure(dies)).__name__)
again = save(made(3.0), "step-2") if mode == "process" else None  # torch does not start another process
if again is not None:
    print(type(failure(again)).__name__)
single = made(-1.0)
single.pop("mine")
dcp.load({"sharded": (w := torch.zeros(512, 1024))}, storage_reader=FlyballReader(f"{folder}/step-1"), no_dist=True)
assert (w == 1.0).all(), "the last checkpoint is as it was"
os._exit(0)  # the group is broken
"""
)


def run(warm: WarmPython, tmp_path: Path, script: str, mode: str, *, victim: int = 1) -> list[int]:
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "RENDEZVOUS": f"file://{tmp_path}/rendezvous",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "VICTIM": str(victim),
    }
    arguments = (str(tmp_path), mode, str(Path(__file__).parent))
    started = [warm.start(script, *arguments, environment={**environment, "RANK": str(rank)}) for rank in range(2)]
    ends = []
    for process in started:
        _, errors = process.communicate(TIMEOUT_S)
        ends.append((process.wait(), errors))
        process.close()
    broken = [errors[-6000:] for code, errors in ends if code not in (0, -signal.SIGKILL)]
    assert not broken, json.dumps(broken)
    return [code for code, _ in ends]


MODES = ["thread", pytest.param("process", marks=pytest.mark.proof)]  # a process imports torch anew


@pytest.mark.parametrize("mode", MODES)
def test_training_goes_on_while_its_state_is_saved(warm_python: WarmPython, tmp_path: Path, mode: str) -> None:
    assert run(warm_python, tmp_path, WORKS, mode) == [0, 0]


@pytest.mark.parametrize("mode", MODES)
def test_a_full_disk_is_an_exception_on_every_rank(warm_python: WarmPython, tmp_path: Path, mode: str) -> None:
    assert run(warm_python, tmp_path, FULL, mode) == [0, 0]


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.proof)], ids=["other", "coordinator"])
@pytest.mark.parametrize("mode", MODES)
def test_a_killed_rank_or_process_is_an_exception_on_the_others(
    warm_python: WarmPython, tmp_path: Path, mode: str, victim: int
) -> None:
    """In thread mode the rank itself dies; in process mode its background process, and the rank goes on."""
    ends = [0, 0]
    if mode == "thread":
        ends[victim] = -signal.SIGKILL
    assert run(warm_python, tmp_path, KILLED, mode, victim=victim) == ends
