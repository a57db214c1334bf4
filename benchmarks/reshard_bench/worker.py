"""One rank of a world: saves the state, and loads it as often as it is told to, with Flyball or with torch's dcp.

Started by `reshard_bench.world`. Takes JSON lines on stdin, and answers each with one on stdout.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import flyball

STEP = 1
_TIMEOUT_S = 600.0
_KINDS = ("model", "exp_avg", "exp_avg_sq")
_WIDTHS = (1024, 256, 64)


def shapes_of(state_bytes: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a GPT-2-like model and its AdamW moments, of about so many bytes."""

    def block(width: int) -> dict[str, tuple[int, ...]]:
        inner = {
            "qkv": (3 * width, width),
            "proj": (width, width),
            "up": (4 * width, width),
            "down": (width, 4 * width),
        }
        weights = {f"{name}.weight": shape for name, shape in inner.items()}
        biases = {f"{name}.bias": shape[:1] for name, shape in inner.items()}
        norms = {f"norm{number}.{part}": (width,) for number in (1, 2) for part in ("weight", "bias")}
        return {**weights, **biases, **norms}

    def size_bytes(width: int) -> int:
        return 4 * len(_KINDS) * sum(math.prod(shape) for shape in block(width).values())

    width = next((width for width in _WIDTHS if 4 * size_bytes(width) <= state_bytes), _WIDTHS[-1])
    blocks = range(max(1, round(state_bytes / size_bytes(width))))
    return {
        f"{kind}.{number}.{name}": shape for kind in _KINDS for number in blocks for name, shape in block(width).items()
    }


def make_state(mesh: DeviceMesh, state_bytes: int) -> dict[str, DTensor]:
    """This rank's blocks: every tensor is sharded over its rows, as by FSDP2."""
    return {
        name: DTensor.from_local(torch.zeros(rows // mesh.size(), *rest), mesh, [Shard(0)], run_check=False)
        for name, (rows, *rest) in shapes_of(state_bytes).items()
    }


def blocks_of(state: Mapping[str, DTensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to_local() for name, tensor in state.items()}


def values_of(number: int, local: torch.Tensor, rank: int) -> torch.Tensor:
    """Every element's place in the whole tensor, and the tensor's number."""
    begin = rank * local.numel()
    return torch.arange(begin, begin + local.numel(), dtype=torch.float32).reshape(local.shape) + number


def fill(blocks: Mapping[str, torch.Tensor], rank: int) -> None:
    for number, local in enumerate(blocks.values()):
        local.copy_(values_of(number, local, rank))


def is_filled(blocks: Mapping[str, torch.Tensor], rank: int) -> bool:
    return all(torch.equal(local, values_of(number, local, rank)) for number, local in enumerate(blocks.values()))


class Rank:
    def __init__(self) -> None:
        warnings.filterwarnings("ignore")
        self.rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=os.environ["RENDEZVOUS"], rank=self.rank, world_size=ranks)
        self._copy: dict[str, torch.Tensor] | None = None
        self.state = make_state(init_device_mesh("cpu", (ranks,)), int(os.environ["STATE_BYTES"]))

    def save(self, environment: Mapping[str, str], folder: str) -> dict[str, Any]:
        fill(blocks_of(self.state), self.rank)
        os.environ.update(environment)
        job = flyball.attach()
        handle = job.save(STEP, self.state)
        if not handle.durable.wait(_TIMEOUT_S):
            raise RuntimeError(f"step {STEP} was not saved: {handle.error or handle.skipped}")
        dist.barrier()
        job.close()
        dcp.save(self.state, checkpoint_id=folder)
        return {}

    def flyball(self, environment: Mapping[str, str], build_s: float) -> dict[str, Any]:
        """`build_s`: the time between attach and restore, in which a script builds its model."""
        os.environ.update(environment)
        job = flyball.attach()
        time.sleep(build_s)
        found = self._timed(lambda: job.restore(self.state))
        dist.barrier()
        job.close()
        return found

    def dcp(self, folder: str) -> dict[str, Any]:
        return self._timed(lambda: dcp.load(self.state, storage_reader=dcp.FileSystemReader(folder)))

    def memcpy(self) -> dict[str, Any]:
        """The floor: a copy of as many bytes within memory of this process, of which every page is there."""
        if self._copy is None:
            self._copy = {name: local.clone() for name, local in blocks_of(self.state).items()}
            fill(self._copy, self.rank)
        copy = self._copy

        def load() -> None:
            for name, local in blocks_of(self.state).items():
                local.copy_(copy[name])

        return self._timed(load)

    def _timed(self, load: Any) -> dict[str, Any]:  # noqa: ANN401 - called without arguments
        for local in blocks_of(self.state).values():
            local.zero_()
        dist.barrier()
        began_s = time.perf_counter()
        load()
        seconds = time.perf_counter() - began_s
        dist.barrier()
        if not is_filled(blocks_of(self.state), self.rank):
            raise RuntimeError("what was loaded is not what was saved")
        return {"seconds": seconds}


def main() -> None:
    torch.set_num_threads(1)
    rank = Rank()
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(rank, request.pop("do"))(**request)
        print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
