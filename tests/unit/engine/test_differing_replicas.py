"""Replicas that differ are reported once per generation, and the daemon makes one signal of each report."""

from __future__ import annotations

from support.hosts.engine_reports import signals_of

from ckpt_engine.host.save_reports import DifferingLog
from ckpt_engine.rules.storage_plan import EqualBytes, OddReplicas, StoragePlan
from flyball.contracts.on_host.engine_wire import DifferingReplicas, EngineReply
from flyball.contracts.reports.signals import ReplicasDiffer, SaveFailed, Signal
from services.record.signal_events import event_of


def compared(
    *odd: OddReplicas,
    equal: tuple[str, ...] = (),
    undecided: tuple[OddReplicas, ...] = (),
    held: bytes = b"",
    at: int = 0,
    ranks: tuple[int, ...] = (0, 1, 2),
) -> StoragePlan:
    """These `ranks` hold `held` of the `equal` ones, which lies `at` this offset."""
    alike = EqualBytes(ranks, (at, 1 << 20), held)
    return StoragePlan({}, 0, odd, {name: (alike,) for name in equal}, undecided)


def log_of_replicas(*names: str, steps: tuple[int, int] = (4, 8), ranks: tuple[int, ...] = (0, 1, 2)) -> DifferingLog:
    """These were equal at both steps, and changed between them."""
    log = DifferingLog("job")
    for step in steps:
        assert log.note(1, -1, step, compared(equal=names, held=b"%d" % step, ranks=ranks), 900.0) == []
    return log


def test_the_same_ranks_are_reported_once_in_a_generation() -> None:
    log = DifferingLog("job")
    some = OddReplicas(("w",), (0, 1), (2,))
    first = log.note(1, -1, 10, compared(some), 1000.0)
    assert first == [DifferingReplicas("job", 1, 10, ("w",), 1, (0, 1), (2,), 1000.0)]
    assert log.note(1, -1, 20, compared(OddReplicas(("w", "v"), (0, 1), (2,))), 1001.0) == []
    assert len(log.note(1, -1, 20, compared(OddReplicas(("w",), (0, 2), (1,))), 1002.0)) == 1
    (again,) = log.note(2, 10, 30, compared(some), 1003.0)
    assert again.generation == 2
    assert [found.differ for found in log.newest()] == [(2,), (1,), (2,)]


def test_a_report_names_the_first_few_of_many_tensors() -> None:
    names = tuple(f"w{number}" for number in range(100))
    (report,) = DifferingLog("job").note(1, -1, 10, compared(OddReplicas(names, (), (0, 1))), 1000.0)
    assert (report.tensors, report.count) == (names[:8], 100)


def test_a_report_names_the_step_at_which_the_tensors_were_last_equal() -> None:
    """Tensors that always differed are left out if others were equal before, and do not hide them."""
    log = log_of_replicas("w", "v")
    own = OddReplicas(("own",), (0, 1), (2,))
    (meant,) = log.note(1, -1, 10, compared(own, equal=("w", "v")), 1000.0)
    assert (meant.tensors, meant.equal_step) == (("own",), -1)
    assert log.note(1, -1, 20, compared(own, equal=("v",)), 1001.0) == []
    (found,) = log.note(1, -1, 30, compared(OddReplicas(("own", "v", "w"), (0, 1), (2,))), 1002.0)
    assert (found.tensors, found.count, found.equal_step) == (("v", "w"), 2, 10)


def test_two_that_were_equal_are_reported_and_two_that_never_were_are_not() -> None:
    log = log_of_replicas("w", ranks=(0, 1))
    pair = (OddReplicas(("w",), (), (0, 1)),)
    own = (OddReplicas(("own",), (), (0, 1)),)
    assert log.note(1, -1, 10, compared(undecided=own), 1000.0) == []
    assert log.note(1, -1, 20, compared(equal=("w",), ranks=(0, 1)), 1001.0) == []
    (found,) = log.note(1, -1, 30, compared(undecided=pair), 1002.0)
    assert (found.agree, found.differ, found.equal_step) == ((), (0, 1), 20)


def test_after_a_restart_the_restored_step_counts_as_equal_at_most() -> None:
    log = log_of_replicas("w", steps=(30, 50))
    (found,) = log.note(2, 40, 60, compared(OddReplicas(("w",), (0, 1), (2,))), 1001.0)
    assert found.equal_step == 40
    (scratch,) = log.note(3, -1, 5, compared(OddReplicas(("w",), (0, 1), (2,))), 1002.0)
    assert scratch.equal_step == -1


ODD = OddReplicas(("w",), (0, 1), (2,))


def test_what_was_equal_once_or_never_changed_is_no_replica() -> None:
    """Zeros of an optimizer at the first step, buffers before training: each rank's own, and alike at first."""
    log = DifferingLog("job")
    for step in (0, 1, 2):
        assert log.note(1, -1, step, compared(equal=("w",), held=b"zeros"), 1000.0) == []
    assert log.note(1, -1, 3, compared(undecided=(OddReplicas(("w",), (), (0, 1)),)), 1001.0) == []
    (found,) = log.note(1, -1, 4, compared(ODD), 1002.0)
    assert found.equal_step == -1


def test_bytes_that_lie_elsewhere_are_not_taken_for_changed_ones() -> None:
    log = DifferingLog("job")
    log.note(1, -1, 0, compared(equal=("w",), held=b"digests"), 1000.0)
    log.note(1, -1, 1, compared(equal=("w",), held=b"of other chunks", at=64), 1000.0)
    (found,) = log.note(1, -1, 2, compared(ODD), 1001.0)
    assert found.equal_step == -1


def test_ranks_that_part_between_steps_at_which_they_are_equal_hold_no_replicas() -> None:
    """Local SGD: some of the compared steps are those at which the ranks average their parameters."""
    log = DifferingLog("job")
    for step in range(0, 60, 20):
        assert log.note(1, -1, step, compared(equal=("w",), held=b"%d" % step), 1000.0) == []
        assert log.note(1, -1, step + 10, compared(undecided=(OddReplicas(("w",), (), (0, 1)),)), 1000.0) == []


def test_what_a_pair_of_ranks_holds_alike_says_nothing_about_all_four() -> None:
    """Two tensor-parallel pairs that train apart. Two steps were compared while only one pair had them."""
    log = log_of_replicas("norm", ranks=(0, 1))
    apart = (OddReplicas(("norm",), (), (0, 1, 2, 3)),)
    assert log.note(1, -1, 10, compared(undecided=apart), 1000.0) == []
    (meant,) = log_of_replicas("norm", ranks=(0, 1)).note(
        1, -1, 10, compared(OddReplicas(("norm",), (0, 1, 2), (3,))), 0
    )
    assert meant.equal_step == -1, "on record only"
    log = log_of_replicas("norm", ranks=(0, 1))
    log.note(1, -1, 9, compared(equal=("norm",), held=b"all", ranks=(0, 1, 2, 3)), 1000.0)
    assert log.note(1, -1, 10, compared(undecided=apart), 1000.0) == [], "of all four it was equal once"


def test_the_newest_step_before_a_harm_is_known_until_the_next_generation() -> None:
    log = log_of_replicas("w", "v")
    assert (log.clean_step(1, None), log.clean_step(1, 5)) == (None, 5)
    log.note(1, -1, 20, compared(OddReplicas(("own",), (0, 1), (2,)), equal=("w", "v")), 1000.0)
    assert log.clean_step(1, None) is None, "it was never equal"
    log.note(1, -1, 30, compared(ODD, equal=("v",)), 1001.0)
    log.note(1, -1, 40, compared(OddReplicas(("v",), (0, 2), (1,))), 1002.0)
    assert (log.clean_step(1, None), log.clean_step(1, 50), log.clean_step(1, 5)) == (20, 20, 5)
    log.note(2, 20, 60, compared(equal=("w", "v")), 1003.0)
    assert log.clean_step(2, None) is None


def test_the_daemon_makes_one_signal_of_a_report_that_its_engine_repeats() -> None:
    found = [DifferingReplicas("job", 1, step, ("w",), 3, (0, 1), (2,), 1000.0 + step) for step in range(2)]
    answers = (found[:1], found, found)
    put = signals_of(*(EngineReply(ok=True, differing=tuple(answer)) for answer in answers))
    assert put == [ReplicasDiffer("job", 1, step, ("w",), 3, (0, 1), (2,)) for step in range(2)]


def test_the_event_names_ranks_and_tensors() -> None:
    body = ReplicasDiffer("job", 1, 10, ("w", "x" * 1000), 20, (0, 1), (2,))
    event = event_of(Signal("host-a", "one", 1, 5.0, body), 6.0)
    assert (event.job, event.generation, event.host_id, event.data["kind"]) == ("job", 1, "host-a", "replicas_differ")
    details = {name: event.data[name] for name in ("step", "tensors", "count", "agree", "differ")}
    assert details == {"step": 10, "tensors": ["w", "x" * 256], "count": 20, "agree": [0, 1], "differ": [2]}


def test_the_event_of_a_save_that_failed_says_why() -> None:
    body = SaveFailed("job", 1, 3, 10, "No space left on device. " * 100)
    event = event_of(Signal("host-a", "one", 1, 5.0, body), 6.0)
    assert (event.rank, event.data["step"]) == (3, 10)
    assert str(event.data["message"]).startswith("No space left") and len(str(event.data["message"])) == 500
