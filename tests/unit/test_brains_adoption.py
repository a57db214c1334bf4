"""What is taken over from hosts that are ahead of the database, and what is waited for. Pure."""

from __future__ import annotations

import msgspec
import pytest

from flyball.contracts.checkpoints import LineageEntry
from flyball.contracts.cluster import HostRanks, JobSpec, Placement
from flyball.contracts.identity import Fence
from flyball.contracts.reports.standings import HeldJob, HostStanding, LastObeyed
from services.actuator.host_parts import host_parts
from services.controller.policy import decide
from services.controller.rules.adoption import GATHER_S, NOT_ADOPTED, OTHER_CLUSTER_S, WHOLE_WITHIN_S, merged
from services.controller.view import Outcome, PolicySettings, ReportedStanding, View

NOW = 1000.0
SPEC = JobSpec("job", ("train.py",), "/work", nnodes=6)
WHOLE = Placement(
    job="job",
    generation=5,
    world_size=6,
    hosts=tuple(HostRanks(f"h{n}", f"10.0.0.{n}", f"10.0.0.{n}:1", (n,)) for n in range(6)),
    master_address="10.0.0.0",
    master_port=29500,
    peers={f"h{n}": (f"h{(n + 1) % 6}",) for n in range(6)},
    lineage=(LineageEntry(2, 40), LineageEntry(5, None)),
    restore=None,
    run="20261123-180000-000",
)


def told(
    *hosts: int, cluster: str = "mine", unanswered_s: float = 100.0, alive: bool = True
) -> tuple[ReportedStanding, ...]:
    parts = host_parts(WHOLE)
    return tuple(
        ReportedStanding(
            HostStanding(
                host_id=f"h{n}",
                incarnation="i",
                at=NOW,
                obeyed=LastObeyed(cluster, 9, "act-abcd-31.start.h.1"),
                unanswered_s=unanswered_s,
                jobs=(HeldJob(SPEC, parts[f"h{n}"], Fence(9, 5), (n,) if alive else ()),),
            ),
            NOW,
            NOW,
        )
        for n in hosts
    )


def decided(standings: tuple[ReportedStanding, ...], after_s: float) -> Outcome:
    view = View((), (), (), (), (), next_incident=1, next_decision=1, cluster="mine", standings=standings)
    return decide(view, [], PolicySettings(), NOW + after_s)


def test_the_parts_of_all_hosts_are_the_whole_placement() -> None:
    assert merged(list(host_parts(WHOLE).values())) == WHOLE


@pytest.mark.parametrize("hosts", [range(6), (0,), (0, 3), (1, 3, 5)])
def test_a_job_is_adopted_whose_places_are_known(hosts: tuple[int, ...]) -> None:
    """Rank 0's host knows all; others know those that they have to do with."""
    assert decided(told(*hosts), GATHER_S / 2).adoption is None
    outcome = decided(told(*hosts), GATHER_S)
    assert outcome.adoption is not None
    assert (outcome.adoption.epoch_floor, outcome.adoption.decision_floor) == (9, 31)
    [job] = outcome.adoption.jobs
    assert (job.plan.generation, job.plan.hosts, job.placement.lineage) == (5, WHOLE.hosts, WHOLE.lineage)


def test_what_nobody_tells_whole_stays_an_incident_and_its_hosts_unsettled() -> None:
    assert NOT_ADOPTED not in {i.cause for i in decided(told(1), WHOLE_WITHIN_S / 2).incidents}
    outcome = decided(told(1), WHOLE_WITHIN_S)
    assert outcome.adoption is None
    assert {i.cause for i in outcome.incidents if not i.state.closed} == {NOT_ADOPTED, "database_older"}
    assert "Next step" in next(i.message for i in outcome.incidents if i.cause == NOT_ADOPTED)
    gone = decided(told(1, alive=False), WHOLE_WITHIN_S)
    assert gone.adoption is not None
    assert gone.adoption.jobs == ()


def test_a_host_is_taken_over_from_another_cluster_only_when_that_one_is_silent() -> None:
    standings = told(0, cluster="other", unanswered_s=1.0)
    assert decided(standings, GATHER_S).adoption is None
    assert decided(standings, OTHER_CLUSTER_S - 0.9).adoption is not None


def test_a_job_that_ended_is_not_adopted() -> None:
    [one], [other] = told(0), told(1)
    ended = msgspec.structs.replace(other.standing, jobs=(), ended={"job": 6})
    outcome = decided((one, msgspec.structs.replace(other, standing=ended)), GATHER_S)
    assert outcome.adoption is not None
    assert outcome.adoption.jobs == ()
