"""What an engine tells of its restores: each once to who asks for what came after the last, in whatever order the
threads of the ranks took the time."""

from __future__ import annotations

from ckpt_engine.host.restoring import RestoreLog
from flyball.contracts.checkpoints import RestoreReport, Tier


def restored(rank: int, at: float) -> RestoreReport:
    return RestoreReport("job", 2, rank, 5, Tier.MEMORY, "host", size_bytes=1, socket_bytes=0, seconds=0.1, at=at)


def test_a_restore_that_took_the_time_first_and_was_noted_last_is_told() -> None:
    log = RestoreLog()
    log.add(restored(1, 100.5))
    (first,) = log.since(0.0)
    log.add(restored(0, 100.4))  # its thread was held up, and the daemon has asked meanwhile
    log.add(restored(2, 40.0))  # the clock was set back
    told = log.since(first.at)
    assert [report.rank for report in told] == [0, 2]
    assert first.at < told[0].at < told[1].at < 100.6
    assert log.since(told[-1].at) == ()


def test_restores_have_the_moments_at_which_they_were_done() -> None:
    log = RestoreLog()
    for rank, at in enumerate((1.0, 2.0, 3.0)):
        log.add(restored(rank, at))
    assert [(report.rank, report.at) for report in log.since(1.0)] == [(1, 2.0), (2, 3.0)]
