"""What `flyball.save` takes: any tree of plain values, as the entries of a state; and back.

A dict with string keys is a state itself. Anything else gets an entry `$root`, which says how to put it together again:
"value", or, for an ordered dict, an empty one that has its `_metadata`, if it is a module's state dict.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from ckpt_engine.trainer.state import sharded_tensors
from ckpt_engine.trainer.state.state_tree import has_state, with_metadata
from flyball.contracts.errors import CorruptShard, UnsupportedState

_ROOT = "$root"
_ORDERED, _VALUE = "ordered", "value"  # "ordered": of format 1
_MAX_DEPTH = 64


def enclose(obj: object) -> dict[str, object]:
    """`obj` as the entries of a state. Raises UnsupportedState, naming the path, for a value that would not come back
    as it was. (What is no plain value at all is found out when the state is taken apart.)"""
    if type(obj) in (dict, OrderedDict) and all(type(key) is str and key[:1] != "$" for key in obj):  # type: ignore[attr-defined]
        entries: dict[str, object] = dict(obj)  # type: ignore[call-overload]
        if type(obj) is OrderedDict:
            entries[_ROOT] = with_metadata(OrderedDict(), obj)
    else:
        entries = {_VALUE: obj, _ROOT: _VALUE}
    for key, value in entries.items():
        _check(value, key, 0)
    return entries


def disclose(entries: Mapping[str, Any]) -> Any:  # noqa: ANN401 - what was saved
    """What was enclosed. Raises CorruptShard."""
    root = entries.get(_ROOT)
    if root is None:
        return dict(entries)
    if root == _VALUE and _VALUE in entries:
        return entries[_VALUE]
    if root == _ORDERED or isinstance(root, OrderedDict):
        ordered = OrderedDict((key, value) for key, value in entries.items() if key != _ROOT)
        return with_metadata(ordered, root)
    raise CorruptShard(f"The saved object has the unknown root {root!r}.", hint="load it with a newer release")


def _check(value: object, path: str, depth: int) -> None:
    if isinstance(value, torch.Tensor):
        if sharded_tensors.is_sharded(value):
            raise UnsupportedState(
                f"The tensor at {path!r} is sharded (a DTensor), and a file holds whole tensors.",
                hint="save its full_tensor(), or save the whole job's state with job.save",
            )
    elif isinstance(value, Mapping):
        if depth < _MAX_DEPTH:
            for key, item in value.items():
                _check(item, f"{path}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        if depth < _MAX_DEPTH:
            for index, item in enumerate(value):
                _check(item, f"{path}.{index}", depth + 1)
    elif has_state(value):
        raise UnsupportedState(
            f"The state at {path!r} is a {type(value).__qualname__}, which would come back as its state_dict.",
            hint="save its state_dict(), and load that with load_state_dict",
        )
