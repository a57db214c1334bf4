"""The newest step that a restart may be expected to restore."""

from __future__ import annotations

import pytest

from flyball.contracts.checkpoints import LineageEntry
from flyball.contracts.cluster import HostRanks, JobSpec
from flyball.contracts.decisions import ActionPlan, Decision, DecisionKind, GenerationPlan
from simulator.fleet.restore_check import RestoreCheck
from simulator.fleet.training import JobTraining, SavedStep


def _training() -> JobTraining:
    training = JobTraining(
        step_s=1.0, every_steps=10, save_s=0.0, replicate_s=1.0, persistent_every=6, persistent_s=1.0, at=0.0
    )
    training.committed, training.replicated, training.persistent = SavedStep(90, 1), SavedStep(80, 1), SavedStep(60, 1)
    return training


def _plan(*lineage: LineageEntry) -> GenerationPlan:
    hosts = tuple(HostRanks(name, "10.0.0.1", f"{name}:7000", (rank,)) for rank, name in enumerate("abc"))
    peers = {"a": ("b",), "b": ("c",), "c": ("a",)}
    return GenerationPlan("job", 2, 1, hosts, peers, lineage, restart_count=1)


def _decision(rule: str, *lineage: LineageEntry) -> Decision:
    spec = JobSpec(job="job", argv=("train.py",), workdir="/", nnodes=3)
    kind = DecisionKind.RESTART_IN_PLACE
    action = ActionPlan(kind=kind, job="job", spec=spec, generation=1, stop_hosts=(), next=_plan(*lineage))
    return Decision("dec-1", "inc-1", "job", DecisionKind.RESTART_IN_PLACE, "", rule, 0.0, action=action)


@pytest.mark.parametrize(("well", "step"), [("abc", 90), ("bc", 80), ("ab", 80), ("a", 60), ("", 60)])
def test_what_is_there_depends_on_the_hosts_that_have_memory(well: str, step: int) -> None:
    assert RestoreCheck().newest_there(_training(), _plan(), lambda name: name in well) == step


def test_steps_that_a_decision_left_as_suspect_do_not_count_until_the_job_trains() -> None:
    check = RestoreCheck()
    check.decided(_decision("restart_in_place", LineageEntry(1, 59)))
    assert check.newest_there(_training(), _plan(), lambda name: True) == 90
    check.decided(_decision("leave_a_recovery_point_that_fails", LineageEntry(1, 89)))
    assert check.newest_there(_training(), _plan(), lambda name: True) == 80
    check.decided(_decision("leave_a_recovery_point_that_fails", LineageEntry(1, 59)))
    assert check.newest_there(_training(), _plan(), lambda name: True) == -1
    check.trains()
    assert check.newest_there(_training(), _plan(), lambda name: True) == 90
