"""What the Trainers of the frameworks have written, for comparison to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

TIMES = ("runtime", "per_second")  # ends of the names of what differs from run to run
RUN = "training_args.bin"  # names the time at which the run began


def without_times(state_file: Path) -> dict[str, Any]:
    """A `trainer_state.json`."""
    state: dict[str, Any] = json.loads(state_file.read_text())
    state["log_history"] = [
        {name: value for name, value in entry.items() if not name.endswith(TIMES)} for entry in state["log_history"]
    ]
    return state


def files_of(output: Path) -> dict[str, Any]:
    """Every file in the folder, by its path."""
    return {
        str(path.relative_to(output)): without_times(path) if path.name == "trainer_state.json" else path.read_bytes()
        for path in sorted(output.rglob("*"))
        if path.is_file() and path.name != RUN
    }


def flat(value: Any, path: str = "") -> dict[str, Any]:  # noqa: ANN401 - Lightning's checkpoint
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: leaf for key, item in items for name, leaf in flat(item, f"{path}.{key}").items()}
    return {path: value.tolist() if isinstance(value, torch.Tensor) else value}
