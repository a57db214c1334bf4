"""Load a shard into a training state, in the trainer. What is loaded never aliases the slot it came from."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from ckpt_engine import integrity
from ckpt_engine.capture import tensors_of
from ckpt_engine.manifest import Manifest
from ckpt_engine.sharded_tensors import Meshes, same_layout
from ckpt_engine.state_tree import has_state, unflatten
from flyball.contracts.errors import StateMismatch


def read_state(payload: memoryview, manifest: Manifest, target: object = None) -> dict[str, Any]:
    """The saved state, in memory of its own. Every chunk is verified: CorruptShard otherwise. Sharded tensors are made
    on the meshes of the tensors in `target`."""
    integrity.verify(payload, manifest.chunk_digests, manifest.chunk_bytes)
    tree, views = tensors_of(payload)
    copies: dict[str, torch.Tensor] = {}

    def copy_of(name: str) -> torch.Tensor:
        if name not in copies:
            copies[name] = views[name].clone()
        return copies[name]

    return unflatten(tree, copy_of, Meshes(target).rebuild)


def load_into(state: MutableMapping[str, object], saved: Mapping[str, Any]) -> None:
    """Give every entry of `state` what was saved under its name.

    Objects with load_state_dict get it; tensors and containers are filled in place; anything else is replaced in
    `state`. Entries that were saved and are not in `state` are left alone. Raises StateMismatch, which names the path,
    if something is missing or has another shape; then `state` may be loaded in part, and must not be used.
    """
    for key in state:
        if key not in saved:
            raise _mismatch(key, f"was not saved; the checkpoint has {', '.join(map(repr, saved))}")
        state[key] = _filled(state[key], saved[key], key)


def _filled(target: object, saved: Any, path: str) -> object:  # noqa: ANN401 - any state
    """`target` with the saved content, in place if it can be."""
    if isinstance(target, torch.Tensor):
        _check_tensor(target, saved, path)
        with torch.no_grad():
            target.copy_(saved)
        return target
    if has_state(target):
        _load_object(target, saved, path)
        return target
    if isinstance(target, MutableMapping):
        if not isinstance(saved, Mapping):
            raise _mismatch(path, f"is a dict, and was saved as {type(saved).__name__}")
        _check_not_an_optimizers(target, saved, path)
        for key in target:
            if key not in saved:
                raise _mismatch(f"{path}.{key}", "was not saved")
        for key, item in saved.items():
            target[key] = _filled(target[key], item, f"{path}.{key}") if key in target else item
        return target
    if isinstance(target, list) and isinstance(saved, list):
        known = len(target)
        target[:] = [
            _filled(target[index], item, f"{path}.{index}") if index < known else item
            for index, item in enumerate(saved)
        ]
        return target
    return saved


def _load_object(target: Any, saved: Any, path: str) -> None:  # noqa: ANN401 - any object with load_state_dict
    if isinstance(target, torch.nn.Module):
        if not isinstance(saved, Mapping):
            raise _mismatch(path, f"is a module, and was saved as {type(saved).__name__}")
        expected = target.state_dict()
        for name in expected.keys() - saved.keys():
            raise _mismatch(f"{path}.{name}", "was not saved")
        for name in saved.keys() - expected.keys():
            raise _mismatch(f"{path}.{name}", "was saved, and the module does not have it")
        for name, tensor in expected.items():
            if isinstance(tensor, torch.Tensor):
                _check_tensor(tensor, saved[name], f"{path}.{name}")
    try:
        target.load_state_dict(saved)
    except (ValueError, KeyError, RuntimeError) as error:
        raise _mismatch(path, f"does not take the saved state: {error}") from error


def _check_tensor(target: torch.Tensor, saved: object, path: str) -> None:
    if not isinstance(saved, torch.Tensor):
        raise _mismatch(path, f"is a tensor, and was saved as {type(saved).__name__}")
    if (target.shape, target.dtype) != (saved.shape, saved.dtype):
        raise _mismatch(
            path,
            f"is {tuple(target.shape)} {target.dtype}, and was saved as {tuple(saved.shape)} {saved.dtype}",
        )
    if not same_layout(target, saved):
        raise _mismatch(path, "is sharded in another way than it was saved")


def _check_not_an_optimizers(target: Mapping[Any, Any], saved: Mapping[Any, Any], path: str) -> None:
    """An optimizer that has not stepped has no tensors in its state dict: filling that would silently do nothing."""
    if target.keys() == {"state", "param_groups"} and not target["state"] and saved.get("state"):
        raise _mismatch(path, "is the state dict of an optimizer that has not stepped yet", "pass the optimizer itself")


def _mismatch(path: str, what: str, hint: str = "") -> StateMismatch:
    return StateMismatch(
        f"The state at {path!r} {what}.",
        hint=hint or "restore into the same model, optimizer and data state that were saved",
    )
