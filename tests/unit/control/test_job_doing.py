"""The one word and sentence for what a job does."""

from __future__ import annotations

import msgspec
import pytest

from flyball.contracts.cluster import JobState, Phase
from flyball.contracts.decisions import IncidentState
from flyball.contracts.orders import AWAITS_APPROVAL
from flyball.contracts.reports.rank_stands import RankStand, Stand
from services.rules.job_doing import Doing, JobDoing, ObservedJob, OpenIncident, SeenRank, doing_of

NOW = 1000.0
JOB = ObservedJob(JobState.RUNNING, newest_step=60, last_step_at=NOW - 0.2, step_s=0.05, steps_per_s=18.2)
INCIDENT = OpenIncident("inc-3", "host_silent", IncidentState.DECIDING, "host-b fell silent.", NOW - 31.0)


def rank(
    number: int,
    *,
    still_s: float = 0.1,
    heard_s: float = 0.5,
    phase: Phase = Phase.STEP,
    stand: RankStand | None = None,
) -> SeenRank:
    """A rank that was heard `heard_s` ago, and had not moved for `still_s` by then."""
    return SeenRank(number, phase, NOW - heard_s, NOW - heard_s - still_s, stand)


def doing(**changes: object) -> JobDoing:
    return doing_of(msgspec.structs.replace(JOB, **changes), NOW)


def test_a_job_that_makes_steps_trains() -> None:
    assert doing(ranks=[rank(0), rank(1)]) == JobDoing(Doing.TRAINING, 0.0, 18.2, "training at 18.2 steps/s")


@pytest.mark.parametrize(
    ("step_s", "still_s", "kind"),
    [(0.05, 1.5, "standing"), (0.05, 0.9, "training"), (10.0, 150.0, "training"), (10.0, 201.0, "standing")],
)
def test_it_stands_after_a_second_and_twenty_steps_without_one(step_s: float, still_s: float, kind: str) -> None:
    assert doing(step_s=step_s, ranks=[rank(0, still_s=still_s), rank(1, still_s=still_s)]).kind == kind


def test_a_job_that_stands_makes_no_step_a_second_and_says_since_when() -> None:
    found = doing(ranks=[rank(0, still_s=31.0)], last_step_at=NOW - 31.0)
    assert found == JobDoing(Doing.STANDING, NOW - 31.0, 0.0, "standing for 31 s after step 60")


def test_who_is_to_blame_comes_first_then_why_nothing_ends_it_then_who_waits() -> None:
    dead = RankStand(1, Stand.LOCK, place="wait (train.py:21)", process="in futex", proof="nobody can release it")
    ranks = [rank(0, still_s=5.0, stand=RankStand(0, Stand.COLLECTIVE, "backward")), rank(1, still_s=5.0, stand=dead)]
    text = doing(ranks=ranks, last_step_at=NOW - 5.0).text
    assert text.index("Rank 1 waits for a lock") < text.index("Nothing can end that") < text.index("Rank 0 waits in")


def test_an_incident_of_a_job_that_trains_is_said_beside_its_rate() -> None:
    found = doing(ranks=[rank(0)], incidents=[INCIDENT])
    assert found.kind is Doing.TRAINING and "inc-3: host-b fell silent." in found.text


def test_a_job_that_outlived_its_fault_trains_however_seldom_its_hosts_report() -> None:
    assert doing(ranks=[rank(0, heard_s=8.0)], incidents=[INCIDENT]).kind is Doing.TRAINING
    just_now = msgspec.structs.replace(INCIDENT, fault_at=NOW - 8.5)
    assert doing(ranks=[rank(0, heard_s=8.0)], incidents=[just_now]).kind is Doing.RECOVERING


def test_two_lost_hosts_without_a_spare_are_no_training() -> None:
    held = msgspec.structs.replace(INCIDENT, holding_for="a spare host")
    found = doing(ranks=[rank(0, heard_s=30.0)], incidents=[held])
    assert (found.kind, found.since, found.steps_per_s) == (Doing.STANDING, NOW - 31.0, 0.0)
    assert found.text == "standing for 31 s: waits for a spare host (inc-3). host-b fell silent."


def test_a_job_of_slow_steps_whose_host_fell_silent_is_not_said_to_train() -> None:
    acting = msgspec.structs.replace(INCIDENT, state=IncidentState.ACTING)
    assert doing(step_s=60.0, ranks=[rank(0, heard_s=5.0)], incidents=[acting]).kind is Doing.RECOVERING


def test_what_waits_for_a_person_says_the_command() -> None:
    held = msgspec.structs.replace(INCIDENT, holding_for=f"{AWAITS_APPROVAL}restart_in_place")
    found = doing(incidents=[held, INCIDENT])
    assert found.kind is Doing.HELD and found.text.startswith("held for you: flyball approve inc-3.")


def test_what_is_acted_on_recovers() -> None:
    acting = msgspec.structs.replace(INCIDENT, state=IncidentState.ACTING)
    assert doing(incidents=[acting]).text == "recovering for 31 s: host silent, acting (inc-3). host-b fell silent."


@pytest.mark.parametrize(
    ("phase", "kind", "text"),
    [
        (Phase.STARTING, Doing.STARTING, "starting for 3.5 s: 1 of 2 ranks"),
        (Phase.RESTORING, Doing.RESTORING, "restoring for 3.5 s: 1 of 2 ranks"),
        (Phase.EVAL, Doing.EVALUATING, "rank 1 evaluates; 4.0 s since step 60"),
        (Phase.CHECKPOINT, Doing.EVALUATING, "rank 1 saves; 4.0 s since step 60"),
        (Phase.PARKED, Doing.EVALUATING, "rank 1 has saved and is parked; 4.0 s since step 60"),
    ],
)
def test_a_phase_that_takes_long_is_named(phase: Phase, kind: Doing, text: str) -> None:
    found = doing(ranks=[rank(0, still_s=3.0), rank(1, still_s=3.0, phase=phase)], last_step_at=NOW - 4.0)
    assert (found.kind, found.text) == (kind, text)


def test_a_start_that_takes_long_says_that_its_script_may_report_no_steps() -> None:
    assert "flyball.attach()" in doing(ranks=[rank(0, still_s=100.0, phase=Phase.STARTING)]).text


def test_a_job_that_nobody_hears_is_not_said_to_train() -> None:
    found = doing(ranks=[rank(0, heard_s=25.0)])
    assert (found.kind, found.text) == (Doing.UNHEARD, "nothing is heard of its hosts for 25 s")


@pytest.mark.parametrize(
    ("state", "kind"),
    [(JobState.SUBMITTED, Doing.WAITING), (JobState.STOPPING, Doing.ENDING), (JobState.SUCCEEDED, Doing.ENDED)],
)
def test_before_and_after_it_runs(state: JobState, kind: Doing) -> None:
    assert doing(state=state, message="so it is").kind is kind
    assert doing(state=state, message="so it is").text == "so it is"
