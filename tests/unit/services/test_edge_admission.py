"""Which reports a sensor accepts: by token, order and date."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.hosts.reports import report as made_report

from flyball.contracts.checkpoints import ShardCopy, Tier
from flyball.contracts.cluster import Phase
from flyball.contracts.errors import (
    DaemonSuperseded,
    FlyballError,
    Forbidden,
    InvalidMessage,
    ReportOutOfOrder,
    ReportReplayed,
    TooBusy,
    WrongClock,
)
from flyball.contracts.reports.conditions import HostCondition, Severity
from flyball.contracts.reports.rank_columns import CompletedSteps, RankProgress, Workers
from flyball.contracts.reports.signals import (
    ConditionBegan,
    ConditionEnded,
    ConditionsStand,
    FalseAlarm,
    HostSilent,
    PreemptionNotice,
    RankMarks,
    RankStalled,
    Report,
    Signal,
    SignalBody,
    SignalUnreadable,
)
from flyball.contracts.wire import WIRE_VERSION, decode, encode
from services.sensor.rules.admission import Admission

NOW = 1_700_000_000.0


def report(seq: int = 1, *, host_id: str = "host-a", **parts: Any) -> Report:  # noqa: ANN401 - fields of Report
    return made_report(host_id, **{"sent_at": NOW, "incarnation": "one", "seq": seq} | parts)


def signal(seq: int = 1, *, source: str = "host-a", at: float = NOW, body: SignalBody | None = None) -> Signal:
    return Signal(source, "one", seq, at, body or PreemptionNotice(NOW + 60.0, "test"))


def take(admission: Admission, message: Report, *, now: float = NOW, now_s: float = 0.0) -> None:
    admission.check(message, host_id="host-a", now=now, now_s=now_s)
    admission.accepted(message, now_s=now_s)


def refusal(admission: Admission, message: Report, *, now: float = NOW, now_s: float = 0.0) -> FlyballError:
    with pytest.raises(FlyballError) as caught:
        admission.check(message, host_id="host-a", now=now, now_s=now_s)
    assert caught.value.hint
    assert 400 <= caught.value.status < 500
    return caught.value


def test_the_next_report_is_taken_and_an_earlier_one_is_not() -> None:
    admission = Admission()
    take(admission, report(5))
    assert isinstance(refusal(admission, report(5)), ReportReplayed)
    assert isinstance(refusal(admission, report(4)), ReportOutOfOrder)
    take(admission, report(6))
    take(admission, report(100))  # the ones in between were lost with their replies


def test_a_report_that_found_the_queue_full_may_come_again_as_it_is() -> None:
    admission = Admission()
    admission.check(report(1), host_id="host-a", now=NOW, now_s=0.0)
    take(admission, report(1))


def test_the_order_is_not_that_of_the_clock() -> None:
    admission = Admission()
    take(admission, report(1, sent_at=NOW + 50.0))
    take(admission, report(2, sent_at=NOW))


def test_a_daemon_that_does_not_number_its_reports_is_ordered_by_their_dates() -> None:
    admission = Admission()
    take(admission, report(0, sent_at=NOW))
    assert isinstance(refusal(admission, report(0, sent_at=NOW)), ReportReplayed)
    assert isinstance(refusal(admission, report(0, sent_at=NOW - 1.0)), ReportOutOfOrder)
    take(admission, report(0, sent_at=NOW + 0.1))


def test_a_restarted_daemon_is_taken_at_once_and_the_older_one_no_more() -> None:
    admission = Admission()
    take(admission, report(50))
    take(admission, report(1, incarnation="two", succeeds=("one",)), now_s=0.1)
    error = refusal(admission, report(51), now_s=2.0)
    assert isinstance(error, DaemonSuperseded)
    assert "--host-id" in error.hint
    take(admission, report(2, incarnation="two"), now_s=3.0)
    take(admission, report(1, incarnation="three", succeeds=("never reported", "two")), now_s=4.0)
    for older in ("one", "two"):
        assert isinstance(refusal(admission, report(60, incarnation=older), now_s=5.0), DaemonSuperseded)


def test_a_second_daemon_is_refused_as_long_as_the_first_one_reports() -> None:
    admission = Admission()
    take(admission, report(1, interval_s=2.0))
    for second in range(1, 60, 2):
        error = refusal(admission, report(second, incarnation="two"), now_s=float(second))
        assert isinstance(error, DaemonSuperseded) and "right now" in error.message and "--host-id" in error.hint
        take(admission, report(second + 1, interval_s=2.0), now_s=second + 1.0)
    assert isinstance(refusal(admission, report(61, incarnation="two"), now_s=65.9), DaemonSuperseded)
    take(admission, report(62, incarnation="two"), now_s=66.1)  # three intervals without the first


def test_a_reinstalled_machine_is_accepted_at_once_when_the_old_daemon_is_silent_or_has_left() -> None:
    admission = Admission()
    take(admission, report(1))
    take(admission, report(1, incarnation="reborn"), now_s=3.1)
    take(admission, report(2, incarnation="reborn", leaves=True), now_s=4.0)
    take(admission, report(1, incarnation="elsewhere"), now_s=4.1)


def test_the_older_daemon_is_accepted_again_when_the_second_one_ended() -> None:
    admission = Admission()
    take(admission, report(50))
    take(admission, report(1, incarnation="two", succeeds=("one",)), now_s=1.0)
    refusal(admission, report(51), now_s=30.0)
    take(admission, report(52), now_s=31.5)
    assert isinstance(refusal(admission, report(9, incarnation="two"), now_s=32.0), DaemonSuperseded)


@pytest.mark.parametrize("sent_at", [NOW + 3600.0, NOW + 60.5, NOW - 60.5, NOW - 86_400.0, 0.0])
def test_a_wrong_date_is_answered_with_the_time(sent_at: float) -> None:
    admission = Admission()
    error = refusal(admission, report(1, sent_at=sent_at))
    assert isinstance(error, WrongClock)
    assert error.server_time == NOW
    take(admission, report(2, sent_at=error.server_time))


STEPS = CompletedSteps("job", 1, (0, 1), 5, ((NOW - 11.0, NOW - 10.0), (NOW - 1.0, NOW + 3600.0)))
MARKS = RankMarks("job", 1, 0, NOW - 5.0, NOW + 3600.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "parts", [{"signals": (signal(at=NOW + 3600.0),)}, {"completed": (STEPS,)}, {"marks": (MARKS,)}]
)
def test_what_happened_did_not_happen_in_the_future(parts: dict[str, Any]) -> None:
    assert isinstance(refusal(Admission(), report(**parts)), WrongClock)


def test_what_happened_long_ago_may_be_reported_now() -> None:
    steps = CompletedSteps("job", 1, (0,), 5, ((NOW - 86_400.0,),))
    take(Admission(), report(signals=(signal(at=NOW - 86_400.0),), completed=(steps,)))


SILENT = HostSilent("host-b", 9.0, 3.0, ())
BY_OPERATOR = HostCondition("hot", Severity.INFO, "It is hot.", "api:operator", NOW)
OTHERS_OWN: tuple[SignalBody, ...] = (
    FalseAlarm("job", 2, 1, (0,), 3, 1.0, 2.0),
    RankStalled("job", 1, (0,), Phase.STEP, 3, 9.0, 3.0),
    SignalUnreadable("odd", "why", ""),
    ConditionBegan(BY_OPERATOR),
    ConditionEnded("api:operator", "hot"),
    ConditionsStand(("probe gpus", "api:operator"), ()),
    ConditionsStand(("probe gpus",), (BY_OPERATOR.key,)),
)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (report(host_id="host-b"), Forbidden),
        (report(signals=(signal(source="host-b"),)), Forbidden),
        (report(signals=(signal(source="sensor.x"),)), Forbidden),
        (report(signals=(signal(body=SILENT),)), Forbidden),
        *((report(signals=(signal(body=body),)), Forbidden) for body in OTHERS_OWN),
        (report(copies=(ShardCopy("job", 1, 5, 0, Tier.MEMORY, "host-b", 9, "d"),)), Forbidden),
        (report(version=WIRE_VERSION + 1), InvalidMessage),
        (report(signals=(signal(2), signal(1))), InvalidMessage),
        (report(signals=(signal(1), signal(1))), InvalidMessage),
        (report(signals=(signal(0),)), InvalidMessage),
    ],
)
def test_reports_about_other_hosts_are_refused(message: Report, kind: type[FlyballError]) -> None:
    admission = Admission()
    assert isinstance(refusal(admission, message), kind)
    take(admission, report(1))  # nothing about it was remembered


def test_the_host_that_was_silent_for_longest_makes_room() -> None:
    admission = Admission(max_hosts=2)
    for host_id in ("a", "b", "a", "c"):
        message = report(1 if host_id != "a" else 10, host_id=host_id)
        admission.accepted(message, now_s=0.0)
    admission.check(report(1, host_id="b"), host_id="b", now=NOW, now_s=0.0)
    with pytest.raises(ReportReplayed):
        admission.check(report(10, host_id="a"), host_id="a", now=NOW, now_s=0.0)


def workers(*ranks: int, generation: int = 1, **columns: object) -> Workers:
    made = Workers("job", generation, ranks, tuple(100 + rank for rank in ranks))
    return msgspec.structs.replace(made, **columns)


def progress(*steps: int, **columns: object) -> RankProgress:
    made = RankProgress((Phase.STEP,), steps, (0.1,) * len(steps))
    return msgspec.structs.replace(made, **columns)


def completed(*ranks: int, times: tuple[tuple[float, ...], ...], job: str = "job") -> CompletedSteps:
    return CompletedSteps(job, 1, ranks, 5, times)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"workers": (workers(0, 1),)}, "workers of 1 generations but progress of 0"),
        ({"progress": (progress(3),)}, "workers of 0 generations but progress of 1"),
        ({"workers": (workers(0, 1),), "progress": (progress(3),)}, "1 values of `steps` for 2 ranks"),
        (
            {"workers": (workers(0, 1),), "progress": (progress(3, 3, beacon_ages_s=(0.1,) * 3),)},
            "3 values of `beacon_ages_s` for 2 ranks",
        ),
        (
            {"workers": (workers(0, 1, 2),), "progress": (progress(3, 3, 3, phases=(Phase.STEP, Phase.EVAL)),)},
            "2 values of `phases` for 3 ranks",
        ),
        (
            {"workers": (workers(0, 1),), "progress": (progress(3, 3, phases=()),)},
            "0 values of `phases` for 2 ranks",
        ),
        ({"workers": (workers(0, 1, pids=(1,)),), "progress": (progress(3, 3),)}, "1 values of `pids` for 2 ranks"),
        ({"workers": (workers(4, 5, 4),), "progress": (progress(3, 3, 3),)}, "rank 4 of 'job' twice"),
        ({"workers": (workers(0), workers(1)), "progress": (progress(3),) * 2}, "a generation twice"),
        ({"completed": (completed(0, 1, times=((NOW, NOW), (NOW,))),)}, "1 values of `completed_at` for 2 ranks"),
        ({"completed": (completed(7, 7, times=((NOW, NOW),)),)}, "rank 7 of 'job' twice"),
        ({"completed": (completed(7, times=((NOW,),), job="no job"),)}, "'no job' cannot be the name of a job"),
    ],
)
def test_columns_that_do_not_fit_are_refused_and_nothing_is_remembered_of_them(
    parts: dict[str, Any], says: str
) -> None:
    admission = Admission()
    error = refusal(admission, report(1, **parts))
    assert isinstance(error, InvalidMessage)
    assert says in str(error)
    good = report(1, workers=(workers(0, 1),), progress=(progress(3, 4),))
    take(admission, good)
    assert isinstance(refusal(admission, report(2, **parts)), InvalidMessage), "also from a known host"
    take(admission, msgspec.structs.replace(good, seq=2))


def test_several_generations_and_phases_are_taken() -> None:
    both = (workers(0, 1), workers(0, 1, generation=2))
    phases = (Phase.STEP, Phase.EVAL)
    take(Admission(), report(workers=both, progress=(progress(3, 3), progress(1, 1, phases=phases))))


RANKS = {"workers": (workers(0),), "progress": (progress(3),)}


@pytest.mark.parametrize(
    ("message", "path", "value"),
    [
        (report(), "sent_at", b"1e999"),
        (report(), "sent_at", b"NaN"),
        (report(), "sent_at", b"-1.0"),
        (report(), "interval_s", b"1e10"),
        (report(), "incarnation", b'"' + b"x" * 65 + b'"'),
        (report(), "incarnation", b'""'),
        (report(), "seq", b"-1"),
        (report(), "seq", b"1" + b"0" * 30),
        (report(**RANKS), "ranks", b"[1000000000]"),
        (report(**RANKS), "ranks", b"[-1]"),
        (report(**RANKS), "steps", b"[-2]"),
        (report(**RANKS), "steps", b"[1" + b"0" * 20 + b"]"),
        (report(**RANKS), "generation", b"4294967296"),
        (report(**RANKS), "job", b'"../etc"'),
        (report(**RANKS), "ranks", b"[]"),
        (report(**RANKS), "phases", b"[99]"),
        (report(**RANKS), "pids", b"[-5]"),
        (report(**RANKS), "beacon_ages_s", b"[-0.5]"),
        (report(completed=(STEPS,)), "completed_at", b"[[-1.0]]"),
        (report(completed=(STEPS,)), "completed_at", b"[]"),
        (report(completed=(STEPS,)), "ranks", b"[]"),
        (report(completed=(STEPS,)), "first_step", b"-2"),
        (report(), "free_port", b"65536"),
        (report(), "failure_domain", b'"' + b"x" * 129 + b'"'),
        (report(signals=(signal(),)), "deadline_at", b"1e300"),
    ],
)
def test_absurd_values_are_named_before_anything_else_is_checked(message: Report, path: str, value: bytes) -> None:
    tree = msgspec.json.decode(encode(message))

    def put(node: Any) -> None:  # noqa: ANN401 - JSON
        for key, below in node.items() if isinstance(node, dict) else enumerate(node):
            if key == path:
                node[key] = msgspec.Raw(value)
            elif isinstance(below, dict | list):
                put(below)

    put(tree)
    with pytest.raises(InvalidMessage):
        decode(msgspec.json.encode(tree), Report)


def test_a_report_of_more_signals_than_are_published_at_once_is_refused() -> None:
    many = tuple(signal(seq) for seq in range(1, 1_002))
    assert isinstance(refusal(Admission(), report(signals=many)), InvalidMessage)
    take(Admission(), report(signals=many[:-1]))


def test_a_host_that_sends_signals_without_end_waits_and_others_do_not() -> None:
    admission = Admission()
    taken = 0
    for tenth in range(1_000):
        now_s = tenth / 10.0
        try:
            admission.check_quota("host-a", now_s=now_s)
        except TooBusy as error:
            assert 0.0 < error.retry_after_s < 30.0, "as long as a daemon waits"
        else:
            admission.spend("host-a", 1, 4 << 20, now_s=now_s)
            taken += 4 << 20
        admission.check_quota("host-b", now_s=now_s)
    assert taken <= (256 << 10) * 110 + (4 << 20)


def test_a_long_spool_gets_through_in_pieces() -> None:
    admission = Admission()
    now_s, left = 0.0, 10_000
    while left:
        try:
            admission.check_quota("host-a", now_s=now_s)
        except TooBusy as error:
            now_s += max(1.0, error.retry_after_s)  # in whole seconds, like the header
        else:
            admission.spend("host-a", 200, 200 * 500, now_s=now_s)
            left -= 200
    assert now_s < 60.0


def test_large_reports_of_one_host_are_refused_before_they_are_decoded() -> None:
    admission = Admission()
    for _ in range(5):
        admission.check_large("host-a", 4 << 20, now_s=0.0)
    admission.check_large("host-a", 4 << 20, now_s=0.0)
    with pytest.raises(TooBusy) as caught:
        admission.check_large("host-a", 40 << 10, now_s=0.0)
    assert caught.value.retry_after_s == pytest.approx(2.0)
    admission.check_large("host-b", 4 << 20, now_s=0.0)
    admission.check_large("host-a", 40 << 10, now_s=2.1)
