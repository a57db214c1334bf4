"""Whether an optimizer's groups were saved by another kind of optimizer. torch would take them, and fail at the next
step with a KeyError that names nothing, or go on as something else."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

_OF_EACH_GROUP = frozenset({"params", "param_names"})
# Releases of torch have added these to optimizers, which add them to what earlier ones saved.
_ADDED = frozenset({"foreach", "fused", "capturable", "differentiable", "maximize", "decoupled_weight_decay"})
_OTHER_RULE = ("amsgrad", "centered", "nesterov", "decoupled_weight_decay", "maximize")  # if only their value differs


def other_options(target: torch.optim.Optimizer, saved_groups: Sequence[Mapping[str, Any]]) -> str:
    """What differs, for a message; '' if `target` takes the options of these groups."""
    is_own = type(target).load_state_dict is not torch.optim.Optimizer.load_state_dict
    if is_own or target._optimizer_load_state_dict_pre_hooks:
        return ""  # its own code decides
    filled_in = _as_loaded(target, saved_groups)
    for group, saved, loaded in zip(target.param_groups, saved_groups, filled_in, strict=True):
        others = (saved.keys() ^ group.keys()) & _options_of_torch() - _ADDED
        if others or group.keys() - loaded.keys() - _OF_EACH_GROUP:
            has, had = (sorted(one.keys() - _OF_EACH_GROUP) for one in (group, saved))
            return f"has groups with the options {', '.join(has)}, and was saved with {', '.join(had)}"
        for name in _OTHER_RULE:
            if name in target.defaults and name in loaded and bool(group[name]) != bool(loaded[name]):
                return f"has {name}={group[name]}, and was saved with {name}={loaded[name]}"
    return ""


def _as_loaded(target: torch.optim.Optimizer, saved_groups: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The groups as `load_state_dict` would make them."""
    groups = [{**group, "params": []} for group in saved_groups]
    probe = object.__new__(type(target))
    try:
        probe.__setstate__({"defaults": dict(target.defaults), "state": {}, "param_groups": groups})
    except Exception:  # noqa: BLE001 - an optimizer of somebody else's that needs more: it may fill in anything
        return [{**own, **group} for own, group in zip(target.param_groups, groups, strict=True)]
    return groups


@cache
def _options_of_torch() -> frozenset[str]:
    """Of any of torch's optimizers. Schedulers and users put others into the groups."""
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    return frozenset(
        name
        for kind in kinds
        if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
        for name in inspect.signature(kind).parameters
    )
