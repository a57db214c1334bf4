"""Which tensors only an optimizer's step writes to, and a word before it does.

A tensor may be copied after `save` has returned if nobody can write to it unseen. That is so for the parameters and
the state of an optimizer whose steps go through `torch.optim.Optimizer`, because a global hook is called before each:
also for optimizers that step inside backward, under GradScaler, and when the step is compiled. An optimizer counts from
the first step that the hook saw, so that one which never calls it is never trusted. Two kinds are never counted: those
whose step is replayed from a CUDA graph, past the hook (it was seen while it was recorded, or they have `capturable`
set), and those of other packages that have methods of their own, since these may write as well (the first step of SAM,
schedule-free's change to evaluation).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt_engine import sharded_tensors

_PLAIN = (torch.Tensor, torch.nn.Parameter)
Extent = tuple[int, int]  # address of the first byte, bytes; the machine's devices share one space of addresses


class StepGuard(Protocol):
    """Whoever must be asked before an optimizer writes."""

    def before_step(self, optimizer: Optimizer) -> None: ...


_lock = threading.Lock()
_seen: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()  # whether it writes in steps only
_guards: tuple[StepGuard, ...] = ()  # replaced, never changed: read without the lock
_is_watching = False


def watch() -> None:
    """From now on see the steps of all optimizers of this process."""
    global _is_watching  # noqa: PLW0603 - torch's hook is the process's own
    with _lock:
        if not _is_watching:
            register_optimizer_step_pre_hook(_before_step)
            _is_watching = True


def _before_step(optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    if _is_recorded():
        with _lock:
            _seen[optimizer] = False
        return  # nothing is written now
    if optimizer not in _seen:
        with _lock:
            _seen[optimizer] = _writes_in_steps_only(type(optimizer))
    for guard in _guards:
        guard.before_step(optimizer)


def _is_recorded() -> bool:
    """Whether the step goes into a CUDA graph in place of being run. SGD's may, without `capturable`."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


_before_step._torchdynamo_disable = True  # type: ignore[attr-defined]  # called, never traced into a compiled step


def add_guard(guard: StepGuard) -> None:
    global _guards  # noqa: PLW0603
    with _lock:
        _guards = (*_guards, guard)


def remove_guard(guard: StepGuard) -> None:
    global _guards  # noqa: PLW0603
    with _lock:
        _guards = tuple(other for other in _guards if other is not guard)


def guarded_extents(larger_than_bytes: int = 0) -> set[Extent]:
    """The memory of all such tensors that only a step which the hook sees writes to."""
    with _lock:
        optimizers = list(_seen.items())
    guarded: set[Extent] = set()
    others: set[Extent] = set()
    for optimizer, is_trusted in optimizers:
        is_replayed = any(group.get("capturable") for group in optimizer.param_groups)
        extents = guarded if is_trusted and not is_replayed else others
        for tensor in tensors_of(optimizer):
            if tensor.nbytes > larger_than_bytes and (extent := extent_of(tensor)) is not None:
                extents.add(extent)
    return guarded - others  # one that wraps another shares its parameters


def _writes_in_steps_only(kind: type[Optimizer]) -> bool:
    if kind.__module__.partition(".")[0] == "torch":
        return True
    own = {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))}
    return own <= set(dir(Optimizer))


def tensors_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """The parameters and the state of an optimizer; of sharded ones this rank's block."""
    for group in optimizer.param_groups:
        yield from map(_in_memory, group["params"])
    for state in optimizer.state.values():
        if isinstance(state, dict):
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    yield _in_memory(value)


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) in _PLAIN:
        return tensor
    return sharded_tensors.local_block(tensor) if sharded_tensors.is_sharded(tensor) else tensor  # type: ignore[arg-type]


def extent_of(tensor: torch.Tensor) -> Extent | None:
    """The memory that a tensor fills, without gaps; None if it does not fill it so."""
    if tensor.layout is not torch.strided:
        return None
    size_bytes = tensor.nbytes
    if not tensor.is_contiguous():
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if (last + 1) * tensor.element_size() != size_bytes:
            return None
    return (tensor.data_ptr(), size_bytes) if size_bytes else None


def storage_of(tensor: torch.Tensor) -> int:
    """What tells apart tensors that share no memory."""
    return tensor.untyped_storage().data_ptr()
