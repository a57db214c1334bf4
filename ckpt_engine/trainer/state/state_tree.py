"""Take a training state apart into tensors and a JSON tree of everything else, and put it together again.

Nothing is pickled: a leaf is saved if JSON can express it with its type, else refused by its path. In the tree, lists,
strings, numbers, booleans and None stand for themselves, an object with plain string keys is a dict, and an object with
one key that begins with `$` is something else:

    {"$tensor": name} {"$array": name} {"$complex_tensor": name}      bytes in the shard
    {"$tuple": [..]} {"$set": [..]} {"$dict": [[key, value], ..]} {"$ordered": [[key, value], ..]}
    {"$counter": [[key, value], ..]} {"$size": [..]} {"$frozenset": [..]}
    {"$deque": [..], "$maxlen": n} {"$defaultdict": [[key, value], ..], "$factory": name}
    {"$namedtuple": [..], "$fields": [name, ..]} {"$enum": [name, value]}      their classes are not saved
    {"$float": "nan"} {"$complex": [re, im]} {"$bytes": base64} {"$dtype": name} {"$device": name}
    {"$numpy": [dtype, base64]}                                       a numpy scalar
    {"$dtensor": {..}}                                                see `sharded_tensors`
    {"$path": ..} {"$datetime": ..} ..                                see `plain_values`
    {"$parameter": ..} {"$view": ..} ..                               in files only, see `exact_tensors`

A module's state dict also has `"$metadata"`: its `_metadata`, {name of a module: {"version": 2}}, integers and strings.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np
import torch
from torch.torch_version import TorchVersion

from ckpt_engine.format.shard_format import METADATA_KEY, Block
from ckpt_engine.trainer.state import exact_tensors, plain_values, sharded_tensors
from ckpt_engine.trainer.state.sharded_tensors import NotSaveable
from flyball.contracts.errors import UnsupportedState

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | msgspec.Raw | None"

PLAIN_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))
_MAX_DEPTH = 64
_MAX_INT_BITS = 14_000  # Python writes and reads decimals of up to 4300 digits
_MIN_INT64, _MAX_UINT64 = -(1 << 63), (1 << 64) - 1  # what msgspec writes as integers
_TAGGED_ITEMS: dict[type, str] = {
    **{tuple: "$tuple", set: "$set", frozenset: "$frozenset", torch.Size: "$size", deque: "$deque"},
}
_TAGGED_PAIRS: dict[type, str] = {
    **{dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"},  # MultiStepLR counts
    defaultdict: "$defaultdict",
}
_SETS = (set, frozenset)
_PLAIN_KEYS = (str, int, bool, type(None), float)
_METADATA_VALUES = (int, str, bool)


def has_state(value: object) -> bool:
    """Whether `value` is a module, an optimizer, a scheduler, a data loader or the like: it has its own
    `state_dict`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_named_tuple(value: object) -> bool:
    """Whether `value` is of a class that `collections.namedtuple` or `typing.NamedTuple` made."""
    return isinstance(value, tuple) and type(value) is not tuple and type(getattr(value, "_fields", None)) is tuple


def is_lazy(tensor: object) -> bool:
    """Whether it is a parameter or a buffer of a lazy module that has not run yet: it has no shape."""
    return isinstance(tensor, torch.Tensor) and torch.nn.parameter.is_lazy(tensor)


def metadata_of(mapping: object) -> dict[str, dict[str, Any]] | None:
    """The `_metadata` of a module's state dict, integers and strings alone; None if it has none."""
    found = getattr(mapping, "_metadata", None)
    if not isinstance(found, Mapping):
        return None
    return {
        name: {key: value for key, value in local.items() if type(key) is str and type(value) in _METADATA_VALUES}
        for name, local in found.items()
        if type(name) is str and isinstance(local, Mapping)
    }


def with_metadata(mapping: Any, of: object) -> Any:  # noqa: ANN401 - an ordered dict
    """`mapping`, with the `_metadata` of another state dict, if that has any."""
    if type(mapping) is OrderedDict and hasattr(of, "_metadata"):
        mapping._metadata = of._metadata  # type: ignore[attr-defined]
    return mapping


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


@dataclass(slots=True)
class TreeWalk:
    """Describes values in JSON, and collects their tensors. `exact`: for a file, see `exact_tensors`."""

    states: dict[int, tuple[object, object]] = field(default_factory=dict)  # by id: an object, and its state_dict
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    blocks: dict[str, Block] = field(default_factory=dict)
    exact: bool = False
    _leaves: list[dict[str, Any]] = field(default_factory=list)  # of tensors, if `exact`
    _names: dict[int, list[tuple[torch.Tensor, str]]] = field(default_factory=dict)  # by address

    def entries(self, state: Mapping[str, object]) -> dict[str, Json]:
        """Make the tree of a whole state."""
        for key in state:
            if type(key) is not str:
                raise UnsupportedState(
                    f"The state has the key {key!r}, which is not a string.",
                    hint="give each entry a name; dicts further down may have any keys",
                )
        tree = {key: self.value(value, key, 0) for key, value in state.items()}
        if self.exact:
            exact_tensors.share_memory(self.tensors, self._leaves)
        return tree

    def state_of(self, value: object) -> object:
        """An object's `state_dict`, asked for once."""
        if id(value) not in self.states:
            self.states[id(value)] = value, cast(Any, value).state_dict()  # held, so that no other gets its id
        return self.states[id(value)][1]

    def value(self, value: object, path: str, depth: int) -> Json:  # noqa: PLR0911 - one for each kind of value
        if depth > _MAX_DEPTH:
            raise _unsupported(path, f"is nested more than {_MAX_DEPTH} levels deep")
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return self._integer(cast(int, value), path) if kind is int else cast(Json, value)
        if kind is list or kind in _TAGGED_ITEMS:
            items = self._items(cast("list[object]", value), path, depth)
            if kind in _SETS:
                _check_distinct(cast("Collection[object]", value), path)
            return items if kind is list else {_TAGGED_ITEMS[kind]: items, **self._more(value, path)}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, Enum):
            return {"$enum": [value.name, self._without_tensors(value.value, f"{path} (a value)", depth)]}
        if isinstance(value, Mapping):
            return self._mapping(value, path, depth)
        if is_named_tuple(value):
            return {"$namedtuple": self._items(cast("tuple[object]", value), path, depth), **self._more(value, path)}
        if has_state(value):
            return self.value(self.state_of(value), path, depth + 1)
        return self._leaf(value, path)

    def _more(self, value: Any, path: str) -> dict[str, Json]:  # noqa: ANN401 - any container
        """What the node of a container says beside its items."""
        if type(value) is OrderedDict:
            metadata = metadata_of(value)
            return {} if metadata is None else {"$metadata": cast(Json, metadata)}
        if type(value) is deque:
            return {"$maxlen": value.maxlen}
        if type(value) is defaultdict:
            try:
                return {"$factory": plain_values.factory_name(value.default_factory)}
            except plain_values.NotPlain as reason:
                raise _unsupported(path, str(reason)) from None
        if is_named_tuple(value):
            if getattr(value, "__dict__", None):
                raise _unsupported(path, "is a named tuple with attributes beside its fields")
            return {"$fields": list(value._fields)}
        return {}

    def _without_tensors(self, value: object, path: str, depth: int) -> Json:
        """Describe a key, or the value of an Enum. Neither can be found again by what a tensor or an object has."""
        walk = TreeWalk()
        node = walk.value(value, path, depth + 1)
        if walk.tensors or walk.states:
            raise UnsupportedState(
                f"The state at {path!r} is, or has in it, a tensor or an object, and no restore could find it again.",
                hint="use names or numbers as keys, as an optimizer's state_dict() numbers its parameters",
            )
        return node

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
        _check_distinct(mapping, path)
        pairs: list[Json] = [
            [
                self.value(key, path, depth + 1)
                if type(key) in _PLAIN_KEYS
                else self._without_tensors(key, f"{path} (a key)", depth),
                self.value(item, f"{path}.{key}", depth + 1),
            ]
            for key, item in mapping.items()
        ]
        return {_TAGGED_PAIRS[type(mapping)]: pairs, **self._more(mapping, path)}

    def _tensor(self, tensor: torch.Tensor, path: str) -> Json:
        if type(tensor) not in PLAIN_TENSORS:
            if sharded_tensors.is_sharded(tensor):
                return self._sharded(tensor, path)
            if is_lazy(tensor):
                raise _unsupported(path, "belongs to a lazy module that has not run yet, so it has no values")
            raise _unsupported(path, f"is a {type(tensor).__name__}, and only plain and sharded tensors can be saved")
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
            raise _unsupported(path, "is a sparse, quantized, nested or meta tensor")
        if tensor.numel() and not _has_memory(tensor):
            raise _unsupported(path, "has no memory of its size: its storage was freed or shrunk")
        stored = tensor.detach() if tensor.requires_grad else tensor
        tag = "$tensor"
        if tensor.is_complex():
            stored, tag = real_view(tensor), "$complex_tensor"
        node: dict[str, Json] = {tag: self._name(stored, path)}
        if not self.exact:
            return node
        leaf, around = exact_tensors.described(node, stored, tensor)
        self._leaves.append(leaf)
        return cast(Json, around)

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

    def _leaf(self, value: object, path: str) -> Json:  # noqa: PLR0911 - one for each kind of value
        if type(value) is TorchVersion:  # torch.__version__
            return str(value)
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
        try:
            if (node := plain_values.encode(value)) is not None:
                return cast(Json, node)
        except plain_values.NotPlain as reason:
            raise _unsupported(path, str(reason)) from None
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


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether the storage reaches to the tensor's last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.itemsize
    return tensor.data_ptr() != 0 and end <= tensor.untyped_storage().nbytes()


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


def _check_distinct(items: Collection[object], path: str) -> None:
    """Refuse keys, or items of a set, that would be equal without their classes: Color.RED and 1."""
    try:
        if all(type(item) in _PLAIN_KEYS for item in items) or len(set(map(_without_class, items))) == len(items):
            return
    except TypeError:  # the value of an Enum that cannot be a key
        pass
    raise _unsupported(path, "has keys or items that are told apart by their classes only")


def _without_class(value: Any) -> Any:  # noqa: ANN401 - any key
    if isinstance(value, Enum):
        return _without_class(value.value)
    return tuple(map(_without_class, value)) if isinstance(value, tuple) else value


def _unsupported(path: str, what: str) -> UnsupportedState:
    return UnsupportedState(
        f"The state at {path!r} {what}, which cannot be saved without pickling.",
        hint="leave it out, or save it as tensors, numbers, strings, lists, tuples and dicts",
    )
