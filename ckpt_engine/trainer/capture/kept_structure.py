"""Take a state apart faster, if it has the structure of the previous one.

Between two saves hardly anything changes but numbers. `KeptStructure` walks a state and checks that its containers have
the same types and keys as before, that the versions of its modules are the same, that its tensors have the same shapes,
dtypes, devices, strides and placements, and that they share memory in the same way. Then names and JSON of everything
with tensors are reused, and only the rest is encoded again. If anything differs, `state_tree.flatten` does the work.
Addresses are never kept: every save reads them.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol, cast

import msgspec
import numpy as np
import torch

from ckpt_engine.trainer.state import exact_tensors, sharded_tensors
from ckpt_engine.trainer.state.state_tree import (
    PLAIN_TENSORS,
    FlatState,
    Json,
    TreeWalk,
    array_as_tensor,
    encode,
    has_state,
    is_named_tuple,
    real_view,
)

_EXACT_KEYS = frozenset((str, int, bool, type(None)))  # equal keys of the same type have the same JSON
_meta = attrgetter("shape", "dtype", "device", "layout")


class _Different(Exception):
    """The state does not have the kept structure, or has one that cannot be kept."""


class _Node(Protocol):
    """One value of the state. `describe` returns its JSON and adds its tensors to `found`; raises _Different."""

    def describe(self, value: Any, walk: TreeWalk, found: list[torch.Tensor]) -> Json: ...  # noqa: ANN401 - any state


@dataclass(frozen=True, slots=True)
class _Untracked:
    """A value without tensors: any value, as long as it has none."""

    path: str
    depth: int

    def describe(self, value: object, walk: TreeWalk, _found: list[torch.Tensor]) -> Json:
        return walk.value(value, self.path, self.depth)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor, or a value that is stored as one."""

    tensor_of: Callable[[Any], torch.Tensor]
    json: Json

    def describe(self, value: object, _walk: TreeWalk, found: list[torch.Tensor]) -> Json:
        found.append(self.tensor_of(value))
        return self.json


@dataclass(frozen=True, slots=True)
class _PlainTensors:
    """A dict of plain tensors only. Their types are checked later, together with their shapes."""

    kind: type[Any]
    keys: list[object]
    key_types: list[type]
    json: Json
    more: object

    def describe(self, value: Mapping[object, torch.Tensor], _walk: TreeWalk, found: list[torch.Tensor]) -> Json:
        if type(value) is not self.kind or list(value) != self.keys or list(map(type, value)) != self.key_types:
            raise _Different
        if _more(value) != self.more:
            raise _Different
        found += value.values()
        return self.json


@dataclass(frozen=True, slots=True)
class _Container:
    """A container with tensors somewhere inside. `json` is None if it also has anything else."""

    kind: type[Any]
    keys: list[object] | None  # None: a list or a tuple
    key_types: list[type]
    children: list[_Node]
    tag: str
    key_json: list[Json]
    json: Json
    more: object
    more_json: dict[str, Json]

    def describe(self, value: Any, walk: TreeWalk, found: list[torch.Tensor]) -> Json:  # noqa: ANN401 - any state
        if type(value) is not self.kind or len(value) != len(self.children) or _more(value) != self.more:
            raise _Different
        items = value
        if self.keys is not None:
            if list(value) != self.keys or list(map(type, value)) != self.key_types:
                raise _Different
            items = value.values()
        nodes = [child.describe(item, walk, found) for child, item in zip(self.children, items, strict=True)]
        if self.json is not None:
            return self.json
        if self.keys is None:
            return {self.tag: nodes, **self.more_json} if self.tag else nodes
        if not self.tag:
            return dict(zip(cast("list[str]", self.keys), nodes, strict=True))
        return {self.tag: [[key, item] for key, item in zip(self.key_json, nodes, strict=True)], **self.more_json}


def _more(value: Any) -> object:  # noqa: ANN401 - any container
    """What a container has beside its items, for comparison."""
    if type(value) is OrderedDict:
        return getattr(value, "_metadata", None)
    return value.default_factory if type(value) is defaultdict else None


def _kept_more(value: object) -> object:
    """As `_more`, and nobody changes it."""
    more = _more(value)
    if not isinstance(more, Mapping):
        return more
    if not all(isinstance(local, Mapping) for local in more.values()):
        raise _Different
    return {key: dict(local) for key, local in more.items()}


@dataclass(frozen=True, slots=True)
class _Object:
    """A module, an optimizer or the like: its `state_dict`."""

    kind: type[Any]
    state: _Node

    def describe(self, value: object, walk: TreeWalk, found: list[torch.Tensor]) -> Json:
        if type(value) is not self.kind or not has_state(value):
            raise _Different
        return self.state.describe(walk.state_of(value), walk, found)


def _plain(value: object) -> torch.Tensor:
    return cast(torch.Tensor, value)  # `_properties` checks that it is one


def _as_real(value: object) -> torch.Tensor:
    if type(value) not in PLAIN_TENSORS or not cast(torch.Tensor, value).is_complex():
        raise _Different
    return real_view(cast(torch.Tensor, value))


def _as_tensor(value: object) -> torch.Tensor:
    if not isinstance(value, np.ndarray):
        raise _Different
    try:
        return array_as_tensor(value)
    except (TypeError, ValueError):
        raise _Different from None


@dataclass(frozen=True, slots=True)
class _Local:
    """A sharded tensor's block, if it is still sharded in the same way."""

    layout: sharded_tensors.ShardLayout

    def __call__(self, value: Any) -> torch.Tensor:  # noqa: ANN401 - a DTensor, whose module may not be there
        try:
            if sharded_tensors.is_sharded(value) and sharded_tensors.layout_of(value) == self.layout:
                return sharded_tensors.local_block(value)
        except sharded_tensors.NotSaveable:
            pass
        raise _Different


class _Keeper:
    """Makes the nodes for a state that was just taken apart, from the state and its JSON."""

    def __init__(self, walk: TreeWalk) -> None:
        self._walk = walk
        self.names: list[str] = []  # of the tensors, in the order in which the nodes find them

    def root(self, state: Mapping[str, object], tree: dict[str, Json]) -> _Container:
        children = [self._node(value, tree[key], key, 0) for key, value in state.items()]
        keys: list[object] = list(state)
        key_types = list(map(type, state))
        return _Container(type(state), keys, key_types, children, "", [], None, _kept_more(state), {})

    def _node(self, value: Any, tree: Any, path: str, depth: int) -> _Node:  # noqa: ANN401 - any state
        known = len(self.names)
        if isinstance(value, torch.Tensor):
            return self._stored(value, tree)
        node: _Node | None = None
        if isinstance(value, Mapping):
            node = self._mapping(value, tree, path, depth)
        elif type(value) in (list, tuple) or is_named_tuple(value):
            node = self._sequence(value, tree, path, depth)
        elif has_state(value):
            node = _Object(type(value), self._node(self._walk.state_of(value), tree, path, depth + 1))
        elif isinstance(value, np.ndarray):
            self.names.append(tree["$array"])
            node = _Stored(_as_tensor, _raw(tree))
        return node if node is not None and len(self.names) > known else _Untracked(path, depth)

    def _stored(self, value: Any, tree: dict[str, Any]) -> _Stored:  # noqa: ANN401 - a DTensor, perhaps
        ((tag, content),) = tree.items()
        if self._walk.exact:
            tag, content = exact_tensors.source_of(tag, content)
            if tag != "$tensor" or content not in self._walk.tensors or "$view" in str(tree):
                raise _Different  # seldom: complex, or a view of another one's memory
        if tag == "$dtensor":
            ((kind, name),) = content["local"].items()
            if kind != "$tensor":  # sharded and complex: seldom
                raise _Different
            self.names.append(name)
            return _Stored(_Local(sharded_tensors.layout_of(value)), _raw(tree))
        self.names.append(content)
        return _Stored(_plain if tag == "$tensor" else _as_real, _raw(tree))

    def _mapping(self, value: Mapping[object, object], tree: dict[str, Any], path: str, depth: int) -> _Node:
        tag, pairs = next(iter(tree), ""), list(tree.items())
        more = {key: tree[key] for key, _ in pairs[1:]} if tag.startswith("$") else {}
        if tag.startswith("$"):
            pairs = tree[tag]
        else:
            tag = ""
        known = len(self.names)
        children = [
            self._node(item, content, f"{path}.{key}", depth + 1)
            for (key, item), (_, content) in zip(value.items(), pairs, strict=True)
        ]
        if len(self.names) > known and not _EXACT_KEYS.issuperset(map(type, value)):
            raise _Different
        keys, key_types = list(value), list(map(type, value))
        if all(isinstance(child, _Stored) and child.tensor_of is _plain for child in children):
            return _PlainTensors(type(value), keys, key_types, _raw(tree), _kept_more(value))
        constant = _raw(tree) if _are_constant(children) else None
        key_json: list[Json] = [key for key, _ in pairs]
        return _Container(type(value), keys, key_types, children, tag, key_json, constant, _kept_more(value), more)

    def _sequence(self, value: Collection[object], tree: Any, path: str, depth: int) -> _Node:  # noqa: ANN401
        (tag, items), *more = tree.items() if isinstance(tree, dict) else (("", tree),)
        children = [
            self._node(item, content, f"{path}.{index}", depth + 1)
            for index, (item, content) in enumerate(zip(value, items, strict=True))
        ]
        constant = _raw(tree) if _are_constant(children) else None
        return _Container(type(value), None, [], children, tag, [], constant, None, dict(more))


def _raw(tree: Json) -> msgspec.Raw:
    return msgspec.Raw(encode(tree).encode())


def _are_constant(nodes: Sequence[_Node]) -> bool:
    return all(getattr(node, "json", None) is not None for node in nodes)


class KeptStructure:
    """The structure of one state. The same object means the same structure."""

    def __init__(self, state: Mapping[str, object], tree: dict[str, Json], walk: TreeWalk) -> None:
        """`walk` has just made `tree` of `state`. Raises _Different if the structure cannot be kept."""
        keeper = _Keeper(walk)
        self._root = keeper.root(state, tree)
        self._names = keeper.names
        self._blocks = walk.blocks
        if list(dict.fromkeys(self._names)) != list(walk.tensors):  # a tensor in a set, or in a key
            raise _Different
        found: list[torch.Tensor] = []
        self._root.describe(state, TreeWalk(walk.states, exact=walk.exact), found)
        self._exact = walk.exact
        self._properties = _properties(found, exact=self._exact)
        self._addresses = _addresses(found)
        self._sharing = _sharing(self._addresses)

    def take_apart(self, state: Mapping[str, object], walk: TreeWalk) -> FlatState:
        """As `state_tree.flatten`, with an unused walk. Raises _Different if the state has another structure."""
        found: list[torch.Tensor] = []
        tree = cast("dict[str, Json]", self._root.describe(state, walk, found))
        if walk.tensors or _properties(found, exact=self._exact) != self._properties:
            raise _Different
        addresses = _addresses(found)
        if addresses != self._addresses and _sharing(addresses) != self._sharing:
            raise _Different
        if addresses.count(0) != self._addresses.count(0):  # one's memory was freed, which is refused
            raise _Different
        tensors = dict(zip(self._names, found, strict=True))  # of aliases, any one
        if self._exact and addresses != self._addresses and exact_tensors.overlap(exact_tensors.spans(tensors)):
            raise _Different
        return FlatState(tensors, encode(tree), self._blocks)


def _properties(tensors: list[torch.Tensor], *, exact: bool) -> tuple[list[object], ...]:
    """Everything that decides how tensors are stored, copied and described, except for their addresses."""
    if not PLAIN_TENSORS.issuperset(map(type, tensors)):
        raise _Different
    views: tuple[Callable[[torch.Tensor], object], ...] = (
        *(_meta, torch.Tensor.stride, torch.Tensor.is_neg, torch.Tensor.is_inference),
        *((type, attrgetter("requires_grad")) if exact else ()),
    )
    try:
        return tuple(list(map(view, tensors)) for view in views)
    except RuntimeError:  # a nested tensor has no shape, a sparse one no strides
        raise _Different from None


def _addresses(tensors: list[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))


def _sharing(addresses: list[int]) -> list[int]:
    """For each tensor, the index of the first one at the same address."""
    first: dict[int, int] = {}
    return [first.setdefault(address, index) for index, address in enumerate(addresses)]


def take_apart(
    state: Mapping[str, object], kept: KeptStructure | None, *, exact: bool = False
) -> tuple[FlatState, KeptStructure | None]:
    """As `state_tree.flatten`, but faster if `state` still has the structure `kept`. Asks objects for their state once.
    `exact`: for a file, see `exact_tensors`.

    Returns the state's structure too: the same object as `kept` if it is unchanged, None if it cannot be kept.
    """
    walk = TreeWalk(exact=exact)
    if kept is not None:
        try:
            return kept.take_apart(state, walk), kept
        except _Different:
            walk = TreeWalk(walk.states, exact=exact)
    tree = walk.entries(state)
    flat = FlatState(walk.tensors, encode(tree), walk.blocks)
    try:
        return flat, KeptStructure(state, tree, walk)
    except _Different:
        return flat, None
