"""Put a training state together again, from the tree and the tensors that `state_tree` made of it.

A class that a user has written is never looked up by a saved name. Named tuples and members of Enums get the class of
the value that stands at the same place in the state that is restored into; without one they come back as plain tuples
and plain values.
"""

from __future__ import annotations

import base64
import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import torch

from ckpt_engine.trainer.state import exact_tensors, plain_values
from ckpt_engine.trainer.state.state_tree import Json, TreeWalk, has_state, is_named_tuple
from flyball.contracts.errors import CorruptShard, StateMismatch, UnsupportedState

# Raised by Python, numpy and torch for bad arguments: a dtype with an unbalanced bracket, a number too large for a
# float, an unknown device, endless nesting.
_BAD_VALUE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, SyntaxError, RuntimeError)
_OF_CLASSES = ("$enum", "$namedtuple")

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


def names_classes(tree: str) -> bool:
    """Whether any value of a tree may need a class of the state that is restored into."""
    return any(f'"{tag}"' in tree for tag in _OF_CLASSES)


def build(node: Json, leaf: Leaf, like: object = None) -> Any:  # noqa: ANN401 - any state
    """Rebuild an entry of the state, with containers and leaves of the same types. `leaf(tag, content)` makes the
    values that have bytes in the shard; `from_tensor` does it for the tags of whole tensors. `like`: the entry that is
    restored into, whose classes named tuples and members of Enums get.

    Raises CorruptShard for a node that `flatten` never makes, and StateMismatch if the class at the same place has
    other fields or members."""
    try:
        return _build(node, leaf, like)
    except _BAD_VALUE as error:
        raise _does_not_parse(repr(error)) from error


def from_tensor(tag: str, tensor: torch.Tensor) -> Any:  # noqa: ANN401 - a tensor or an array
    """The value for a tag whose content is the name of `tensor`. Raises KeyError for other tags."""
    return _FROM_TENSOR[tag](tensor)


def _does_not_parse(why: object) -> CorruptShard:
    return CorruptShard(f"The description of the saved state does not parse: {why}.")


def _build(node: Any, leaf: Leaf, like: object) -> Any:  # noqa: ANN401, PLR0911 - any state, one for each kind
    if not isinstance(node, dict):
        return _items(node, leaf, like) if isinstance(node, list) else node
    tag = next(iter(node), "")
    if not tag.startswith("$"):
        like = _opened(like, node)
        return {key: _build(item, leaf, _at(like, key)) for key, item in node.items()}
    content = node[tag]
    if tag in _FROM_TENSOR or tag == "$dtensor" or tag in exact_tensors.TAGS:
        return leaf(tag, content)
    if tag in _FROM_PAIRS:
        like = _opened(like, node)
        return _with_more(_FROM_PAIRS[tag](_pairs(content, leaf, like)), node)
    if tag in _FROM_ITEMS:
        return _FROM_ITEMS[tag](_items(content, leaf, like), node, like)
    if tag in _FROM_KEYS:
        return _FROM_KEYS[tag](_key(item, leaf, like) for item in content)
    return _FROM_JSON[tag](content)


def _items(nodes: Iterable[Any], leaf: Leaf, like: object) -> list[Any]:
    return [_build(item, leaf, _at(like, index)) for index, item in enumerate(nodes)]


def _pairs(nodes: Iterable[Any], leaf: Leaf, like: object) -> list[tuple[Any, Any]]:
    pairs = []
    for key_node, item in nodes:
        key = _key(key_node, leaf, like)
        pairs.append((key, _build(item, leaf, _at(like, key))))
    return pairs


def _with_more(made: Any, node: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a dict
    if type(made) is OrderedDict and "$metadata" in node:
        made._metadata = OrderedDict((name, dict(local)) for name, local in node["$metadata"].items())  # type: ignore[attr-defined]
    elif type(made) is defaultdict and node["$factory"] is not None:
        made.default_factory = plain_values.FACTORIES[node["$factory"]]
    return made


# --- classes of the state that is restored into ---


def _opened(like: object, node: object) -> object:
    """What a template holds: an object's own `state_dict`, which is asked for only if `node` needs a class."""
    if like is None or isinstance(like, Mapping) or not has_state(like):
        return like
    if not _needs_class(node):
        return None
    try:
        return like.state_dict()  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001 - an object without a state yet: then there are no classes to take from it
        return None


def _needs_class(node: object) -> bool:
    if isinstance(node, dict):
        return any(key in _OF_CLASSES or _needs_class(item) for key, item in node.items())
    return isinstance(node, list) and any(map(_needs_class, node))


def _at(like: object, key: Any) -> object:  # noqa: ANN401 - a key or an index
    """What stands at the same place in the template; None if nothing does."""
    if isinstance(like, Mapping):
        return like.get(key)
    if isinstance(like, list | tuple | deque) and isinstance(key, int):
        return like[key] if key < len(like) else None
    return None


def _key(node: Any, leaf: Leaf, like: object) -> Any:  # noqa: ANN401 - any key
    """A key of a dict, or an item of a set: with its class if the template has the same one."""
    if isinstance(like, Mapping | set | frozenset) and _needs_class(node):
        for own in like:
            try:
                if TreeWalk().value(own, "", 0) == node:
                    return own
            except UnsupportedState:
                continue
    return _build(node, leaf, None)


def _named_tuple(items: list[Any], node: Mapping[str, Any], like: object) -> tuple[Any, ...]:
    fields = node["$fields"]
    if not is_named_tuple(like):
        return tuple(items)
    kind: Any = type(like)
    if list(kind._fields) != fields:
        raise StateMismatch(
            f"A named tuple was saved with the fields {', '.join(fields)}, and {kind.__qualname__} has "
            f"{', '.join(kind._fields)}.",
            hint="give the class the fields that were saved, or put a plain tuple in its place before the restore",
        )
    made: tuple[Any, ...] = kind._make(items)
    return made


def _member(content: list[Any], _node: object, like: object) -> Any:  # noqa: ANN401 - any value
    name, value = content
    if not isinstance(like, Enum):
        return value
    kind = type(like)
    if name is not None and name in kind.__members__:
        return kind.__members__[name]
    try:
        return kind(value)  # a combination of flags, or a member with another name
    except ValueError:
        raise StateMismatch(
            f"{name} = {value!r} was saved, and {kind.__qualname__} has no such member.",
            hint="give the class the member that was saved, or put a plain value in its place before the restore",
        ) from None


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
_FROM_ITEMS: dict[str, Callable[[list[Any], Mapping[str, Any], object], Any]] = {  # of items, the node, the template
    "$tuple": lambda items, _node, _like: tuple(items),
    "$size": lambda items, _node, _like: torch.Size(items),
    "$complex": lambda parts, _node, _like: complex(*parts),
    "$deque": lambda items, node, _like: deque(items, node["$maxlen"]),
    "$namedtuple": _named_tuple,
    "$enum": _member,
}
_FROM_KEYS: dict[str, Callable[[Iterable[Any]], Any]] = {"$set": set, "$frozenset": frozenset}
_FROM_PAIRS: dict[str, Callable[[Any], Any]] = {
    "$dict": dict,
    "$ordered": OrderedDict,
    "$counter": lambda pairs: Counter(dict(pairs)),
    "$defaultdict": lambda pairs: defaultdict(None, pairs),
}
_FROM_JSON: dict[str, Callable[[Any], Any]] = {
    **plain_values.FROM_JSON,
    "$float": float,
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$dtype": _torch_dtype,
    "$device": torch.device,
    "$numpy": lambda pair: np.frombuffer(base64.b64decode(pair[1], validate=True), dtype=np.dtype(pair[0]))[0],
}
