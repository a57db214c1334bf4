"""The log of restores: a reader that asks for everything after the last report gets each exactly once, in whatever
order the ranks' threads took the time."""

from __future__ import annotations

from ckpt_engine.host.restoring import RestoreLog
from flyball.contracts.checkpoints import RestoreReport, Tier


def restored(rank: int, at: float) -> RestoreReport:
    return RestoreReport("job", 2, rank, 5, Tier.MEMORY, "host", size_bytes=1, socket_bytes=0, seconds=0.1, at=at)


def test_a_restore_that_took_the_time_first_and_was_added_last_is_reported() -> None:
    log = RestoreLog()
    log.add(restored(1, 100.5))
    (first,) = log.since(0.0)
    log.add(restored(0, 100.4))  # its thread was delayed, and the daemon asked meanwhile
    log.add(restored(2, 40.0))  # the clock was set back
    later = log.since(first.at)
    assert [report.rank for report in later] == [0, 2]
    assert first.at < later[0].at < later[1].at < 100.6
    assert log.since(later[-1].at) == ()


def test_restores_have_the_times_at_which_they_were_done() -> None:
    log = RestoreLog()
    for rank, at in enumerate((1.0, 2.0, 3.0)):
        log.add(restored(rank, at))
    assert [(report.rank, report.at) for report in log.since(1.0)] == [(1, 2.0), (2, 3.0)]
