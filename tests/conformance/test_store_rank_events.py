"""A report about a host's ranks is one row of the log, however many ranks there are."""

from __future__ import annotations

from itertools import count

from flyball.contracts.checkpoints import RestoreReport, Tier
from flyball.contracts.events import EventKind, per_rank
from flyball.contracts.reports.signals import RankMarks


def test_the_view_has_when_rank_0_made_its_first_step(port_stores, make) -> None:
    stores = port_stores
    stores.run_job()

    sent_at = count(1010)

    def first_step_at(*marks: RankMarks) -> float:
        at = float(next(sent_at))
        stores.status.record_reports([(make.report("host-a", sent_at=at, marks=marks), at)])
        (job,) = stores.decisions.load_view().jobs
        return float(job.generation.first_step_at)

    assert first_step_at() == 0.0
    assert first_step_at(RankMarks("job", 1, 1, 1.0, 2.0, 0.0, 0.0, 5.0, 0.0)) == 0.0
    assert first_step_at(RankMarks("job", 1, 0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0)) == 0.0
    assert first_step_at(RankMarks("job", 1, 0, 1.0, 2.0, 0.0, 0.0, 6.0, 0.0)) == 6.0
    stores.begin_restart()
    assert first_step_at() == 0.0


def test_a_start_writes_one_event_per_report_and_kind(port_stores, make) -> None:
    stores = port_stores
    stores.run_job()
    before = stores.log.last()

    def marks(rank: int, attached_at: float) -> RankMarks:
        return RankMarks("job", 1, rank, 1.0, attached_at, 0.0, 0.0, 0.0, 0.5 * rank)

    def restored(rank: int) -> RestoreReport:
        return RestoreReport("job", 1, rank, 4, Tier.PEER, "host-b", 1000 + rank, 1000, 0.2, 1005.0 - rank)

    first = make.report("host-a", sent_at=1010.0, marks=tuple(marks(rank, 0.0) for rank in range(2)))
    second = make.report(
        "host-a",
        sent_at=1011.0,
        marks=tuple(marks(rank, 2.0 if rank else 0.0) for rank in range(2)),  # nothing new for rank 0
        restores=tuple(restored(rank) for rank in range(2)),
    )
    for report in (first, second):
        stores.status.record_reports([(report, report.sent_at)])
    stores.status.record_reports([(second, 1012.0)])
    written = [event for _, event in stores.log.read(None, before, 100)]
    assert [(event.kind, event.rank, event.at, event.host_id) for event in written] == [
        (EventKind.RANK_MARKS, -1, 1010.0, "host-a"),
        (EventKind.RANK_MARKS, 1, 1011.0, "host-a"),
        (EventKind.RESTORED, -1, 1005.0, "host-a"),
    ]
    ranks = [[one.rank for one in per_rank(event)] for event in written]
    assert ranks == [[0, 1], [1], [0, 1]]
    one = [*per_rank(written[2])][1]
    assert (one.at, one.data["size_bytes"], one.data["source_tier"]) == (1004.0, 1001, "peer")
