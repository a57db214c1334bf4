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
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt_engine.trainer.state import sharded_tensors

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
Extent = tuple[int, int]  # address of the first byte, bytes; the machine's devices share one space of addresses


class StepGuard(Protocol):
    """Whoever must be asked before an optimizer writes."""

    def before_step(self, optimizer: Optimizer) -> None: ...


_lock = threading.Lock()
_seen: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()  # whether it writes in steps only
_seen_ever = 0
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
        _note_new(optimizer)
    for guard in _guards:
        guard.before_step(optimizer)


def _note_new(optimizer: Optimizer) -> None:
    global _seen_ever  # noqa: PLW0603
    with _lock:
        _seen[optimizer] = _writes_in_steps_only(type(optimizer))
        _seen_ever += 1


def seen_ever() -> int:
    """How many optimizers were seen in a step; it only grows."""
    return _seen_ever


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


@dataclass(frozen=True, slots=True)
class _Guarded:
    """What `guarded_extents` found last, and of what."""

    looked_at: tuple[object, ...]
    extents: frozenset[Extent]


def guarded_extents(larger_than_bytes: int = 0) -> frozenset[Extent]:
    """The memory of all such tensors that only a step which the hook sees writes to. The same object as last time, if
    nothing has changed."""
    global _guarded  # noqa: PLW0603
    with _lock:
        optimizers = list(_seen.items())
    trusted: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for optimizer, is_trusted in optimizers:
        is_replayed = any(group.get("capturable") for group in optimizer.param_groups)
        (trusted if is_trusted and not is_replayed else others).extend(tensors_of(optimizer))
    looked_at = (larger_than_bytes, len(trusted), _places([*trusted, *others]))
    if looked_at[-1] is None or _guarded.looked_at != looked_at:
        extents, shared = _extents(trusted, larger_than_bytes), _extents(others, larger_than_bytes)
        _guarded = _Guarded(looked_at, extents - shared)  # one that wraps another shares its parameters
    return _guarded.extents


_guarded = _Guarded((), frozenset())


def _extents(tensors: list[torch.Tensor], larger_than_bytes: int) -> frozenset[Extent]:
    extents = (extent_of(tensor) for tensor in tensors if tensor.nbytes > larger_than_bytes)
    return frozenset(extent for extent in extents if extent is not None)


def _places(tensors: list[torch.Tensor]) -> tuple[list[object], ...] | None:
    """All that their extents depend on; None if there are others than strided ones."""
    views = (torch.Tensor.data_ptr, attrgetter("nbytes"), torch.Tensor.stride)
    try:
        return tuple(list(map(view, tensors)) for view in views)
    except RuntimeError:
        return None


def _writes_in_steps_only(kind: type[Optimizer]) -> bool:
    if kind.__module__.partition(".")[0] == "torch":
        return True
    own = {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))}
    return own <= set(dir(Optimizer))


def tensors_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters and the state of an optimizer; of sharded ones this rank's block."""
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
    """What tells apart tensors that share no memory; 0 for one that only wraps others (a quantized optimizer's state):
    its memory is never guarded, so nothing of it is copied later."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0
