"""The inputs of a replay as bytes, for another rank to compute the same. Nothing is pickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from ckpt_engine.trainer.state import state_tree, tree_building
from flyball.contracts import wire
from flyball.contracts.errors import UnsupportedState
from flyball.sdk.replay.runs import RandomState, bytes_of

MAX_CASE_BYTES = 64 << 20  # it passes through the store of the process group


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    device: str  # its type: the reader has its own of the same type
    data: bytes


class ReplayCase(msgspec.Struct, frozen=True):
    """The inputs, and the random state to begin with."""

    tree: str
    tensors: Mapping[str, _Tensor]
    random: RandomState


def pack(inputs: Sequence[object], random: RandomState) -> bytes:
    """Raises UnsupportedState for an input that cannot be sent, or if all are too large together."""
    flat = state_tree.flatten({"inputs": list(inputs)})
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in flat.tensors.values())
    if size_bytes > MAX_CASE_BYTES:
        raise UnsupportedState(
            f"The inputs of the replay have {size_bytes} bytes, and at most {MAX_CASE_BYTES} are sent to another rank.",
            hint="give job.replay a smaller batch",
        )
    if tree_building.names_classes(flat.tree):
        raise UnsupportedState(
            "A named tuple or an Enum is among the inputs of the replay, and would arrive without its class.",
            hint="pass plain tuples and values",
        )
    if flat.blocks:
        raise UnsupportedState("A sharded tensor is among the inputs of the replay.", hint="pass plain tensors")
    tensors = {
        name: _Tensor(
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tensor.device.type,
            bytes_of(tensor),
        )
        for name, tensor in flat.tensors.items()
    }
    return msgspec.msgpack.encode(ReplayCase(flat.tree, tensors, random))


def unpack(data: bytes) -> tuple[list[object], RandomState]:
    """The inputs on this rank's devices, and the random state. Raises CorruptShard or msgspec.MsgspecError for bytes
    that are no case."""
    case = wire.unpack(data, ReplayCase)
    tensors = {name: _made(tensor) for name, tensor in case.tensors.items()}
    tree = tree_building.parse(case.tree)

    def leaf(tag: str, name: Any) -> Any:  # noqa: ANN401 - a tensor or an array
        return tree_building.from_tensor(tag, tensors[name])

    return tree_building.build(tree["inputs"], leaf), case.random


def _made(tensor: _Tensor) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    if tensor.data:
        flat = torch.frombuffer(bytearray(tensor.data), dtype=torch.uint8).view(dtype)
    else:
        flat = torch.empty(0, dtype=dtype)
    return flat.reshape(tensor.shape).to(tensor.device)
