"""Match a training state with a shard: which memory gets which tensor. Everything is compared before a byte is written.

A contiguous tensor of the state is filled directly. Everything else is read into new memory, and handed over by `copy_`
or `load_state_dict` afterwards.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ckpt_engine.format.coverage import Box, uncovered
from ckpt_engine.format.shard_format import Block, ShardHeader
from ckpt_engine.trainer.capture.capture_plan import DTYPE_NAMES
from ckpt_engine.trainer.restore.optimizer_options import other_options
from ckpt_engine.trainer.restore.own_loads import OwnLoads
from ckpt_engine.trainer.state import exact_tensors, sharded_tensors
from ckpt_engine.trainer.state.sharded_tensors import NotSaveable, OtherLayout
from ckpt_engine.trainer.state.state_tree import has_state, is_lazy
from flyball.contracts.errors import CorruptShard, StateMismatch

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64, torch.float16: torch.complex32}
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
MAX_NAMED = 8  # differences in one message
_WRITABLE_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A tensor or array of the shard, as a placeholder in the state's tree until it is read.

    `shape` is the shape of this rank's block, `block` its place in the whole tensor, `layout` how it was sharded (None
    if it was not).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    block: Block
    layout: Mapping[str, Any] | None = None
    is_array: bool = False

    @property
    def described(self) -> str:
        if self.is_array:
            return "ndarray"
        return f"{self.block.global_shape} {self.dtype}" + (", sharded" if self.layout else "")


def stored(header: ShardHeader, tag: str, content: Any) -> Stored:  # noqa: ANN401 - JSON
    """The placeholder for a leaf of the tree. Raises CorruptShard or ValueError if the shard has no such tensor."""
    tag, content = exact_tensors.source_of(tag, content)
    if tag == "$dtensor":
        ((local_tag, name),) = content["local"].items()
        if local_tag not in ("$tensor", "$complex_tensor"):
            raise ValueError(f"the block of a sharded tensor is a {local_tag!r}")
        layout = {key: value for key, value in content.items() if key != "local"}
        local = stored(header, local_tag, name)
        return Stored(local.name, local.shape, local.dtype, local.block, layout)
    entry = header.tensors[content]
    shape, dtype = entry.shape, DTYPES[entry.dtype]
    block = header.blocks.get(content) or Block(shape, (0,) * len(shape))
    if tag == "$complex_tensor":
        if dtype not in _COMPLEX or shape[-1:] != (2,):
            raise ValueError(f"{content!r} should be complex, and is {dtype} {shape}")
        block = Block(block.global_shape[:-1], block.offsets[:-1])
        shape, dtype = shape[:-1], _COMPLEX[dtype]
    return Stored(content, shape, dtype, block, is_array=tag == "$array")


class Matching:
    """Compares a state with the saved one, without writing. Collects `claims`: the name of a stored tensor -> the
    tensor of the state whose memory it should fill."""

    def __init__(self) -> None:
        self.claims: dict[str, torch.Tensor] = {}
        self._differences: list[StateMismatch] = []
        self._layouts: list[OtherLayout] = []

    def match(self, target: object, saved: Any, path: str) -> None:  # noqa: ANN401 - any state
        """Note what of `saved` cannot be loaded into `target`; `check` names it."""
        with self.noting():
            self._match(target, saved, path)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """While entered, note a StateMismatch in place of raising it."""
        try:
            yield
        except OtherLayout as error:
            self._layouts.append(error)
        except StateMismatch as error:
            self._differences.append(error)

    def check(self) -> None:
        """Raise StateMismatch, naming the paths, if anything cannot be loaded; OtherLayout if it only was saved in
        another layout."""
        first = next(iter(self._differences or self._layouts), None)
        if first is None:
            return
        if len(self._differences) > 1:
            named = [error.message for error in self._differences[:MAX_NAMED]]
            if more := len(self._differences) - len(named):
                named.append(f"It differs in {more} more places.")
            first = StateMismatch(" ".join(named), hint=first.hint)
        raise first

    def _match(self, target: object, saved: Any, path: str) -> None:  # noqa: ANN401 - any state
        if isinstance(target, torch.Tensor):
            self._tensor(target, saved, path)
        elif isinstance(target, torch.nn.Module):
            self._module(target, saved, path)
        elif isinstance(target, torch.optim.Optimizer):
            self._optimizer(target, saved, path)
        elif has_state(target):
            return  # its `load_state_dict` decides
        elif isinstance(target, MutableMapping):
            self._mapping(target, saved, path)
        elif isinstance(target, list) and isinstance(saved, list):
            for index, (item, saved_item) in enumerate(zip(target, saved, strict=False)):
                self.match(item, saved_item, f"{path}.{index}")

    def _tensor(self, target: torch.Tensor, saved: object, path: str) -> None:
        refuse_meta(target, path)
        if not isinstance(saved, Stored) or saved.is_array:
            kind = saved.described if isinstance(saved, Stored) else type(saved).__name__
            raise mismatch(path, f"is a tensor, and was saved as {kind}")
        if (tuple(target.shape), target.dtype) != (saved.block.global_shape, saved.dtype):
            raise mismatch(path, f"is {tuple(target.shape)} {target.dtype}, and was saved as {saved.described}")
        self.claim(target, saved, path)

    def claim(self, target: torch.Tensor, saved: Stored, path: str) -> None:
        """Have a tensor of the same shape and dtype filled. Raises OtherLayout if its block is another one."""
        box = _box(target, saved, path)
        if uncovered(box, [Box(saved.block.offsets, saved.shape)]):
            what = f"is the block at {box.offsets}, {box.shape}, and {saved.described} was saved"
            raise mismatch(path, what, kind=OtherLayout)
        self.claims.setdefault(saved.name, target)

    def _module(self, target: torch.nn.Module, saved: object, path: str) -> None:
        if not isinstance(saved, Mapping):
            raise mismatch(path, f"is a module, and was saved as {type(saved).__name__}")
        expected, own = target.state_dict(), OwnLoads.of(target)
        for name in expected:
            if name not in saved and not own.decide(name):
                self._differences.append(mismatch(f"{path}.{name}", "was not saved"))
        for name in saved:
            if name not in expected and not own.decide(name):
                what = "was saved, and the module does not have it"
                self._differences.append(mismatch(f"{path}.{name}", what))
        for name, tensor in expected.items():
            if isinstance(tensor, torch.Tensor):
                with self.noting():
                    self._entry(own, name, tensor, saved, path)

    def _entry(self, own: OwnLoads, name: str, tensor: torch.Tensor, saved: Mapping[str, Any], path: str) -> None:
        refuse_meta(tensor, f"{path}.{name}")
        if name not in saved or (own.decide(name) and not _is_alike(tensor, saved[name])):
            return
        if own.need_memory(name, tensor) and not sharded_tensors.is_sharded(tensor):
            return
        self._tensor(tensor, saved[name], f"{path}.{name}")

    def _optimizer(self, target: torch.optim.Optimizer, saved: Any, path: str) -> None:  # noqa: ANN401 - any state
        try:
            groups = [len(group["params"]) for group in saved["param_groups"]]
            states = saved["state"]
        except (TypeError, LookupError):
            states = None
        if not isinstance(states, Mapping):
            raise mismatch(path, "is an optimizer, and was saved as something else")
        for group in target.param_groups:
            for parameter in group["params"]:
                refuse_meta(parameter, f"{path}.param_groups")
        own = target.state_dict()
        expected = [len(group["params"]) for group in own["param_groups"]]
        if groups != expected:
            raise mismatch(
                path,
                f"does not take the saved state: its groups have {expected} parameters, and were saved with {groups}",
            )
        if other := other_options(target, saved["param_groups"]):
            raise mismatch(path, other)
        for parameter, entries in own["state"].items():
            saved_entries = states.get(parameter, {})
            for name, tensor in entries.items() if isinstance(saved_entries, Mapping) else ():
                found = saved_entries.get(name)
                if not isinstance(tensor, torch.Tensor) or not isinstance(found, Stored):
                    continue
                if tuple(tensor.shape) != found.block.global_shape:  # torch would accept it, and fail at the next step
                    what = f"is {tuple(tensor.shape)}, and was saved as {found.described}"
                    self._differences.append(mismatch(f"{path}.state.{parameter}.{name}", what))
                elif not found.is_array and tensor.dtype == found.dtype:
                    self.claim_state(tensor, found)

    def claim_state(self, target: torch.Tensor, saved: Stored) -> None:
        """Have an optimizer's tensor of the same shape and dtype filled, if its block is the same. Else the optimizer
        gets a new one."""
        if _has_block(target, saved):
            self.claims.setdefault(saved.name, target)

    def _mapping(self, target: Mapping[Any, Any], saved: object, path: str) -> None:
        if not isinstance(saved, Mapping):
            raise mismatch(path, f"is a dict, and was saved as {type(saved).__name__}")
        if target.keys() == {"state", "param_groups"} and not target["state"] and saved.get("state"):
            # It has no tensors to fill, so a restore would silently do nothing.
            what = "is the state dict of an optimizer that has not stepped yet"
            raise mismatch(path, what, "pass the optimizer itself")
        for key, item in target.items():
            if key not in saved:
                self._differences.append(mismatch(f"{path}.{key}", "was not saved"))
                continue
            self.match(item, saved[key], f"{path}.{key}")


def _is_alike(target: torch.Tensor, saved: object) -> bool:
    if is_lazy(target) or not isinstance(saved, Stored) or saved.is_array:
        return False
    return (tuple(target.shape), target.dtype) == (saved.block.global_shape, saved.dtype)


def refuse_meta(target: torch.Tensor, path: str) -> None:
    """Raise StateMismatch for a tensor without memory: torch's copy into it would do nothing, without a word."""
    local = sharded_tensors.local_block(target) if sharded_tensors.is_sharded(target) else target  # type: ignore[arg-type]
    if local.is_meta:
        raise mismatch(
            path,
            "is on the meta device, so there is no memory to restore it into",
            "call model.to_empty(device=...) before the restore, and make the optimizer after that",
        )


def destinations(
    header: ShardHeader, names: Mapping[str, Stored], claims: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """For every name, the tensor to read its bytes into: the claiming tensor's memory, or new memory if there is no
    such tensor, it cannot be filled directly, or another one has claimed the memory."""
    found: dict[str, torch.Tensor] = {}
    taken: dict[torch.device, list[tuple[int, int]]] = {}
    for name in names:
        memory = memory_of(claims[name]) if name in claims else None
        if memory is not None and take_memory(taken.setdefault(memory.device, []), memory):
            found[name] = memory
            continue
        entry = header.tensors[name]
        try:
            found[name] = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        except (
            RuntimeError,
            TypeError,
            OverflowError,
        ) as error:  # no elements, and huge dimensions
            raise CorruptShard(f"Tensor {name!r} of a shard has the shape {entry.shape}: {error}.") from error
    return found


def mismatch(path: str, what: str, hint: str = "", *, kind: type[StateMismatch] = StateMismatch) -> StateMismatch:
    return kind(
        f"The state at {path!r} {what}.",
        hint=hint or "restore into the same model, optimizer and data state that were saved",
    )


def _box(target: torch.Tensor, saved: Stored, path: str) -> Box:
    """The part of `target` that this process holds. Raises OtherLayout if it was saved in one, StateMismatch if it has
    none that could be saved."""
    if not sharded_tensors.is_sharded(target):
        if saved.layout is not None:
            raise mismatch(path, "is whole, and was saved sharded", kind=OtherLayout)
        return Box((0,) * target.dim(), tuple(target.shape))
    try:
        layout = sharded_tensors.layout_of(target)  # type: ignore[arg-type]
    except NotSaveable as reason:
        raise mismatch(path, str(reason)) from None
    if layout.node != saved.layout:
        raise mismatch(path, "is sharded in another way than it was saved", kind=OtherLayout)
    return Box(layout.block.offsets, tuple(sharded_tensors.local_block(target).shape))  # type: ignore[arg-type]


def _has_block(target: torch.Tensor, saved: Stored) -> bool:
    if not sharded_tensors.is_sharded(target):
        return saved.layout is None
    layout = sharded_tensors.layout_of(target)  # type: ignore[arg-type]
    return (layout.node, layout.block) == (saved.layout, saved.block)


def memory_of(target: torch.Tensor) -> torch.Tensor | None:
    """The memory of `target`, viewed as the shard stores it; None if it is not one writable piece."""
    if sharded_tensors.is_sharded(target):
        target = sharded_tensors.local_block(target)  # type: ignore[arg-type]
    if type(target) not in _PLAIN_TENSORS or target.layout is not torch.strided or target.is_quantized:
        return None
    if target.device.type not in _WRITABLE_DEVICES or not target.is_contiguous() or target.is_neg() or target.is_conj():
        return None
    target = target.detach()
    return torch.view_as_real(target) if target.is_complex() else target


def take_memory(taken: list[tuple[int, int]], memory: torch.Tensor) -> bool:
    """Take this range of memory. False if part of it is taken. `taken` is sorted, and its ranges do not overlap."""
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    index = bisect.bisect_right(taken, (begin, end))
    if (index > 0 and taken[index - 1][1] > begin) or (index < len(taken) and taken[index][0] < end):
        return False
    taken.insert(index, (begin, end))
    return True
