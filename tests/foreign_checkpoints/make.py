"""Make the checkpoints of other engines that `flyball ckpt import` must read, with the engines themselves:

    pip install --no-deps dlrover==0.6.1 nvidia-resiliency-ext==0.4.1 megatron-core==0.16.1   # apart, beside torch
    PYTHONPATH=.:tests python tests/foreign_checkpoints/make.py tests/foreign_checkpoints

Each folder has its engine's version in its name. DLRover's tensors pass through its shared memory and its saver, as in
a job. No GPU is needed: NVIDIA's class asserts CUDA tensors when it is made, so it is made empty and filled afterwards;
its manager has copied tensors to the CPU before it writes them, so that the file is the same. Megatron-LM itself is not
used: DLRover's checkpointer for it is called in the way of Megatron's `torch.save`, with enums of megatron-core.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from support.stores.kept_json import in_json
from torch.distributed._shard.sharded_tensor import ShardedTensor

RANKS = 2
TIMEOUT_S = 60.0


def state_of(rank: int) -> dict[str, Any]:
    """A state with what an optimizer adds, other numbers for each rank."""
    weight = torch.arange(6, dtype=torch.float32).view(2, 3) + 10 * rank
    return {
        "model": {"weight": weight, "half": torch.tensor([1.5, -2.0 - rank]).bfloat16()},
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": weight / 8}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "foreach": None, "params": [0]}],
        },
        "epoch": 5,
    }


def wait_for(path: Path, content: str) -> None:
    wait_until(lambda: path.exists() and path.read_text() == content)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError("its saver did not finish")
        time.sleep(0.05)


def end(engine: Any) -> None:  # noqa: ANN401 - DLRover's
    """Its saver outlives its training process otherwise, and its memory too."""
    engine._shm_handler.unlink()
    engine.close()
    if engine.saver_proc is not None:
        engine.saver_proc.terminate()
        engine.saver_proc.join(10)


# --- DLRover ---


def dlrover_ddp(folder: Path) -> dict[str, Any]:
    from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

    checkpointer = DdpCheckpointer(str(folder))
    for step, rank in ((20, 1), (40, 0)):
        checkpointer.save_checkpoint(step, state_of(rank), storage_type=StorageType.DISK)
        wait_for(folder / "dlrover_latest.txt", str(step))
    end(checkpointer._engine)
    return state_of(0)


def dlrover_megatron(folder: Path) -> dict[str, Any]:
    """Files and names as Megatron-LM's save_checkpoint gives them to torch.save."""
    from dlrover.trainer.torch.flash_checkpoint.megatron import MegatronCheckpointer
    from megatron.core.transformer.enums import AttnBackend

    checkpointer = MegatronCheckpointer(str(folder))
    place = folder / "iter_0000040" / "mp_rank_00"
    args = argparse.Namespace(hidden_size=6, params_dtype=torch.bfloat16, attention_backend=AttnBackend.flash)
    random = {
        "np_rng_state": ("MT19937", np.arange(4, dtype=np.uint32), 624),
        "torch_rng_state": torch.arange(4).byte(),
    }
    model = state_of(0) | {"args": args, "iteration": 40, "checkpoint_version": 3.0, "rng_state": [random]}
    optimizer = {0: {torch.float32: {"param": torch.arange(4.0)}}, "per_bucket_numel": [[4]]}
    checkpointer.save(model, str(place / "model_optim_rng.pt"))
    checkpointer.save(optimizer, str(place / "distrib_optim.pt"))
    place.mkdir(parents=True)
    checkpointer.engine.save_to_storage(40, checkpointer.state_dict, checkpointer.paths)
    wait_for(folder / "dlrover_latest.txt", "40")
    wait_for(folder / "latest_checkpointed_iteration.txt", "40")
    end(checkpointer.engine)
    plain = {"hidden_size": 6, "params_dtype": torch.bfloat16, "attention_backend": "AttnBackend(1)"}
    return model | {"args": plain, "distrib_optim": optimizer}


def gathered(value: Any) -> Any:  # noqa: ANN401 - any state
    """Sharded tensors whole, on rank 0."""
    if isinstance(value, ShardedTensor):
        out = torch.empty(value.size()) if dist.get_rank() == 0 else None
        value.gather(0, out)
        return out
    if isinstance(value, dict):
        return {key: gathered(item) for key, item in value.items()}
    return value


def dlrover_fsdp(rank: int, folder: Path, name: str, truth: Path) -> None:
    """One of two ranks: FSDP with sharded state dicts."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": name}
    os.environ |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    dist.init_process_group("gloo", init_method=f"file://{truth.parent}/meet", rank=rank, world_size=RANKS)
    from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
    from dlrover.trainer.torch.flash_checkpoint.fsdp import FsdpShardCheckpointer
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    model = torch.nn.Linear(3, 4)
    with torch.no_grad():
        model.weight.copy_(torch.arange(12.0).view(4, 3))
        model.bias.copy_(torch.arange(4.0))
    sharded = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(sharded.parameters())
    sharded(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with FullyShardedDataParallel.state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT):
        parts = {"model": sharded.state_dict(), "optim": FullyShardedDataParallel.optim_state_dict(sharded, optimizer)}
    whole = gathered(parts)
    if rank == 0:
        truth.write_text(json.dumps(in_json(whole | {"epoch": 5, "note": "a value"})) + "\n")
    checkpointer = FsdpShardCheckpointer(str(folder))
    checkpointer.save_checkpoint(40, sharded, optimizer, {"epoch": 5, "note": "a value"}, storage_type=StorageType.DISK)
    wait_for(folder / "dlrover_latest.txt", "40")  # which its rank 0 writes before other ranks' files are there
    mine = folder / "40" / f"__{rank}_0.distcp"
    wait_until(lambda: mine.exists() and mine.stat().st_size > 0)
    dist.barrier()
    end(checkpointer._engine)
    dist.destroy_process_group()


# --- NVIDIA's resiliency extension ---


def nvidia_local(rank: int, folder: Path, meeting: Path) -> None:
    """One of two ranks, each with a folder of its own under the root and the session."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

    manager = LocalCheckpointManager(folder, session_id="llama")
    state = BasicTensorAwareStateDict({})
    state.state_dict.update(state_of(rank))
    manager.save(state, 40)
    dist.destroy_process_group()


def in_a_process(make: Any, folder: Path, shm: str) -> None:  # noqa: ANN401 - a function above
    """DLRover keeps one saver per process."""
    os.environ["TORCHELASTIC_RUN_ID"] = shm
    truth = make(folder)
    (folder / "truth.json").write_text(json.dumps(in_json(truth)) + "\n")


def main() -> None:
    root = Path(sys.argv[1]).resolve()
    name = f"make-{os.getpid()}"
    dlrover, nvidia = f"dlrover-{version('dlrover')}", f"nvidia-{version('nvidia-resiliency-ext')}"
    spawn = torch.multiprocessing.get_context("spawn")
    for kind, make in (("ddp", dlrover_ddp), ("megatron", dlrover_megatron)):
        process = spawn.Process(target=in_a_process, args=(make, root / dlrover / kind, f"{name}-{kind}"))
        process.start()
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
    with tempfile.TemporaryDirectory() as meeting:
        shard = root / dlrover / "fsdp"
        truth = Path(meeting) / "truth.json"
        torch.multiprocessing.spawn(dlrover_fsdp, (shard, f"{name}-fsdp", truth), nprocs=RANKS)
        shutil.rmtree(shard / "._dlrover_ckpt_stage")  # of its own waiting, which takes minutes
        (shard / "truth.json").write_text(truth.read_text())
        torch.multiprocessing.spawn(nvidia_local, (root / nvidia, Path(meeting) / "nvidia"), nprocs=RANKS)
    (root / nvidia / "truth.json").write_text(json.dumps([in_json(state_of(rank)) for rank in range(RANKS)]) + "\n")


if __name__ == "__main__":
    main()
