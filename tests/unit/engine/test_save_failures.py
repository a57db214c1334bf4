"""Saves that keep failing: the engine's log, the daemon's signal, the controller's incident."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from support.hosts.engine_reports import signals_of
from support.policy.checked import decide
from support.policy.views import GENERATION, JOB, KILLED, NOW, say, view

from ckpt_engine.host.save_reports import FAILING_AFTER_S, REPEAT_S, SaveFailures
from flyball.contracts.decisions import DecisionKind, Incident, IncidentState
from flyball.contracts.on_host.engine_wire import EngineReply, FailingSaves, SaveFailure
from flyball.contracts.reports.signals import SavesFailing, SavesRecovered, SignalBody
from services.controller.round.view import Outcome, PolicySettings, View

LONG_S = FAILING_AFTER_S


def failed(step: int, at: float, *, rank: int = 0, generation: int = 2) -> SaveFailure:
    return SaveFailure("job", generation, rank, step, f"no slot at {step}", at)


def log_of(*failures: SaveFailure) -> SaveFailures:
    log = SaveFailures("job")
    log.begin(2)
    for failure in failures:
        log.failed(failure)
    return log


def test_saves_that_keep_failing_are_reported_with_start_count_and_reason() -> None:
    log = log_of(failed(5, 1000.0), failed(6, 1030.0), failed(6, 1031.0, rank=3))
    assert log.failing(1000.0 + LONG_S - 1) is None
    report = log.failing(1000.0 + LONG_S)
    assert report == FailingSaves("job", 2, (0,), 1000.0, 2, 6, "no slot at 6")
    log.failed(failed(7, 1070.0))
    assert log.failing(1071.0) == report, "it is reported once"
    log.failed(failed(7, 1090.0, rank=3))
    both = log.failing(1031.0 + LONG_S)
    assert both is not None
    assert (both.ranks, both.count) == ((0, 3), 3)
    log.kept(0, 8, 1100.0)
    log.kept(3, 8, 1100.0)
    over = log.failing(1100.0)
    assert over is not None
    assert (over.ranks, over.since) == ((), 1000.0)
    assert [failure.step for failure in log.newest()] == [5, 6, 6, 7, 7]


def test_one_failure_or_an_older_step_that_is_kept_or_another_generations_says_nothing() -> None:
    assert log_of(failed(5, 1000.0)).failing(1e6) is None
    assert log_of(failed(5, 1000.0, generation=1), failed(6, 1001.0, generation=1)).failing(1e6) is None
    log = log_of(failed(5, 1000.0), failed(6, 1001.0))
    log.kept(0, 4, 1002.0)
    assert log.failing(1000.0 + LONG_S).ranks == (0,)  # type: ignore[union-attr]  # they fail
    log.begin(3)
    assert log.failing(1e6) is None
    alternate = log_of(failed(5, 1000.0), failed(7, 1002.0))
    alternate.kept(0, 8, 1003.0)
    alternate.failed(failed(9, 1200.0))
    assert alternate.failing(1300.0) == FailingSaves("job", 2, (), 0.0, 0, 8)


def test_a_lasting_failure_is_reported_again_from_time_to_time() -> None:
    log = log_of(failed(5, 1000.0), failed(6, 1001.0))
    assert log.failing(1100.0).count == 2  # type: ignore[union-attr]  # they fail
    log.failed(failed(7, 1150.0))
    assert log.failing(1100.0 + REPEAT_S).count == 3  # type: ignore[union-attr]  # they fail


def signals_of_failing(*answers: Sequence[FailingSaves]) -> list[SignalBody]:
    """The signals of a daemon whose engine reports this."""
    return signals_of(*(EngineReply(ok=True, failing=tuple(answer)) for answer in answers))


FAIL = FailingSaves("job", 2, (1,), NOW - 70.0, 4, 55, "every slot is needed")
FAIL_SIGNAL = SavesFailing("job", 2, (1,), NOW - 70.0, 4, 55, "every slot is needed")
OF_A = msgspec.structs.replace(FAIL_SIGNAL, ranks=(0,))
OVER = msgspec.structs.replace(FAIL, ranks=(), message="")
NEVER = FailingSaves("job", 2, (), 0.0, 0, 3)


def test_the_daemon_makes_one_signal_of_each_change_whoever_reported_the_one_before() -> None:
    over = SavesRecovered("job", 2)
    assert signals_of_failing([FAIL], [FAIL], [OVER], [OVER]) == [FAIL_SIGNAL, over]
    assert signals_of_failing([NEVER], [NEVER]) == []
    assert signals_of_failing([FAIL], [], [NEVER]) == [FAIL_SIGNAL, over], "the engine was restarted"
    assert signals_of_failing([OVER]) == [over], "the daemon was restarted"


def decide_on(*bodies: SignalBody, view_: View | None = None, source: str = "b") -> Outcome:
    signals = [say(body, source=source, seq=seq) for seq, body in enumerate(bodies)]
    return decide(view_ or view(), signals, PolicySettings(), NOW)


def opened() -> Incident:
    (incident,) = decide_on(FAIL_SIGNAL).incidents
    return incident


def test_it_is_an_incident_that_restarts_nothing() -> None:
    outcome = decide_on(FAIL_SIGNAL)
    (incident,), (decision,) = outcome.incidents, outcome.decisions
    assert (incident.cause, incident.host_id, incident.state) == ("saves_failing", "b", IncidentState.DECIDING)
    assert (decision.kind, decision.rule, decision.action) == (DecisionKind.HOLD, "hold_while_saves_fail", None)
    assert outcome.jobs == ()
    assert (decision.evidence, outcome.wake_at) == ({"hosts": "b"}, NOW + 60.0)
    held = msgspec.structs.replace(view(), incidents=(incident,))
    assert decide_on(FAIL_SIGNAL, view_=held).empty
    assert decide_on(view_=held).wake_at > NOW


def test_a_host_on_which_nothing_was_tried_is_said_to_be_without_a_save() -> None:
    nothing = SavesFailing("job", 2, (1,), NOW - 70.0, 0, 55, "The engine is away.")
    (incident,) = decide_on(nothing).incidents
    assert incident.message == (
        "Nothing of rank 1 on b is saved: it is at step 55, 70 s after its first one: The engine is away."
    )


def test_hosts_that_say_so_in_one_round_are_named_together() -> None:
    outcome = decide(view(), [say(OF_A, source="a"), say(FAIL_SIGNAL, source="b")], PolicySettings(), NOW)
    (decision,) = outcome.decisions
    assert (decision.rule, decision.evidence) == ("hold_while_saves_fail", {"hosts": "a,b"})


def test_it_is_over_when_the_last_host_keeps_a_save() -> None:
    known = view(incidents=(opened(),))
    (both,) = decide_on(OF_A, view_=known, source="a").incidents
    assert both.hosts == ("a", "b")
    known = view(incidents=(both,))
    (one,) = decide_on(SavesRecovered("job", 2), view_=known, source="b").incidents
    assert (one.hosts, one.state) == (("a",), IncidentState.DECIDING)
    assert decide_on(SavesRecovered("job", 1), view_=known, source="a").empty
    (none,) = decide_on(SavesRecovered("job", 2), view_=view(incidents=(one,)), source="a").incidents
    assert none.state is IncidentState.RESOLVED


def test_reports_of_hosts_outside_the_present_generation_are_ignored() -> None:
    assert decide_on(FAIL_SIGNAL, source="c").empty
    assert decide_on(FAIL_SIGNAL, source="a").empty, "rank 1 is not on it"
    assert decide_on(msgspec.structs.replace(FAIL_SIGNAL, generation=1)).empty
    assert decide_on(SavesRecovered("job", 2)).empty


def test_a_failure_beside_it_is_handled_and_its_generation_ends_it() -> None:
    known = view(incidents=(opened(),))
    outcome = decide_on(KILLED, view_=known)
    assert {decision.kind for decision in outcome.decisions} == {DecisionKind.RESTART_IN_PLACE}
    newer = msgspec.structs.replace(JOB, generation=msgspec.structs.replace(GENERATION, generation=3, parent=2))
    (ended,) = decide_on(view_=msgspec.structs.replace(known, jobs=(newer,))).incidents
    assert ended.state is IncidentState.RESOLVED
