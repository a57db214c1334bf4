"""Checks that a restart goes back no further than it must."""

from __future__ import annotations

from collections.abc import Callable

from flyball.contracts.decisions import Decision, GenerationPlan
from services.controller.rules.health_rules import leave_a_recovery_point_that_fails
from simulator.fleet.training import JobTraining

_LEAVES_STEPS = leave_a_recovery_point_that_fails.__name__


class RestoreCheck:
    """Compares the step that a generation restores with what the hosts that are up, and the store, truly have.

    The policy may leave a step as suspect, if a decision says so. That step, and those after it, do not count until the
    job trains again.
    """

    def __init__(self) -> None:
        self._left_from: int | None = None

    def decided(self, decision: Decision) -> None:
        """Take note of a decision that leaves steps out."""
        plan = decision.action.next if decision.action is not None else None
        if decision.rule != _LEAVES_STEPS or plan is None:
            return
        bounds = [entry.upto_step for entry in plan.parent_lineage if entry.upto_step is not None]
        self._left_from = max(bounds, default=-1) + 1

    def trains(self) -> None:
        """The job trains again."""
        self._left_from = None

    def newest_there(self, training: JobTraining, before: GenerationPlan, has_memory: Callable[[str], bool]) -> int:
        """The newest step that can be restored, -1 if none. `before`: the generation that trained last."""
        well = {part.host_id for part in before.hosts if has_memory(part.host_id)}
        hosts = [(part.host_id in well, before.peers.get(part.host_id, ())) for part in before.hosts]
        points = [training.persistent]
        if all(is_well or not well.isdisjoint(peers) for is_well, peers in hosts):
            points.append(training.replicated)
        if all(is_well for is_well, _ in hosts):
            points.append(training.committed)
        steps = (point.step for point in points)
        return max((step for step in steps if self._left_from is None or step < self._left_from), default=-1)
