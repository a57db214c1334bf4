"""Worked examples: small logs whose every second can be checked by hand. Includes the
examples of docs/reference/goodput/measures.md."""

from __future__ import annotations

import pytest

from flyball.contracts.errors import NotFound, UsageError
from flyball.contracts.events import Event, EventKind
from goodput.calculator import GoodputReport, calculate

JOB = "gpt"


def event(at: float, kind: EventKind, /, *, generation: int = -1, rank: int = -1, incident: str = "", **data) -> Event:
    return Event(at=at, kind=kind, job=JOB, generation=generation, rank=rank, incident_id=incident, data=data)


def steps(generation: int, first_step: int, completed_at: list[float], ranks: int = 2) -> list[Event]:
    return [
        event(
            completed_at[-1],
            EventKind.STEPS,
            generation=generation,
            rank=rank,
            first_step=first_step,
            completed_at=completed_at,
        )
        for rank in range(ranks)
    ]


def start(
    generation: int, at: float, *, attached: float, began: float, restored: float, restore_step: int | None = None
) -> list[Event]:
    marks = {
        "spawned_at": at,
        "attached_at": attached,
        "restore_began_at": began,
        "restored_at": restored,
        "first_step_at": 0.0,
        "save_blocked_s": 0.0,
    }
    return [
        event(at, EventKind.GENERATION_STARTED, generation=generation, restore_step=restore_step),
        *(event(restored, EventKind.RANK_MARKS, generation=generation, rank=rank, **marks) for rank in range(2)),
    ]


def decision(at: float, incident: str, kind: str) -> Event:
    return event(at, EventKind.DECISION, incident=incident, decision_id=f"dec-{kind}", kind=kind, rule="r")


def killed_worker(*, stamped: bool = True) -> list[Event]:
    """Ten one-second steps, a kill during the eleventh, and eleven more from step 9 on."""
    return [
        event(100.0, EventKind.JOB_SUBMITTED),
        *start(1, 101.0, attached=103.0, began=103.0, restored=103.5),
        *steps(1, 0, [105.0 + i for i in range(10)]),
        *([event(114.4, EventKind.FAULT_INJECTED, fault="kill", target="rank 1")] if stamped else []),
        event(114.6, EventKind.INCIDENT_OPENED, incident="inc-1", cause="worker_killed"),
        decision(114.7, "inc-1", "restart_in_place"),
        event(114.7, EventKind.GENERATION_GRANTED, generation=2, incident="inc-1", parent=1),
        event(114.9, EventKind.WORKERS_STOPPED, generation=1, incident="inc-1"),
        *start(2, 115.0, attached=116.0, began=116.2, restored=116.5, restore_step=8),
        *steps(2, 9, [118.0 + i for i in range(11)]),
        event(118.1, EventKind.INCIDENT_CLOSED, incident="inc-1", state="resolved", lost_steps=1),
        event(129.0, EventKind.JOB_ENDED, outcome="succeeded"),
    ]


def spent(report: GoodputReport) -> dict[str, float]:
    """The categories that occur, rounded to a millisecond."""
    assert sum(report.seconds_by_category.values()) == pytest.approx(report.elapsed_s, rel=1e-6)
    assert sum(report.badput_s.values()) == pytest.approx(report.elapsed_s - report.seconds_by_category["useful"])
    return {category: round(s, 3) for category, s in report.seconds_by_category.items() if round(s, 3)}


def test_a_killed_worker_costs_what_the_clock_says() -> None:
    report = calculate(killed_worker())

    assert spent(report) == {
        "scheduling": 1.0,
        "restart": 3.3,  # 101.0-103.0, and 114.9-116.2
        "restore": 0.8,
        "warm_up": 1.0,  # the first steps took 1.5 s each; a step takes 1 s
        "useful": 20.0,
        "recomputed": 1.4,  # step 9, and 0.4 s of step 10
        "detection": 0.2,
        "decision": 0.1,
        "stop": 0.2,
        "shutdown": 1.0,
    }
    assert report.goodput == pytest.approx(20 / 29)
    assert report.ettr == pytest.approx(20 / 29)
    assert report.mttr_s == pytest.approx(118.0 - 114.4)
    assert report.mttf_s == pytest.approx(21.4)
    assert (report.steps.kept, report.steps.recomputed, report.steps.newest) == (20, 1, 19)
    assert report.steps.median_s == pytest.approx(1.0)
    (incident,) = report.incidents
    assert (incident.cause, incident.outcome, incident.lost_steps) == ("worker_killed", "resolved", 1)
    assert not incident.began_is_estimate
    assert incident.detected_s == pytest.approx(0.2)
    assert incident.decided_s == pytest.approx(0.3)
    assert incident.resumed_s == pytest.approx(3.6)
    assert incident.decisions == ("restart_in_place",)
    assert incident.badput_s == pytest.approx(1.4 + 0.2 + 0.1 + 0.2 + 1.3 + 0.3 + 0.5)
    assert report.badput_s["worker_killed"] == pytest.approx(incident.badput_s)
    assert report.notes == ()


def test_without_a_stamp_detection_counts_from_the_newest_step() -> None:
    report = calculate(killed_worker(stamped=False))

    assert spent(report)["detection"] == 0.6
    assert spent(report)["recomputed"] == 1.0
    (incident,) = report.incidents
    assert incident.began_is_estimate
    assert incident.detected_s == pytest.approx(0.6)


def test_the_moment_of_the_fault_is_the_controllers() -> None:
    told = event(114.6, EventKind.INCIDENT_OPENED, incident="inc-1", cause="worker_killed", fault_at=114.35)
    events = [told if e.kind is EventKind.INCIDENT_OPENED else e for e in killed_worker(stamped=False)]
    report = calculate(events)
    (incident,) = report.incidents
    assert not incident.began_is_estimate
    assert (incident.began_at, incident.detected_s) == (114.35, pytest.approx(0.25))
    assert (spent(report)["detection"], spent(report)["recomputed"]) == (0.25, 1.35), "as of an injected fault"


def test_lost_steps_are_counted_if_the_controller_did_not() -> None:
    events = [e for e in killed_worker() if e.kind is not EventKind.INCIDENT_CLOSED]
    assert calculate(events).incidents[0].lost_steps == 1
    undecided = [e for e in events if e.generation != 2]
    assert calculate(undecided).incidents[0].lost_steps is None


def test_an_announced_preemption_loses_no_step() -> None:
    report = calculate(
        [
            event(0.0, EventKind.JOB_SUBMITTED),
            *start(1, 0.0, attached=0.0, began=0.0, restored=0.0),
            *steps(1, 0, [1.0 + i for i in range(10)]),
            event(5.5, EventKind.INCIDENT_OPENED, incident="inc-1", cause="preemption_notice"),
            decision(5.6, "inc-1", "emergency_checkpoint"),  # at step 9, which completes at 10.0
            decision(10.4, "inc-1", "migrate_to_spare"),
            event(10.5, EventKind.WORKERS_STOPPED, generation=1, incident="inc-1"),
            *start(2, 10.5, attached=11.0, began=11.0, restored=11.5, restore_step=9),
            *steps(2, 10, [12.5, 13.5, 14.5]),
            event(12.6, EventKind.INCIDENT_CLOSED, incident="inc-1", state="resolved", lost_steps=0),
            event(14.5, EventKind.JOB_ENDED, outcome="stopped"),
        ]
    )

    assert spent(report) == {
        "useful": 13.0,
        "checkpoint_blocked": 0.4,  # parked at step 9 until the save was safe
        "stop": 0.1,
        "restart": 0.5,
        "restore": 0.5,
    }
    assert report.incidents[0].lost_steps == 0
    assert report.ettr == pytest.approx(13.4 / 14.5)


def test_an_outage_shows_without_a_repeated_step_number() -> None:
    # An unsupervised trainer that logs only steps: 600 s between two steps, no step repeated.
    times = [float(i) for i in range(1, 968)] + [967.0 + 600.0 + i for i in range(1, 968)]
    report = calculate([event(0.0, EventKind.JOB_SUBMITTED), *steps(0, 0, times, ranks=1)])

    assert report.goodput == pytest.approx(0.763, abs=1e-3)
    assert spent(report)["unknown"] == 600.0


def test_a_pause_explained_by_an_incident_belongs_to_it() -> None:
    report = calculate(
        [
            event(0.0, EventKind.JOB_SUBMITTED),
            *start(1, 0.0, attached=0.0, began=0.0, restored=0.0),
            *steps(1, 0, [1.0, 2.0, 3.0, 4.0, 34.0, 35.0]),
            event(10.0, EventKind.INCIDENT_OPENED, incident="inc-1", cause="rank_stalled"),
            decision(10.0, "inc-1", "hold"),
            event(33.5, EventKind.INCIDENT_CLOSED, incident="inc-1", state="resolved"),
            event(35.0, EventKind.JOB_ENDED, outcome="succeeded"),
        ]
    )

    # 4-10 detection, 10-33 decision; the step itself, 33-34, covers the last half second of it.
    assert spent(report) == {"useful": 6.0, "detection": 6.0, "decision": 23.0}
    assert report.badput_s == pytest.approx({"rank_stalled": 29.0})
    assert report.interruptions == 0
    assert report.mttr_s is None


def test_a_restart_that_fails_is_counted_once() -> None:
    report = calculate(
        [
            event(0.0, EventKind.JOB_SUBMITTED),
            *start(1, 0.0, attached=0.0, began=0.0, restored=0.0),
            *steps(1, 0, [1.0, 2.0, 3.0]),
            event(4.0, EventKind.INCIDENT_OPENED, incident="inc-1", cause="worker_killed"),
            decision(4.0, "inc-1", "restart_in_place"),
            event(5.0, EventKind.WORKERS_STOPPED),
            event(5.0, EventKind.GENERATION_STARTED, generation=2, incident="inc-1", restore_step=2),
            event(9.0, EventKind.INCIDENT_OPENED, incident="inc-2", cause="host_silent"),
            decision(10.0, "inc-2", "migrate_to_spare"),
            event(11.0, EventKind.WORKERS_STOPPED),
            event(11.0, EventKind.GENERATION_STARTED, generation=3, incident="inc-2", restore_step=1),
            *steps(3, 2, [15.0, 16.0]),
        ]
    )

    assert spent(report) == {
        "useful": 4.0,  # steps 0, 1, and 2 and 3 of the third generation
        "recomputed": 1.0,  # step 2 of the first generation, which the second had kept and the third had not
        "detection": 1.0,
        "stop": 2.0,
        "restart": 4.0 + 3.0,
        "decision": 1.0,
    }
    assert report.interruptions == 2
    assert [i.resumed_s for i in report.incidents] == [None, pytest.approx(12.0)]
    assert [i.badput_s for i in report.incidents] == [pytest.approx(1.0 + 1.0 + 4.0), pytest.approx(1.0 + 1 + 1 + 3)]


def test_the_time_of_a_doomed_generation_is_not_warm_up() -> None:
    report = calculate(
        [
            event(0.0, EventKind.JOB_SUBMITTED),
            *start(1, 1.0, attached=2.0, began=2.0, restored=6.0),
            event(5.0, EventKind.INCIDENT_OPENED, incident="inc-1", cause="host_silent"),
            decision(8.0, "inc-1", "migrate_to_spare"),
            event(9.0, EventKind.JOB_ENDED, outcome="failed"),
        ]
    )
    assert spent(report) == {"scheduling": 1.0, "restart": 1.0, "restore": 3.0, "decision": 3.0, "stop": 1.0}


def test_time_without_a_controller_has_its_own_category() -> None:
    report = calculate(
        [
            event(0.0, EventKind.CONTROLLER_ELECTED, epoch=1),
            event(0.0, EventKind.JOB_SUBMITTED),
            *start(1, 0.0, attached=0.0, began=0.0, restored=0.0),
            *steps(1, 0, [1.0, 2.0, 3.0, 4.0]),
            Event(
                at=20.2,
                kind=EventKind.SIGNAL,
                data={"kind": "host_silent", "source": "sensor.1", "observed_at": 4.5},
            ),
            event(20.0, EventKind.CONTROLLER_ELECTED, epoch=2),
            event(20.2, EventKind.INCIDENT_OPENED, incident="inc-1", cause="worker_killed"),
            decision(20.3, "inc-1", "restart_in_place"),
            *start(2, 20.5, attached=21.0, began=21.0, restored=21.0, restore_step=3),
            *steps(2, 4, [22.0]),
            event(22.0, EventKind.JOB_ENDED, outcome="succeeded"),
        ]
    )
    assert spent(report) == {
        "useful": 5.0,
        "detection": 0.7,  # 4.0-4.5, 20.0-20.2
        "control_plane_away": 15.5,
        "decision": 0.1,
        "stop": 0.2,
        "restart": 0.5,
    }
    assert report.incidents[0].badput_s == pytest.approx(17.0)


def test_time_blocked_in_save_is_not_useful() -> None:
    marks = [(2.0, 0.5), (4.0, 0.5), (10.0, 2.0)]  # when it was reported, and the total until then
    blocked = [event(at, EventKind.RANK_MARKS, generation=1, rank=1, save_blocked_s=total) for at, total in marks]
    less = [event(10.0, EventKind.RANK_MARKS, generation=1, rank=0, save_blocked_s=1.9)]
    report = calculate(
        [
            event(0.0, EventKind.JOB_SUBMITTED),
            *start(1, 0.0, attached=0.0, began=0.0, restored=0.0),
            *steps(1, 0, [1.0 + i for i in range(10)]),
            *blocked,
            *less,
            event(10.0, EventKind.JOB_ENDED, outcome="succeeded"),
        ]
    )
    assert spent(report) == {"useful": 8.0, "checkpoint_blocked": 2.0}
    assert report.goodput == pytest.approx(0.8)
    assert report.ettr == pytest.approx(1.0)
    assert report.badput_s == pytest.approx({"checkpointing": 2.0})


@pytest.mark.parametrize(("blocked_s", "unknown_s"), [(40.0, 0.0), (0.0, 40.0)])
def test_saves_between_two_logged_steps_are_no_pause(blocked_s: float, unknown_s: float) -> None:
    """The log has three steps one by one, and then only the last of two hundred."""
    logged = (1.0, 2.0, 3.0, 243.0)
    entries = zip((0, 1, 2, 202), logged, (0.0, 0.0, 0.0, blocked_s), strict=True)
    report = calculate(
        [
            event(0.0, EventKind.JOB_SUBMITTED),
            *start(1, 0.0, attached=0.0, began=0.0, restored=0.0),
            *(
                event(at, EventKind.STEPS, generation=1, first_step=step, completed_at=[at], save_blocked_s=total_s)
                for step, at, total_s in entries
            ),
            event(243.0, EventKind.JOB_ENDED, outcome="succeeded"),
        ]
    )
    assert spent(report) == {"useful": 203.0, "unknown" if unknown_s else "checkpoint_blocked": 40.0}


@pytest.mark.parametrize("left", [True, False])
def test_an_evaluation_is_not_a_step(left: bool) -> None:
    phases = [event(4.0, EventKind.PHASE, generation=1, rank=0, phase="eval")]
    if left:
        phases.append(event(9.0, EventKind.PHASE, generation=1, rank=0, phase="step"))
    report = calculate(
        [
            event(0.0, EventKind.JOB_SUBMITTED),
            *start(1, 0.0, attached=0.0, began=0.0, restored=0.0),
            *steps(1, 0, [1.0, 2.0, 3.0, 4.0, 10.0, 11.0]),
            *phases,
            event(11.0, EventKind.JOB_ENDED, outcome="succeeded"),
        ]
    )
    assert spent(report) == {"useful": 6.0, "evaluation": 5.0}
    assert report.ettr == pytest.approx(1.0)


def test_missing_last_reports_of_a_lost_host_do_not_matter() -> None:
    # Rank 1's host died before it reported steps 3 and 4, whose bytes its peer had: they are kept.
    def log(restore_step: int) -> list[Event]:
        return [
            event(0.0, EventKind.JOB_SUBMITTED),
            *start(1, 0.0, attached=0.0, began=0.0, restored=0.0),
            *steps(1, 0, [1.0, 2.0, 3.0]),
            *steps(1, 3, [4.0, 5.0], ranks=1),
            event(6.0, EventKind.INCIDENT_OPENED, incident="inc-1", cause="host_silent"),
            *start(2, 7.0, attached=8.0, began=8.0, restored=8.0, restore_step=restore_step),
            *steps(2, restore_step + 1, [9.0]),
        ]

    kept = calculate(log(4))
    assert (kept.steps.kept, kept.steps.recomputed, kept.steps.newest) == (6, 0, 5)
    assert spent(kept)["useful"] == 6.0
    lost = calculate(log(1))
    assert (lost.steps.kept, lost.steps.recomputed) == (3, 1)
    assert spent(lost) == {"useful": 3.0, "recomputed": 1.0, "detection": 3.0, "decision": 1.0, "restart": 1.0}


def test_workers_that_were_cut_off_do_not_add_to_their_successors_time() -> None:
    report = calculate(
        [
            event(0.0, EventKind.JOB_SUBMITTED),
            *start(1, 0.0, attached=0.0, began=0.0, restored=0.0),
            *steps(1, 0, [1.0 + i for i in range(12)]),  # until 12.0, though superseded at 5.5
            event(5.2, EventKind.INCIDENT_OPENED, incident="inc-1", cause="host_silent"),
            *start(2, 5.5, attached=6.0, began=6.0, restored=7.0, restore_step=4),
            *steps(2, 5, [8.0, 9.0, 10.0]),
            event(10.0, EventKind.JOB_ENDED, outcome="succeeded"),
        ]
    )
    assert spent(report) == {"useful": 8.0, "recomputed": 0.5, "restart": 0.5, "restore": 1.0}
    assert report.steps.kept == 8


def test_time_after_the_end_of_a_log_is_unknown() -> None:
    events = [
        event(0.0, EventKind.JOB_SUBMITTED),
        *start(1, 0.0, attached=0.0, began=0.0, restored=0.0),
        *steps(1, 0, [1.0, 2.0, 3.0]),
    ]
    assert calculate(events).elapsed_s == 3.0
    live = calculate(events, now=10.0)
    assert spent(live) == {"useful": 3.0, "unknown": 7.0}
    assert live.outcome == ""
    assert "its end is not in the log" in live.notes[0]


def test_a_plain_script_has_no_steps_and_the_report_says_so() -> None:
    report = calculate(
        [
            event(0.0, EventKind.JOB_SUBMITTED),
            event(1.0, EventKind.GENERATION_STARTED, generation=1, restore_step=None),
            event(1.5, EventKind.RANK_MARKS, generation=1, rank=0, spawned_at=1.2, attached_at=0.0),
            event(9.0, EventKind.JOB_ENDED, outcome="succeeded"),
        ]
    )
    assert spent(report) == {"scheduling": 1.0, "restart": 0.2, "unknown": 7.8}
    assert "no completed step" in report.notes[0]


def test_fields_of_the_wrong_type_are_ignored() -> None:
    report = calculate(
        [
            event(0.0, EventKind.JOB_SUBMITTED),
            event(1.0, EventKind.STEPS, generation=1, rank=0, first_step="zero", completed_at=[1.0]),
            event(1.0, EventKind.STEPS, generation=1, rank=0, first_step=0, completed_at="soon"),
            event(2.0, EventKind.STEPS, generation=1, rank=0, first_step=0, completed_at=[1.0, "x", 3.0]),
            event(2.0, EventKind.RANK_MARKS, generation=1, rank=0, restored_at="never", save_blocked_s=True),
            event(3.0, EventKind.INCIDENT_CLOSED, incident="inc-9", lost_steps="many"),
        ]
    )
    assert (report.steps.kept, report.steps.newest) == (3, 2)
    assert report.incidents[0].cause == "unknown"


def test_one_job_of_several_must_be_chosen() -> None:
    other = Event(at=5.0, kind=EventKind.JOB_SUBMITTED, job="other")
    with pytest.raises(UsageError, match="gpt, other"):
        calculate([*killed_worker(), other])
    assert calculate([*killed_worker(), other], job="other").elapsed_s == 0.0
    assert calculate([other]).goodput is None
    assert calculate([*killed_worker(), other], job=JOB).elapsed_s == 29.0
    with pytest.raises(NotFound, match="it has: gpt, other"):
        calculate([*killed_worker(), other], job="third")
    with pytest.raises(NotFound):
        calculate([])


def test_hosts_come_and_go_outside_of_a_jobs_time() -> None:
    joined = Event(at=1.0, kind=EventKind.HOST_JOINED, host_id="host-a")
    assert calculate([joined, *killed_worker()]) == calculate(killed_worker())
