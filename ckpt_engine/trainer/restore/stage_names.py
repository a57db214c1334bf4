"""Descriptions of a state whose ranks have different names in it: pipeline stages, of which each has its own layers.

A description is the tree of `state_tree`. The dicts in it have names; everything else is taken from one rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ckpt_engine.trainer.restore.restore_targets import mismatch
from flyball.contracts.errors import UnsupportedState

Node = Any  # JSON
_PAIRS = ("$ordered", "$dict")
_GROUPS = "param_groups"
_FLATTEN = (
    "save the optimizer's state by name: get_optimizer_state_dict of torch.distributed.checkpoint.state_dict, with "
    "flatten_optimizer_state_dict=True"
)


def names_differ(names: Sequence[Collection[str]]) -> bool:
    """Whether ranks have different tensors, by rank. A rank that lacks some that another wrote for all counts as
    different: then there is just more to compare."""
    first = set(names[0])
    return any(first != set(others) for others in names[1:])


def is_stage_of(node: Node, target: object) -> bool:
    """Whether a rank's description has the names that `target` needs, and for modules no others."""
    wanted, names = _wanted(target), _names(node)
    if wanted is None or names is None:  # names are not what differs
        return True
    if wanted.keys() - names.keys():
        return False
    if isinstance(target, torch.nn.Module) and names.keys() - wanted.keys():
        return False
    return all(is_stage_of(names[key], item) for key, item in wanted.items())


def fitted(nodes: Sequence[Node], target: object, path: str) -> Node:
    """The description of what `target` needs, from those of several ranks, the preferred one first. Names that not all
    ranks have are left out if `target` lacks them. Raises StateMismatch for an optimizer whose parameters each stage
    has numbered for itself."""
    if isinstance(target, torch.optim.Optimizer) or path.endswith(f".{_GROUPS}"):
        raise mismatch(
            path, "is of stages that are put together in another way, and numbers their parameters", _FLATTEN
        )
    wanted, of_ranks = _wanted(target), [names for node in nodes if (names := _names(node)) is not None]
    if wanted is None or len(of_ranks) < len(nodes):
        return nodes[0]
    found = {}
    for key in _all_names(of_ranks):
        having = [names[key] for names in of_ranks if key in names]
        if key in wanted:
            found[key] = fitted(having, wanted[key], f"{path}.{key}")
        elif len(having) == len(of_ranks):
            found[key] = having[0]
    return _with_names(nodes, found)


def united(nodes: Sequence[Node], path: str) -> Node:
    """The description of what any rank has. What several have is that of the first. Raises UnsupportedState for
    parameter groups, which each stage has for itself."""
    of_ranks = [named for node in nodes if (named := _names(node)) is not None]
    if len(of_ranks) < len(nodes):
        return nodes[0]
    keys = _all_names(of_ranks)
    if _GROUPS in keys:
        raise UnsupportedState(
            f"The optimizer at {path!r} is that of pipeline stages, and each numbers its parameters for itself.",
            hint=f"{_FLATTEN}; `flyball ckpt restore` writes the shards as they are",
        )
    found = {key: united([rank[key] for rank in of_ranks if key in rank], f"{path}.{key}") for key in keys}
    return _with_names(nodes, found)


def _wanted(target: object) -> Mapping[Any, object] | None:
    if isinstance(target, torch.nn.Module):
        found: Mapping[Any, object] = target.state_dict()
        return found
    return target if isinstance(target, Mapping) else None


def _all_names(of_ranks: Sequence[Mapping[str, Node]]) -> list[str]:
    return list(dict.fromkeys(key for names in of_ranks for key in names))


def _names(node: Node) -> dict[str, Node] | None:
    """What a dict in the description has; None for anything else, and for keys that are no strings."""
    if not isinstance(node, dict):
        return None
    tag = next(iter(node), "")
    if not tag.startswith("$"):
        return node
    if tag not in _PAIRS:
        return None
    pairs = dict(pair for pair in node[tag] if isinstance(pair[0], str))
    return pairs if len(pairs) == len(node[tag]) else None


def _with_names(nodes: Sequence[Node], names: Mapping[str, Node]) -> Node:
    """A dict of the kind of the first one, with the module versions of all of them."""
    tag = next(iter(nodes[0]), "")
    if tag not in _PAIRS:
        return dict(names)
    more = {key: value for key, value in nodes[0].items() if key != tag}
    if isinstance(more.get("$metadata"), Mapping):
        more["$metadata"] = {
            name: local for node in reversed(nodes) for name, local in node.get("$metadata", {}).items()
        }
    return {tag: [[key, item] for key, item in names.items()], **more}
