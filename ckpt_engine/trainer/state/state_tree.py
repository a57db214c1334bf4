"""Take a training state apart into tensors and a JSON tree of everything else, and put it together again.

Nothing is pickled: a leaf is saved if JSON can express it with its type, else refused by its path. In the tree, lists,
strings, numbers, booleans and None stand for themselves, an object with plain string keys is a dict, and an object with
one key that begins with `$` is something else:

    {"$tensor": name} {"$array": name} {"$complex_tensor": name}      bytes in the shard
    {"$tuple": [..]} {"$set": [..]} {"$dict": [[key, value], ..]} {"$ordered": [[key, value], ..]}
    {"$counter": [[key, value], ..]} {"$size": [..]}
    {"$float": "nan"} {"$complex": [re, im]} {"$bytes": base64} {"$dtype": name} {"$device": name}
    {"$numpy": [dtype, base64]}                                       a numpy scalar
    {"$dtensor": {..}}                                                see `sharded_tensors`
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np
import torch

from ckpt_engine.format.shard_format import METADATA_KEY, Block
from ckpt_engine.trainer.state import sharded_tensors
from ckpt_engine.trainer.state.sharded_tensors import NotSaveable
from flyball.contracts.errors import CorruptShard, UnsupportedState

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | msgspec.Raw | None"

PLAIN_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))
_MAX_DEPTH = 64
_MAX_INT_BITS = 14_000  # Python writes and reads decimals of up to 4300 digits
_MIN_INT64, _MAX_UINT64 = -(1 << 63), (1 << 64) - 1  # what msgspec writes as integers
# Raised by Python, numpy and torch for bad arguments: a dtype with an unbalanced bracket, a number too large for a
# float, an unknown device, endless nesting.
_BAD_VALUE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, SyntaxError, RuntimeError)
_TAGGED_ITEMS: dict[type, str] = {tuple: "$tuple", set: "$set", torch.Size: "$size"}
_TAGGED_PAIRS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}  # MultiStepLR counts


def has_state(value: object) -> bool:
    """Whether `value` is a module, an optimizer, a scheduler, a data loader or the like: it has its own
    `state_dict`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state taken apart: tensors by name, each stored once, and the JSON tree. `blocks` has the sharded ones."""

    tensors: dict[str, torch.Tensor]
    tree: str  # JSON
    blocks: dict[str, Block]


def flatten(state: Mapping[str, object]) -> FlatState:
    """Take `state` apart, without copying tensors. Raises UnsupportedState, naming the leaf's path."""
    walk = TreeWalk()
    tree = walk.entries(state)
    return FlatState(walk.tensors, encode(tree), walk.blocks)


def encode(tree: Json) -> str:
    """Encode a tree; `msgspec.Raw` in it is JSON already."""
    try:
        return msgspec.json.encode(tree).decode()
    except ValueError:  # half a surrogate pair: rare, and ten times slower
        return json.dumps(tree, separators=(",", ":"), allow_nan=False, default=_parse_raw)


def _parse_raw(node: object) -> Json:
    if not isinstance(node, msgspec.Raw):
        raise TypeError(f"{type(node).__name__} is not JSON")
    return cast("Json", json.loads(bytes(node)))


Leaf: TypeAlias = "Callable[[str, Any], Any]"  # (tag, content) of a value with bytes in the shard -> the value


def parse(tree: str) -> dict[str, Json]:
    """The entries of a tree that `flatten` made, to be passed to `build` one by one. Raises CorruptShard."""
    try:
        entries = json.loads(tree)
    except (ValueError, RecursionError) as error:
        raise _does_not_parse(error) from error
    if not isinstance(entries, dict):
        raise _does_not_parse("it is not an object")
    return entries


def build(node: Json, leaf: Leaf) -> Any:  # noqa: ANN401 - any state
    """Rebuild an entry of the state, with containers and leaves of the same types. `leaf(tag, content)` makes the
    values that have bytes in the shard; `from_tensor` does it for all tags but `$dtensor`. Raises CorruptShard for a
    node that `flatten` never makes."""
    try:
        return _build(node, leaf)
    except _BAD_VALUE as error:
        raise _does_not_parse(repr(error)) from error


def from_tensor(tag: str, tensor: torch.Tensor) -> Any:  # noqa: ANN401 - a tensor or an array
    """The value for a tag whose content is the name of `tensor`. Raises KeyError for other tags."""
    return _FROM_TENSOR[tag](tensor)


def _does_not_parse(why: object) -> CorruptShard:
    return CorruptShard(f"The description of the saved state does not parse: {why}.")


@dataclass(slots=True)
class TreeWalk:
    """Describes values in JSON, and collects their tensors."""

    states: dict[int, tuple[object, object]] = field(default_factory=dict)  # by id: an object, and its state_dict
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    blocks: dict[str, Block] = field(default_factory=dict)
    _names: dict[int, list[tuple[torch.Tensor, str]]] = field(default_factory=dict)  # by address

    def entries(self, state: Mapping[str, object]) -> dict[str, Json]:
        """Make the tree of a whole state."""
        for key in state:
            if type(key) is not str:
                raise UnsupportedState(
                    f"The state has the key {key!r}, which is not a string.",
                    hint="give each entry a name; dicts further down may have any keys",
                )
        return {key: self.value(value, key, 0) for key, value in state.items()}

    def state_of(self, value: object) -> object:
        """An object's `state_dict`, asked for once."""
        if id(value) not in self.states:
            self.states[id(value)] = value, cast(Any, value).state_dict()  # held, so that no other gets its id
        return self.states[id(value)][1]

    def value(self, value: object, path: str, depth: int) -> Json:
        if depth > _MAX_DEPTH:
            raise _unsupported(path, f"is nested more than {_MAX_DEPTH} levels deep")
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return self._integer(cast(int, value), path) if kind is int else cast(Json, value)
        if kind is list or kind in _TAGGED_ITEMS:
            items = self._items(cast("list[object]", value), path, depth)
            return items if kind is list else {_TAGGED_ITEMS[kind]: items}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, Mapping):
            return self._mapping(value, path, depth)
        if has_state(value):
            return self.value(self.state_of(value), path, depth + 1)
        return self._leaf(value, path)

    @staticmethod
    def _integer(value: int, path: str) -> Json:
        if _MIN_INT64 <= value <= _MAX_UINT64:
            return value
        if value.bit_length() > _MAX_INT_BITS:
            raise _unsupported(path, f"is an integer of more than {_MAX_INT_BITS} bits")
        return msgspec.Raw(str(value).encode())  # part of a random generator's state, for example

    def _items(self, items: Collection[object], path: str, depth: int) -> list[Json]:
        if set(map(type, items)) == {int}:  # an optimizer's parameter numbers, for example
            return [self._integer(number, path) for number in cast("Collection[int]", items)]
        return [self.value(item, f"{path}.{index}", depth + 1) for index, item in enumerate(items)]

    def _mapping(self, mapping: Mapping[object, object], path: str, depth: int) -> Json:
        if type(mapping) not in _TAGGED_PAIRS:
            raise _unsupported(path, f"is a {type(mapping).__name__}")
        if type(mapping) is dict and all(type(key) is str and not key.startswith("$") for key in mapping):
            return {cast(str, key): self.value(item, f"{path}.{key}", depth + 1) for key, item in mapping.items()}
        pairs: list[Json] = [
            [self.value(key, f"{path} (a key)", depth + 1), self.value(item, f"{path}.{key}", depth + 1)]
            for key, item in mapping.items()
        ]
        return {_TAGGED_PAIRS[type(mapping)]: pairs}

    def _tensor(self, tensor: torch.Tensor, path: str) -> Json:
        if type(tensor) not in PLAIN_TENSORS:
            if sharded_tensors.is_sharded(tensor):
                return self._sharded(tensor, path)
            raise _unsupported(path, f"is a {type(tensor).__name__}, and only plain and sharded tensors can be saved")
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
            raise _unsupported(path, "is a sparse, quantized, nested or meta tensor")
        if tensor.requires_grad:
            tensor = tensor.detach()
        if tensor.is_complex():
            return {"$complex_tensor": self._name(real_view(tensor), path)}
        return {"$tensor": self._name(tensor, path)}

    def _sharded(self, tensor: Any, path: str) -> Json:  # noqa: ANN401 - a DTensor, whose module may not be there
        try:
            layout = sharded_tensors.layout_of(tensor)
        except NotSaveable as reason:
            raise UnsupportedState(
                f"The state at {path!r} {reason}.", hint="redistribute it, or save the tensor it was made from"
            ) from None
        local = self._tensor(sharded_tensors.local_block(tensor), path)
        ((kind, name),) = cast("dict[str, str]", local).items()
        parts = (2,) if kind == "$complex_tensor" else ()  # real and imaginary
        block = layout.block
        self.blocks[name] = Block((*block.global_shape, *parts), (*block.offsets, *(0 for _ in parts)))
        return {"$dtensor": {"local": local, **layout.node}}

    def _name(self, tensor: torch.Tensor, path: str) -> str:
        """Name a tensor. Tensors that view the same memory in the same way are stored once."""
        address = tensor.data_ptr()  # 0 for an empty one; unique among the devices of a machine
        here = self._names.get(address) if address else None
        if here is not None:
            for other, name in here:
                if _same_view(tensor, other):
                    return name
        name = path if path.isascii() else path.encode(errors="backslashreplace").decode()  # half a surrogate pair
        while name in self.tensors or name == METADATA_KEY:  # {"a.b": x, "a": {"b": y}}
            name += "'"
        self.tensors[name] = tensor
        if here is not None:
            here.append((tensor, name))
        elif address:
            self._names[address] = [(tensor, name)]
        return name

    def _leaf(self, value: object, path: str) -> Json:
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if type(value) is complex:
            return {"$complex": [self._leaf(value.real, path), self._leaf(value.imag, path)]}
        if type(value) is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        if isinstance(value, np.ndarray | np.generic):
            return self._numpy(value, path)
        raise _unsupported(path, f"is a {type(value).__module__}.{type(value).__qualname__}")

    def _numpy(self, value: np.ndarray[Any, Any] | np.generic, path: str) -> Json:
        if isinstance(value, np.ndarray):
            try:
                return {"$array": self._name(array_as_tensor(value), path)}
            except (TypeError, ValueError):
                raise _unsupported(path, f"is a numpy array of {value.dtype}") from None
        if value.dtype.kind not in "biufc":
            raise _unsupported(path, f"is a numpy {value.dtype}")
        return {"$numpy": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}


def real_view(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor in its stored form."""
    return torch.view_as_real(tensor.detach().resolve_conj())


def array_as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A numpy array in its stored form. Raises TypeError or ValueError if torch has no such dtype."""
    in_place = array.flags.c_contiguous and array.flags.writeable  # else torch cannot view it
    return torch.from_numpy(array if in_place else np.array(array))


def _same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype is other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.is_neg() == other.is_neg()
    )


def _unsupported(path: str, what: str) -> UnsupportedState:
    return UnsupportedState(
        f"The state at {path!r} {what}, which cannot be saved without pickling.",
        hint="leave it out, or save it as tensors, numbers, strings, lists, tuples and dicts",
    )


def _build(node: Any, leaf: Leaf) -> Any:  # noqa: ANN401 - any state
    if not isinstance(node, dict):
        return [_build(item, leaf) for item in node] if isinstance(node, list) else node
    tag = next(iter(node), "")
    if not tag.startswith("$"):
        return {key: _build(item, leaf) for key, item in node.items()}
    content = node[tag]
    if tag in _FROM_TENSOR or tag == "$dtensor":
        return leaf(tag, content)
    if tag in _FROM_ITEMS:
        return _FROM_ITEMS[tag](_build(content, leaf))
    return _FROM_JSON[tag](content)


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is not a dtype")
    return dtype


_FROM_TENSOR: dict[str, Callable[[torch.Tensor], Any]] = {
    "$tensor": lambda tensor: tensor,
    "$complex_tensor": torch.view_as_complex,
    "$array": lambda tensor: tensor.numpy(),
}
_FROM_ITEMS: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$set": set,
    "$size": torch.Size,
    "$dict": dict,  # of [key, value] lists
    "$ordered": OrderedDict,
    "$counter": lambda pairs: Counter(dict(pairs)),
    "$complex": lambda parts: complex(*parts),
}
_FROM_JSON: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$dtype": _torch_dtype,
    "$device": torch.device,
    "$numpy": lambda pair: np.frombuffer(base64.b64decode(pair[1], validate=True), dtype=np.dtype(pair[0]))[0],
}
