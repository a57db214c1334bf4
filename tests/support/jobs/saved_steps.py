"""Steps that several ranks saved, sharded in several ways, made in one process: torch's fake process group tells each
rank which one it is."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.stores.shards import make_manifest
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpt_engine.format import manifest as manifests
from ckpt_engine.trainer.capture.capturer import Capturer

PLACEMENTS: dict[str, tuple[Replicate | Shard, ...]] = {
    "columns": (Shard(0), Shard(1)),
    "rows": (Shard(1), Replicate()),
    "uneven": (Shard(0), Shard(0)),
    "complex": (Shard(0), Replicate()),
    "replicated": (Replicate(), Replicate()),
}
MESH = (2, 2)


def truth() -> dict[str, Any]:
    """The unsharded state, but for the values that each rank has for itself."""
    chance = torch.Generator().manual_seed(7)

    def of(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=chance)

    tied = of(3, 2)
    return {
        "model": OrderedDict(
            [
                ("columns", of(6, 5)),
                ("rows", of(4, 6).bfloat16()),
                ("uneven", of(7).double()),
                ("complex", torch.complex(of(4, 3), of(4, 3))),
                ("replicated", of(2, 2).half()),
                ("embedding", tied),
                ("head", tied),
                ("f8", of(5).to(torch.float8_e4m3fn)),
            ]
        ),
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": of(4)}, 1: {"mask": of(3) > 0}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0, 1]}],
        },
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2**40),
        "pair": (1, torch.arange(3, dtype=torch.int16)),
        "epoch": 5,
        "name": "run",
        "nothing": None,
    }


def more_kinds() -> dict[str, Any]:
    """What format 2 has beside that: versions of modules, and further classes of plain values."""
    module = OrderedDict([("0.weight", torch.arange(6.0).view(2, 3))])
    module._metadata = OrderedDict([("", {"version": 1}), ("0", {"version": 2, "by": "x"})])  # type: ignore[attr-defined]
    return {
        "module": module,
        "path": Path("a/b"),
        "times": [date(2026, 1, 2), datetime(2026, 1, 2, 3, fold=1, tzinfo=UTC), time(1, 2), timedelta(-1, 5)],
        "sets": [range(5, 1, -2), frozenset({1, 2}), {(1, 2)}, bytearray(b"ab")],
        "containers": [deque([1, 2], maxlen=3), defaultdict(list, a=[1])],
    }


def exact_tensors() -> dict[str, Any]:
    """What a file of format 2 keeps of tensors."""
    whole = torch.arange(8.0)
    image = torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)]
    return {"whole": whole, "part": whole[2:5], "image": image, "parameters": parameters}


def write_step(folder: Path, mesh: Sequence[int] = MESH, *, step: int = 3, chunk_bytes: int = 64) -> dict[str, Any]:
    """Write the shards of all ranks of a mesh, the model's tensors sharded by PLACEMENTS. Returns the truth."""
    ranks = math.prod(mesh)
    folder.mkdir(parents=True)
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        try:
            _write_rank(folder, rank, ranks, init_device_mesh("cpu", tuple(mesh)), step, chunk_bytes)
        finally:
            dist.destroy_process_group()
            # Meshes of different ranks are equal, and torch would go on with those of the rank before.
            torch._C._clear_DTensor_sharding_propagator_cache()
            DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    return truth()


def _write_rank(folder: Path, rank: int, ranks: int, mesh: DeviceMesh, step: int, chunk_bytes: int) -> None:
    state = truth()
    for name, placements in PLACEMENTS.items():
        if ranks > 1:
            whole = state["model"][name]
            state["model"][name] = distribute_tensor(whole, mesh, placements[: mesh.ndim], src_data_rank=None)
    write_shard(folder, rank, ranks, state | {"rank": rank}, step=step, chunk_bytes=chunk_bytes)


def write_shard(
    folder: Path, rank: int, ranks: int, state: dict[str, Any], *, step: int = 3, chunk_bytes: int = 64
) -> None:
    """What an engine stores of one of the ranks that save a step."""
    prepared = Capturer().take(state)
    payload = memoryview(bytearray(prepared.payload_bytes))
    prepared.copy_into(0, payload)
    manifest = make_manifest(payload, step, rank, world_size=ranks, chunk_bytes=chunk_bytes)
    (folder / f"rank{rank}.safetensors").write_bytes(payload)
    (folder / f"rank{rank}.manifest").write_bytes(manifests.as_file(manifests.encode(manifest)))


def same(one: Any, other: Any) -> bool:  # noqa: ANN401
    """Equal types and values, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        equal = isinstance(other, torch.Tensor) and (one.dtype, one.shape) == (other.dtype, other.shape)
        return equal and bytes_of(one) == bytes_of(other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and list(one) == list(other)
            and all(same(item, other[key]) for key, item in one.items())
        )
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def bytes_of(tensor: torch.Tensor) -> bytes:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
