"""What the adapters of all frameworks use: parts of a state that are read only when a step is saved, and the states of
the process's random generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch

from flyball.contracts.errors import ConfigurationError, UnsupportedState


class StatePart:
    """A part of a framework's state, as an object that `job.save` and `job.restore` take.

    `read` is called for the steps that are really saved, and `write` with what was saved.
    """

    def __init__(self, read: Callable[[], dict[str, Any]], write: Callable[[dict[str, Any]], None]) -> None:
        self._read, self._write = read, write

    def state_dict(self) -> dict[str, Any]:
        return self._read()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._write(saved)


def random_states() -> dict[str, Any]:
    """The states of the generators that a process has by default: Python's, numpy's, torch's, and CUDA's of all devices
    if CUDA is in use. Each is a copy."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached_gaussian = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss},
        "numpy": {
            "name": name,
            "keys": np.array(keys),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached_gaussian": float(cached_gaussian),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Put the generators where `random_states` found them."""
    python, legacy = states["python"], states["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(
        (legacy["name"], legacy["keys"], legacy["position"], legacy["has_gauss"], legacy["cached_gaussian"])
    )
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])


def named_fields(
    value: object, found: Collection[str], *, saved: frozenset[str], left_out: frozenset[str], path: str
) -> dict[str, Any]:
    """The fields of `value` that are named in `saved`. `found` has the names of all its fields.

    Raises UnsupportedState, naming the path, if one of them is neither in `saved` nor in `left_out`: nobody has decided
    what it means to save it.
    """
    unknown = sorted(set(found) - saved - left_out)
    if unknown:
        raise UnsupportedState(
            f"The state at '{path}.{unknown[0]}' is a field that Flyball does not know.",
            hint="use a release of the framework that docs/how-to/frameworks.md names, or report this one",
        )
    return {name: getattr(value, name) for name in sorted(saved & set(found))}


def not_installed(package: str, error: ImportError) -> ConfigurationError:
    """For an adapter whose framework cannot be imported."""
    return ConfigurationError(
        f"This adapter needs {package}, which cannot be imported: {error}.",
        hint=f"install it beside Flyball: pip install {package}",
    )
