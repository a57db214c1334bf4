"""What the policy does about a training whose state goes wrong while all ranks run."""

from __future__ import annotations

import msgspec
import pytest
from support.policy.checked import decide
from support.policy.views import GENERATION, HOSTS, JOB, NOW, SETTINGS, decided, exited, incident, say, view, with_exit

from flyball.contracts.checkpoints import LineageEntry, ShardCopy, Tier
from flyball.contracts.cluster import HostState, Phase, WorkerError
from flyball.contracts.decisions import DecisionKind, Harm, IncidentState
from flyball.contracts.reports.signals import HostSilent, PreemptionNotice, ReplicasDiffer, WorkerExited
from flyball.contracts.reports.training_health import LossDiverged, LossRecovered, ReplayDiffers
from services.controller.round.focus import clean_steps
from services.controller.round.view import HostView, JobView, PastFailure

NAN = LossDiverged("job", 2, 0, 46, 47, 49, "nan", 2.0, 0.1, "inf", 3)
SPIKE = LossDiverged("job", 2, 0, 46, 47, 60, 80.5, 2.0, 0.1, 4.0, 16)
ODD = ReplicasDiffer("job", 2, 48, ("model.w", "optim.w"), 2, (0, 2, 3), (1,), 46)


BAD_DEVICE = ReplayDiffers("job", 2, 1, 48, ("gradient of w",), 1, 1, 2, 0, 3, 1, 2, equal_step=46, deterministic=True)


ECC_ERROR = "CUDA error: uncorrectable ECC error encountered"


def copies(*steps: int) -> tuple[ShardCopy, ...]:
    """Complete steps: of generation 1 up to 40, then of generation 2."""
    return tuple(
        ShardCopy("job", 1 if step <= 40 else 2, step, rank, Tier.MEMORY, host, 1, "d")
        for step in steps
        for rank, host in ((0, "a"), (1, "b"))
    )


@pytest.mark.parametrize("body", [NAN, SPIKE, ODD, msgspec.structs.replace(NAN, usual="nan", spread="nan")])
def test_a_harm_restarts_from_the_newest_recovery_point_before_it(body: LossDiverged | ReplicasDiffer) -> None:
    outcome = decide(view(copies=copies(40, 45, 50)), [say(body, source="a")], SETTINGS, NOW)
    decision = decided(outcome)
    assert (decision.rule, decision.kind) == ("restart_before_the_harm", DecisionKind.RESTART_IN_PLACE)
    assert decision.action is not None and decision.action.next is not None
    assert decision.action.next.parent_lineage == (LineageEntry(1, 40), LineageEntry(2, 46))
    assert decision.action.next.known_step == 45
    assert decision.action.next.restart_count == 1  # not charged to --max-restarts
    assert {"clean_step": 46, "restart_step": 45, "steps_given_up": 5}.items() <= decision.evidence.items()
    assert decision.evidence.get("differ") == (None if isinstance(body, LossDiverged) else "1")
    assert outcome.incidents[0].harm == Harm(46, body.first_step if isinstance(body, LossDiverged) else 48)


def test_a_harm_that_returns_holds_for_a_person() -> None:
    job = msgspec.structs.replace(JOB, failures=(PastFailure(1, "loss_diverged", "", "", 47),))
    outcome = decide(view(job=job, copies=copies(40, 45, 50)), [say(NAN)], SETTINGS, NOW)
    decision = decided(outcome)
    assert (decision.rule, decision.kind, decision.action) == ("hold_when_a_harm_returns", DecisionKind.HOLD, None)
    assert decision.evidence["clean_step"] == 46


def test_a_harm_well_beyond_an_earlier_one_is_another() -> None:
    job = msgspec.structs.replace(JOB, failures=(PastFailure(1, "loss_diverged", "", "", 44),))
    assert (
        decided(decide(view(job=job, copies=copies(45)), [say(NAN)], SETTINGS, NOW)).rule == "restart_before_the_harm"
    )
    many = tuple(PastFailure(generation, "loss_diverged", "", "", 44) for generation in (0, 1))
    job = msgspec.structs.replace(JOB, failures=many)
    assert (
        decided(decide(view(job=job, copies=copies(45)), [say(NAN)], SETTINGS, NOW)).rule == "hold_when_a_harm_returns"
    )


@pytest.mark.parametrize(
    ("steps", "rule"),
    [
        ((10, 44), "hold_when_a_harm_returns"),
        ((10, 40, 44), "hold_when_a_harm_returns"),
        ((-200, -60, 44), "restart_before_the_harm"),  # the oldest two were long ago
        ((-200, -190, -180), "restart_before_the_harm"),
    ],
)
def test_harms_of_long_ago_do_not_count(steps: tuple[int, ...], rule: str) -> None:
    past = tuple(PastFailure(number - len(steps) + 2, "loss_diverged", "", "", at) for number, at in enumerate(steps))
    job = msgspec.structs.replace(JOB, failures=past)
    assert decided(decide(view(job=job, copies=copies(45)), [say(NAN)], SETTINGS, NOW)).rule == rule


@pytest.mark.parametrize("clean_step", [46, -1])
def test_without_a_recovery_point_before_the_harm_it_holds(clean_step: int) -> None:
    body = msgspec.structs.replace(NAN, clean_step=clean_step)
    decision = decided(decide(view(copies=copies(48, 50)), [say(body)], SETTINGS, NOW))
    assert (decision.rule, decision.action) == ("hold_without_a_clean_step", None)


HELD = incident(
    cause="loss_diverged",
    state=IncidentState.DECIDING,
    generation=2,
    action_id="",
    decisions_made=0,
    harm=Harm(46, 47),
    holding_for="a person",
    hold_until=NOW + 60,
)


def test_ranks_that_die_while_a_person_looks_are_restarted() -> None:
    returned = (PastFailure(1, "loss_diverged", "", "", 47),)
    job = msgspec.structs.replace(with_exit(exited(exit_code=None, signal=9, error="")), failures=returned)
    decision = decided(decide(view(job=job, incidents=[HELD], copies=copies(45, 50)), [], SETTINGS, NOW))
    assert decision.rule == "restart_in_place" and decision.action is not None and decision.action.next is not None
    assert decision.action.next.known_step == 50  # it returned: going back does not help
    assert "before the harm" not in decision.reason


def test_a_host_lost_with_a_harm_restarts_before_the_harm_too() -> None:
    silent = say(HostSilent("b", 3.0, 2.0, ()), source="sensor.1", at=NOW + 3)
    saved = tuple(msgspec.structs.replace(copy, host_id="a") for copy in copies(45, 50))
    decision = decided(decide(view(incidents=[HELD], copies=saved), [silent], SETTINGS, NOW))
    assert decision.kind is DecisionKind.MIGRATE_TO_SPARE
    assert decision.action is not None and decision.action.next is not None
    assert decision.action.next.known_step == 45
    assert {"clean_step": 46, "restart_step": 45, "steps_given_up": 5}.items() <= decision.evidence.items()


def test_a_loss_that_recovers_ends_the_hold() -> None:
    recovered = say(LossRecovered("job", 2, 0, 80, 2.1, 47, 90.0), source="sensor.1")
    outcome = decide(view(incidents=[HELD]), [recovered], SETTINGS, NOW)
    assert [i.state for i in outcome.incidents] == [IncidentState.RESOLVED] and not outcome.decisions


def test_a_held_harm_does_not_keep_ranks_on_a_host_that_goes() -> None:
    notice = say(PreemptionNotice(NOW + 30.0, "cloud"), source="b")
    outcome = decide(view(incidents=[HELD], copies=copies(48)), [notice], SETTINGS, NOW)
    decision = decided(outcome)
    assert (decision.rule, decision.kind) == ("save_before_the_host_goes", DecisionKind.EMERGENCY_CHECKPOINT)
    undecided = msgspec.structs.replace(HELD, holding_for="", hold_until=0.0)
    both = decide(view(incidents=[undecided], copies=copies(45)), [notice], SETTINGS, NOW)
    assert [d.rule for d in both.decisions] == ["restart_before_the_harm", "let_the_other_incident_go_first"]


def test_a_held_harm_is_over_with_its_generation() -> None:
    moved = msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, generation=3, parent=2))
    outcome = decide(view(job=moved, incidents=[HELD], copies=copies(48)), [], SETTINGS, NOW)
    assert [i.state for i in outcome.incidents] == [IncidentState.RESOLVED] and not outcome.decisions
    again = say(msgspec.structs.replace(NAN, generation=3), source="sensor.1")
    reported = decide(view(job=moved, incidents=[HELD], copies=copies(48)), [again], SETTINGS, NOW)
    assert {i.incident_id: i.generation for i in reported.incidents if not i.state.closed} == {"inc-7": 3}


def test_a_move_that_does_not_come_up_is_seen_beside_a_held_harm() -> None:
    starting = msgspec.structs.replace(GENERATION, generation=3, parent=2, started_at=NOW - 60, ranks=())
    job = msgspec.structs.replace(JOB, generation=starting)
    moved = incident(
        cause="preemption_notice", incident_id="inc-2", state=IncidentState.VERIFYING, generation=2, since=NOW - 60
    )
    outcome = decide(view(job=job, incidents=[HELD, moved], copies=copies(48)), [], SETTINGS, NOW)
    states = {i.incident_id: i.state for i in outcome.incidents}
    assert states["inc-2"] is not IncidentState.VERIFYING
    assert outcome.decisions and outcome.decisions[0].kind is not DecisionKind.HOLD


def test_a_hold_is_decided_once() -> None:
    assert decide(view(incidents=[HELD], copies=copies(48)), [], SETTINGS, NOW).decisions == ()


def test_signals_of_older_generations_and_other_hosts_change_nothing() -> None:
    old = [say(msgspec.structs.replace(body, generation=1), source="a") for body in (NAN, ODD)]
    assert decide(view(), [*old, say(ODD, source="c")], SETTINGS, NOW).empty


@pytest.mark.parametrize("agree", [(), (0, 2, 3)])
def test_replicas_that_never_were_seen_equal_are_on_record_only(agree: tuple[int, ...]) -> None:
    body = msgspec.structs.replace(ODD, agree=agree, differ=(1,), equal_step=-1)
    assert decide(view(copies=copies(40)), [say(body, source="a")], SETTINGS, NOW).empty


def test_two_replicas_go_back_to_where_they_were_equal() -> None:
    two = msgspec.structs.replace(ODD, agree=(), differ=(0, 1))
    decision = decided(decide(view(copies=copies(45, 50)), [say(two, source="a")], SETTINGS, NOW))
    assert decision.rule == "restart_before_the_harm"


def test_a_bad_device_is_left_from_before_the_harm_and_its_host_gets_no_work() -> None:
    outcome = decide(view(copies=copies(40, 45, 50)), [say(BAD_DEVICE, source="b")], SETTINGS, NOW)
    decision = decided(outcome)
    assert (decision.rule, decision.kind) == ("leave_the_host_of_a_bad_device", DecisionKind.MIGRATE_TO_SPARE)
    assert decision.action is not None and decision.action.next is not None
    assert [part.host_id for part in decision.action.next.hosts] == ["a", "c"]
    assert decision.action.next.parent_lineage == (LineageEntry(1, 40), LineageEntry(2, 46))
    assert decision.action.next.known_step == 45
    assert {"rank": 1, "peer_host": "a", "restart_step": 45}.items() <= decision.evidence.items()
    assert outcome.incidents[0].harm == Harm(46, 48)
    assert {host.host_id: host.state for host in outcome.hosts}["b"] is HostState.CORDONED


@pytest.mark.parametrize(
    ("changes", "saved", "hosts", "rule"),
    [
        ({}, (45,), HOSTS[:2], "restart_before_the_harm"),  # no spare
        ({}, (48,), HOSTS, "hold_without_a_clean_step"),
        ({"equal_step": -1}, (40, 48), HOSTS, "leave_the_host_of_a_bad_device"),  # the restored step counts
    ],
)
def test_a_bad_device_without_a_spare_or_a_recovery_point(
    changes: dict[str, int], saved: tuple[int, ...], hosts: tuple[HostView, ...], rule: str
) -> None:
    body = msgspec.structs.replace(BAD_DEVICE, **changes)
    decision = decided(decide(view(copies=copies(*saved), hosts=hosts), [say(body, source="b")], SETTINGS, NOW))
    assert decision.rule == rule
    returned = msgspec.structs.replace(JOB, failures=(PastFailure(1, "replay_differs", "", "", 48),))
    again = decide(view(job=returned, copies=copies(*saved), hosts=hosts), [say(body, source="b")], SETTINGS, NOW)
    assert decided(again).rule == "hold_when_a_harm_returns"


REPEATED = {"deterministic": False, "peer_runs": 16, "own_runs": 8, "own_odd": 3}


@pytest.mark.parametrize("changes", [REPEATED, {"differing": 4, "ranks": 8}])  # such as all ranks of one of two hosts
def test_what_proves_a_bad_device(changes: dict[str, int]) -> None:
    body = msgspec.structs.replace(BAD_DEVICE, **changes)
    decision = decided(decide(view(copies=copies(45)), [say(body, source="b")], SETTINGS, NOW))
    assert decision.rule == "leave_the_host_of_a_bad_device"
    assert ("and 3 of 8 more runs of rank 1 were odd ones. So" in decision.reason) == (not body.deterministic)


@pytest.mark.parametrize(
    "changes",
    [
        {"peer": -1},
        {"peer_results": 2},
        {"peer_results": 0},
        {"rank": 0},
        {"deterministic": False},  # it may differ now and then: three equal runs are usual
        {**REPEATED, "own_odd": 2},
        {**REPEATED, "peer_runs": 15},
        {**REPEATED, "own_runs": 7},
        {"differing": 3, "ranks": 5},
        {**REPEATED, "differing": 3, "ranks": 5},
    ],
)
def test_a_replay_that_shows_no_bad_device_blames_nobody(changes: dict[str, int]) -> None:
    body = msgspec.structs.replace(BAD_DEVICE, **changes)
    assert decide(view(copies=copies(40)), [say(body, source="b")], SETTINGS, NOW).empty


def test_the_view_has_the_steps_before_every_known_harm() -> None:
    signals = [say(body, source="b") for body in (NAN, BAD_DEVICE, msgspec.structs.replace(ODD, equal_step=-1))]
    assert clean_steps(signals, [msgspec.structs.replace(HELD, harm=Harm(30, 32))]) == {"job": {30, 46}}
    assert clean_steps([], [msgspec.structs.replace(HELD, harm=Harm(-1, 32))]) == {}


def failed_twice(step: int, *, kind: str = "KeyError") -> tuple[PastFailure, ...]:
    return (PastFailure(2, "worker_exception", kind, "x", step),)


def failed_after_restoring_40(body: WorkerExited, *before: PastFailure) -> JobView:
    """A job whose third generation restored step 40 and ended with this exit."""
    third = msgspec.structs.replace(GENERATION, generation=3, parent=1, lineage=(LineageEntry(1, 40), LineageEntry(3)))
    job = with_exit(msgspec.structs.replace(body, generation=3))
    assert job.generation is not None
    generation = msgspec.structs.replace(third, ranks=job.generation.ranks)
    return msgspec.structs.replace(job, generation=generation, failures=before)


def test_two_exceptions_soon_after_restores_of_one_step_leave_it() -> None:
    job = failed_after_restoring_40(exited(), *failed_twice(49))
    decision = decided(decide(view(job=job, copies=copies(30, 40)), [], SETTINGS, NOW))
    assert decision.rule == "leave_a_recovery_point_that_fails"
    newer = (*copies(30, 40), *(msgspec.structs.replace(c, generation=3) for c in copies(45)))
    assert decided(decide(view(job=job, copies=newer), [], SETTINGS, NOW)).rule == "restart_in_place"
    assert decided(decide(view(job=job, copies=copies(40)), [], SETTINGS, NOW)).rule == "restart_in_place"


@pytest.mark.parametrize(
    ("now", "before", "rule"),
    [
        ({"last_phase": Phase.STEP}, "x", "leave_a_recovery_point_that_fails"),
        ({"last_phase": Phase.STARTING, "last_step": -1}, "x", "restart_in_place"),
        ({"error": WorkerError("RuntimeError", ECC_ERROR)}, "x", "restart_in_place"),
        ({}, ECC_ERROR, "restart_in_place"),
    ],
)
def test_a_fault_of_a_gpu_or_an_exception_before_the_restore_blames_no_recovery_point(
    now: dict[str, object], before: str, rule: str
) -> None:
    earlier = PastFailure(2, "worker_exception", "RuntimeError", before, 49)
    job = failed_after_restoring_40(msgspec.structs.replace(exited(), **now), earlier)
    assert decided(decide(view(job=job, copies=copies(30, 40)), [], SETTINGS, NOW)).rule == rule
