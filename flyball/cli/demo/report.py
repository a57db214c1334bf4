"""The demo's last word: a table for people, one JSON object for programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flyball.cli.demo.faults import FaultRow
from flyball.cli.demo.losses import Comparison
from flyball.cli.show.output import print_fields, print_table

FAULTS = ("kill", "hang", "host-down", "preempt")


@dataclass(frozen=True)
class DemoResult:
    """Everything that the demo found out."""

    steps: int
    faults: tuple[FaultRow, ...]
    comparison: Comparison
    goodput: float | None
    badput_s: dict[str, float]
    decisions: int

    @property
    def passed(self) -> bool:
        """Every fault was recovered, and training is bit for bit that of a run without faults."""
        return (
            tuple(f.fault for f in self.faults) == FAULTS
            and all(f.recovered for f in self.faults)
            and self.comparison.matches
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "faults": [f.to_json() for f in self.faults],
            "loss_matches_uninterrupted": self.comparison.matches,
            "losses_compared": self.comparison.compared,
            "losses_of_repeated_steps": self.comparison.repeated,
            "loss_problems": list(self.comparison.problems),
            "goodput": self.goodput,
            "badput_s": {cause: round(seconds, 3) for cause, seconds in self.badput_s.items()},
            "decisions": self.decisions,
        }


def print_result(result: DemoResult) -> None:
    """The report on stdout."""
    print_table(
        "Faults (seconds since the injection; steps lost)",
        ("fault", "decision", "detected", "decided", "resumed", "lost", "from"),
        (
            [
                f.fault,
                f.decision.replace("_", " "),
                *(f"{seconds:.2f}" for seconds in (f.detected_s, f.decided_s, f.resumed_s)),
                f.lost_steps,
                f.restored_from,
            ]
            for f in result.faults
        ),
    )
    lost_steps = sum(f.lost_steps for f in result.faults)
    losses = result.comparison
    counts = f"{losses.compared} compared with an uninterrupted torchrun, {losses.repeated} of them of steps done twice"
    same = "equal, bit for bit" if losses.matches else "NOT equal: " + "; ".join(losses.problems)
    print_fields(
        {
            "steps": result.steps,
            "losses": f"{counts}: {same}",
            "goodput": "-" if result.goodput is None else f"{100 * result.goodput:.1f} % of the elapsed time",
            "badput": ", ".join(f"{cause} {seconds:.2f} s" for cause, seconds in result.badput_s.items()) or "none",
            "decisions": result.decisions,
            "verdict": f"every fault recovered, steps lost and done again: {lost_steps}" if result.passed else "FAILED",
        }
    )
