"""Describes a DCP state dict in the words of Flyball's shards (see `state_tree`), so that `load_step` reads it as well.

DCP flattens the state into entries, and knows the path of each. What DCP would pickle is in the description if it can
be said without pickling (numbers, strings, lists); else it is left out, and only DCP reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ckpt_engine.dcp.file_layout import tensor_name
from ckpt_engine.dcp.module_versions import ModuleVersions
from ckpt_engine.trainer.capture.capture_plan import DTYPE_NAMES
from ckpt_engine.trainer.state import sharded_tensors, state_tree
from ckpt_engine.trainer.state.state_tree import Json, TreeWalk
from flyball.contracts.errors import UnsupportedState

_Node = dict[Any, Any]  # of a path's parts: a further _Node, or (node,)
_VERSIONS = object()  # the key of what a state dict says about its modules


def outline(
    entries: Mapping[str, object],
    paths: Mapping[str, tuple[str | int, ...]],
    versions: Iterable[ModuleVersions] = (),
) -> str:
    """The tree of flattened `entries`, as JSON. An entry without a path lies at the top. `versions`: of the modules
    whose state dicts are among them."""
    root: _Node = {}
    for fqn, value in entries.items():
        node = _leaf(fqn, value)
        if node is None:
            continue
        *above, last = paths.get(fqn, (fqn,))
        folder = root
        for part in above:
            folder = folder.setdefault(part, {})
            if type(folder) is not dict:  # "a" and "a.b" are both entries of a planner that flattens in another way
                break
        else:
            folder[last] = (node[0],)
    for one in versions:
        _note_versions(root, one)
    children = ((key, _joined(child)) for key, child in root.items() if type(key) is str)
    return state_tree.encode({key: node[0] for key, node in children if node is not None})


def _note_versions(root: _Node, versions: ModuleVersions) -> None:
    node: Any = root
    for part in versions.place:
        node = node.get(part) if type(node) is dict else None
    if type(node) is dict and versions.place:
        node[_VERSIONS] = versions.metadata


def _leaf(fqn: str, value: object) -> tuple[Json] | None:
    """The node of an entry; None if it cannot be described."""
    walk = TreeWalk()
    if isinstance(value, torch.Tensor):
        name = tensor_name(fqn)
        if value.dtype in DTYPE_NAMES:
            local: Json = {"$tensor": name}
        elif value.dtype.is_complex:
            local = {"$complex_tensor": name}
        else:
            return None
        if not sharded_tensors.is_sharded(value):
            return (local,) if type(value) in state_tree.PLAIN_TENSORS else None
        try:
            layout = sharded_tensors.layout_of(value)  # type: ignore[arg-type]
        except sharded_tensors.NotSaveable:
            return None
        return ({"$dtensor": {"local": local, **layout.node}},)
    try:
        node = walk.value(value, fqn, 0)
    except UnsupportedState:
        return None
    return None if walk.tensors else (node,)


def _joined(node: Any) -> tuple[Json] | None:  # noqa: ANN401 - a _Node or a leaf
    if type(node) is tuple:
        return node
    if _VERSIONS in node:
        metadata = node.pop(_VERSIONS)
        pairs: list[Json] = [[key, joined[0]] for key, child in node.items() if (joined := _joined(child)) is not None]
        return ({"$ordered": pairs, "$metadata": metadata},)
    children = {key: joined[0] for key, child in node.items() if (joined := _joined(child)) is not None}
    if all(type(key) is int for key in children):
        if len(children) < len(node) or children.keys() != set(range(len(node))):
            return None  # a list with a gap, since an entry of it cannot be described
        return ([children[index] for index in range(len(node))],)
    if any(type(key) is not str or key.startswith("$") for key in children):
        return ({"$dict": [[key, child] for key, child in children.items()]},)
    return (children,)
