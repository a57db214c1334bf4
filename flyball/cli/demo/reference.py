"""The uninterrupted run under plain torchrun, and the bit-for-bit comparison of the demo's losses with it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from flyball.contracts.errors import FlyballError, Unreachable

STOP_TIMEOUT_S = 10.0
LOOK_INTERVAL_S = 0.1


def run_reference(
    script: Path,
    arguments: Sequence[str],
    *,
    world_size: int,
    log_file: Path,
    deadline_s: float,
    on_wait: Callable[[], None],
) -> None:
    """Run the script under torchrun until it ends. `on_wait` is called often; if it raises, the run is ended."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("FLYBALL_", "PET_", "TORCHELASTIC_"))}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    deadline = time.monotonic() + deadline_s
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [*command, str(script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environ,
            start_new_session=True,
        )
    try:
        while process.poll() is None:
            on_wait()
            if time.monotonic() > deadline:
                raise Unreachable(
                    f"The uninterrupted run did not end within {deadline_s:.0f} s.", hint=f"read its log, {log_file}"
                )
            time.sleep(LOOK_INTERVAL_S)
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun then ends its workers
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                torchrun = psutil.Process(process.pid)
                for member in [*torchrun.children(recursive=True), torchrun]:
                    with suppress(psutil.NoSuchProcess):
                        member.kill()
                process.wait()
    if process.returncode:
        raise FlyballError(
            f"The uninterrupted run under torchrun failed with exit code {process.returncode}.",
            hint=f"read its log, {log_file}",
        )


# --- comparison ------------------------------------------------------------------------------------------------------

# (rank, step) -> the losses of every execution of that step, as hexadecimal floats
Losses = Mapping[tuple[int, int], list[str]]

MISMATCHES_SHOWN = 5


@dataclass(frozen=True)
class LossComparison:
    """The result of comparing two runs."""

    matches: bool
    compared: int  # executions of a step by a rank
    recomputed: int  # of these, executions after the first
    problems: tuple[str, ...]


def read_losses(folder: Path) -> Losses:
    """Read all executions of all steps from the `rank<r>.txt` files of a folder: `step hexfloat ...` per line."""
    losses: dict[tuple[int, int], list[str]] = {}
    for file in sorted(folder.glob("rank*.txt")):
        rank = int(file.stem.removeprefix("rank"))
        for line in file.read_text().splitlines():
            match = re.match(r"(\d+) (-?0x[0-9a-f.]+p[+-]\d+|nan|-?inf)\b", line)
            key = (rank, int(match[1]) if match else -1)
            losses.setdefault(key, []).append(match[2] if match else line)
    return losses


def newest_step(losses: Losses) -> int:
    """The newest step that any rank executed, -1 if none."""
    return max((step for _, step in losses), default=-1)


def compare(losses: Losses, reference: Losses) -> LossComparison:
    """Check that every execution of every step equals the uninterrupted run's, bit for bit, and no step is missing."""
    problems = []
    for (rank, step), values in sorted(losses.items()):
        expected = reference.get((rank, step), [])
        if len(expected) != 1:
            problems.append(f"rank {rank} step {step}: the uninterrupted run has {len(expected)} losses, not one")
        else:
            problems += [f"rank {rank} step {step}: {v}, not {expected[0]}" for v in values if v != expected[0]]
    ranks = {rank for rank, _ in losses}
    for rank in sorted(ranks):
        steps = {step for r, step in losses if r == rank}
        missing = sorted(set(range(max(steps) + 1)) - steps)
        if missing:
            problems.append(f"rank {rank} never completed step {missing[0]}")
    compared = sum(len(values) for values in losses.values())
    return LossComparison(
        matches=bool(losses) and not problems,
        compared=compared,
        recomputed=compared - len(losses),
        problems=tuple(problems[:MISMATCHES_SHOWN]),
    )
