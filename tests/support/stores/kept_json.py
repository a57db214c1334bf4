"""States as JSON, for checkpoints that are kept: what they must be read as."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from support.jobs.saved_steps import bytes_of


def in_json(value: Any) -> Any:  # noqa: ANN401 - any state
    """Tensors as {"dtype", "shape", "hex"}; tuples as {"tuple": [..]}; numpy arrays as {"array": tensor};
    dtypes as {"torch": name}; dicts as {"dict": [[key, value], ..]}."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"dtype": dtype, "shape": list(value.shape), "hex": bytes_of(value).hex()}
    if isinstance(value, dict):
        return {"dict": [[in_json(key), in_json(item)] for key, item in value.items()]}
    if isinstance(value, torch.dtype):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, np.ndarray):
        return {"array": in_json(torch.from_numpy(value))}
    if isinstance(value, list | tuple):
        items = [in_json(item) for item in value]
        return items if isinstance(value, list) else {"tuple": items}
    return value


def of_json(node: Any) -> Any:  # noqa: ANN401 - any state
    """What `in_json` wrote."""
    if isinstance(node, list):
        return [of_json(item) for item in node]
    if not isinstance(node, dict):
        return node
    if "dict" in node:
        return {of_json(key): of_json(item) for key, item in node["dict"]}
    if "tuple" in node:
        return tuple(of_json(item) for item in node["tuple"])
    if "torch" in node:
        return getattr(torch, node["torch"])
    if "array" in node:
        return of_json(node["array"]).numpy()
    dtype, shape = getattr(torch, node["dtype"]), node["shape"]
    content = bytearray.fromhex(node["hex"])
    return torch.frombuffer(content, dtype=dtype).view(shape) if content else torch.empty(shape, dtype=dtype)
