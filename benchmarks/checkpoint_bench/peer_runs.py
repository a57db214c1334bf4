"""Runs the other engines, each in a process of the venv that has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoint_bench.parts import PartFailed, run_part
from checkpoint_bench.samples import progress

PEER_TIMEOUT_S = 400.0


def measure_peers(
    python: Path, names: list[str], state_bytes: int, repeats: int, folder: Path
) -> dict[str, dict[str, Any]]:
    """What each engine found; {"failed": reason} where it could not be run."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        progress(f"--- {name}, {state_bytes / 2**30:g} GiB")
        try:
            found[name] = run_part(
                python, "checkpoint_bench.peer_worker", name, state_bytes, repeats, folder, PEER_TIMEOUT_S
            )
        except PartFailed as error:
            progress(f"{name} could not be measured:\n{error}")
            found[name] = {"failed": str(error).splitlines()[-1][:500]}
    return found
