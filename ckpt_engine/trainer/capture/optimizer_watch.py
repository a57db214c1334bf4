"""Finds the tensors that only optimizers' steps write to, and has a hook that runs before each step.

A tensor may be copied after `save` has returned if nobody can write to it unnoticed. That holds for the parameters and
the state of an optimizer whose steps go through `torch.optim.Optimizer`, because a global hook runs before each of
them: also inside backward, under GradScaler, and in a compiled step. An optimizer counts from the first step that the
hook saw, so one that never calls the hook is never trusted. Two kinds never count: optimizers whose step is replayed
from a CUDA graph, past the hook (it was seen while it was recorded, or `capturable` is set), and optimizers of other
packages with public methods of their own, because these may write as well (SAM's first step, schedule-free's switch to
evaluation).
"""

from __future__ import annotations

import threading
import weakref
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt_engine.trainer.state import sharded_tensors

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
Extent = tuple[int, int]  # address of the first byte, bytes; the machine's devices share one space of addresses


class StepGuard(Protocol):
    """Called before an optimizer writes."""

    def before_step(self, optimizer: Optimizer) -> None: ...

    def before_replays(self, optimizer: Optimizer) -> None:
        """A step is being recorded into a CUDA graph: from now on the optimizer may write without a call. The caller's
        stream must not be waited for, and must not be made to wait."""


_lock = threading.Lock()
_seen: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()  # whether only its steps write
_seen_ever = 0
_guards: tuple[StepGuard, ...] = ()  # replaced, never changed: read without the lock
_is_watching = False


def watch() -> None:
    """Hook into the steps of all optimizers of this process from now on."""
    global _is_watching  # noqa: PLW0603 - torch's hook is the process's own
    with _lock:
        if not _is_watching:
            register_optimizer_step_pre_hook(_before_step)
            _is_watching = True


def _before_step(optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    if _is_recorded():
        with _lock:
            _seen[optimizer] = False
        for guard in _guards:
            guard.before_replays(optimizer)
        return  # nothing is written yet
    if optimizer not in _seen:
        _note_new(optimizer)
    for guard in _guards:
        guard.before_step(optimizer)


def _note_new(optimizer: Optimizer) -> None:
    global _seen_ever  # noqa: PLW0603
    with _lock:
        _seen[optimizer] = _writes_in_steps_only(type(optimizer))
        _seen_ever += 1


def seen_ever() -> int:
    """How many optimizers made a step so far. Never shrinks."""
    return _seen_ever


def _is_recorded() -> bool:
    """Whether the step is being recorded into a CUDA graph instead of run. SGD's can be, without `capturable`."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


_before_step._torchdynamo_disable = True  # type: ignore[attr-defined]  # compiled steps call it and do not trace it


def add_guard(guard: StepGuard) -> None:
    global _guards  # noqa: PLW0603
    with _lock:
        _guards = (*_guards, guard)


def remove_guard(guard: StepGuard) -> None:
    global _guards  # noqa: PLW0603
    with _lock:
        _guards = tuple(other for other in _guards if other is not guard)


class GuardedTensors:
    """The tensors of all optimizers seen so far, as they are now: some written to by guarded steps only, some not."""

    def __init__(self) -> None:
        with _lock:
            optimizers = list(_seen.items())
        self._trusted: list[torch.Tensor] = []
        self._others: list[torch.Tensor] = []
        for optimizer, is_trusted in optimizers:
            is_replayed = any(group.get("capturable") for group in optimizer.param_groups)
            (self._trusted if is_trusted and not is_replayed else self._others).extend(tensors_of(optimizer))

    def places(self) -> tuple[object, ...] | None:
        """Everything that `extents` depends on, to be compared; None if it cannot be told (not all are strided)."""
        views = (torch.Tensor.data_ptr, attrgetter("nbytes"), torch.Tensor.stride)
        tensors = [*self._trusted, *self._others]
        try:
            return len(self._trusted), *(list(map(view, tensors)) for view in views)
        except RuntimeError:
            return None

    def extents(self, larger_than_bytes: int = 0) -> frozenset[Extent]:
        """The memory of tensors of more than so many bytes that nothing but a guarded step writes to."""
        trusted, shared = _extents(self._trusted, larger_than_bytes), _extents(self._others, larger_than_bytes)
        return trusted - shared  # an optimizer that wraps another shares its parameters


def _extents(tensors: list[torch.Tensor], larger_than_bytes: int) -> frozenset[Extent]:
    extents = (extent_of(tensor) for tensor in tensors if tensor.nbytes > larger_than_bytes)
    return frozenset(extent for extent in extents if extent is not None)


def _writes_in_steps_only(kind: type[Optimizer]) -> bool:
    if kind.__module__.partition(".")[0] == "torch":
        return True
    own = {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))}
    return own <= set(dir(Optimizer))


def tensors_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """An optimizer's parameters and state; of sharded tensors this rank's block."""
    found: list[Any] = []
    for group in optimizer.param_groups:
        found += group["params"]
    for state in optimizer.state.values():
        if isinstance(state, dict):
            found += state.values()
    if _PLAIN.issuperset(map(type, found)):
        return found
    return [_in_memory(value) for value in found if isinstance(value, torch.Tensor)]


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) in _PLAIN:
        return tensor
    return sharded_tensors.local_block(tensor) if sharded_tensors.is_sharded(tensor) else tensor  # type: ignore[arg-type]


def extent_of(tensor: torch.Tensor) -> Extent | None:
    """The memory that a tensor fills completely; None if there are gaps."""
    if tensor.layout is not torch.strided:
        return None
    size_bytes = tensor.nbytes
    if not tensor.is_contiguous():
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if (last + 1) * tensor.element_size() != size_bytes:
            return None
    return (tensor.data_ptr(), size_bytes) if size_bytes else None


def storage_of(tensor: torch.Tensor) -> int:
    """Address of the tensor's storage, to find tensors that share memory. 0 for one that only wraps others (a quantized
    optimizer's state): its memory is never guarded, so nothing of it is copied lazily."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0
