"""The losses of the demo's job against those of an uninterrupted run, bit for bit. Pure apart from reading files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# (rank, step) -> the losses of every execution of that step, as hexadecimal floats
Losses = Mapping[tuple[int, int], list[str]]

MISMATCHES_NAMED = 5


@dataclass(frozen=True)
class LossComparison:
    """What the comparison of two runs found."""

    matches: bool
    compared: int  # executions of a step by a rank
    repeated: int  # of these, executions beyond the first
    problems: tuple[str, ...]


def read_losses(folder: Path) -> Losses:
    """All executions of all steps in the `rank<r>.txt` files of a folder: `step hexfloat ...` per line."""
    losses: dict[tuple[int, int], list[str]] = {}
    for file in sorted(folder.glob("rank*.txt")):
        rank = int(file.stem.removeprefix("rank"))
        for line in file.read_text().splitlines():
            match = re.match(r"(\d+) (-?0x[0-9a-f.]+p[+-]\d+|nan|-?inf)\b", line)
            key = (rank, int(match[1]) if match else -1)
            losses.setdefault(key, []).append(match[2] if match else line)
    return losses


def newest_step(losses: Losses) -> int:
    """The newest step that any rank executed, -1 for none."""
    return max((step for _, step in losses), default=-1)


def compare(losses: Losses, reference: Losses) -> LossComparison:
    """Every execution of every step must be the uninterrupted run's, to the last bit, and no step may be missing."""
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
        repeated=compared - len(losses),
        problems=tuple(problems[:MISMATCHES_NAMED]),
    )
