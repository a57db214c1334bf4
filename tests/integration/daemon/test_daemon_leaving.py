"""SIGTERM to a real daemon with a worker: it gives notice, and serves until it is no longer needed."""

from __future__ import annotations

import signal
from itertools import count

from support.clocks.waits import until

from flyball.contracts.decisions import UpdateState
from flyball.contracts.reports.drains import Departure
from flyball.contracts.reports.signals import PreemptionNotice

WAIT = """
import signal
print("up", flush=True)
while True:
    signal.pause()
"""


def notices(supervisor) -> list[PreemptionNotice]:
    return [signal_.body for signal_ in supervisor.signals() if isinstance(signal_.body, PreemptionNotice)]


def told_to_end(daemon, supervisor, job, timeout_s: str, generations) -> int:
    """Make a daemon with a worker give notice. Returns the worker's generation.

    A supervisor that does not answer at once is not waited for, and right so: where this process was held up, the
    daemon ends without a notice, and it is tried again with the next.
    """
    before = len(notices(supervisor))
    for generation in generations:
        if daemon.process is None or daemon.process.poll() is not None:
            daemon.start("--leave-timeout-s", timeout_s)
        job.start(generation)
        job.wait_up(generation)
        daemon.process.send_signal(signal.SIGTERM)
        until(lambda: len(notices(supervisor)) > before or daemon.process.poll() is not None, "a notice")
        if "leaving_unannounced" not in daemon.log():
            until(lambda: len(notices(supervisor)) > before, "the notice")
            assert notices(supervisor)[-1].source == "sigterm"
            return generation
        daemon.process.wait(120)
        daemon.log_path.unlink()
        assert generation < 10
    raise AssertionError("there are always more generations")


def test_it_serves_until_its_ranks_train_elsewhere(daemon, supervisor, make_job) -> None:
    job, generations = make_job(WAIT), count(1)
    generation = told_to_end(daemon, supervisor, job, "600", generations)
    assert job.stop(generation).state is UpdateState.SUCCEEDED
    until(lambda: supervisor.newest.facts.engine_address, "the engine, whose state must still be fetched")
    assert daemon.process.poll() is None
    supervisor.departure = Departure(may_leave=True)
    assert daemon.process.wait(120) == 0
    until(lambda: not daemon.owned(), "the end of all its processes")
    daemon.start("--leave-timeout-s", "600")
    until(lambda: len(notices(supervisor)) == 2, "the withdrawal of the notice")
    assert notices(supervisor)[1].deadline_at == 0.0

    supervisor.departure = Departure(may_leave=False, waits_for="the test")
    told_to_end(daemon, supervisor, job, "600", generations)
    assert len(notices(supervisor)) == 3
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(120) == 0, "after a second signal it does not wait"
    until(lambda: not daemon.owned(), "the end of all its processes")


def test_it_ends_its_workers_itself_when_time_is_up(daemon, supervisor, make_job) -> None:
    told_to_end(daemon, supervisor, make_job(WAIT), "0.5", count(1))
    assert daemon.process.wait(120) == 0
    assert "leaving_overdue" in daemon.log()
    assert supervisor.exit_of(0).expected
    until(lambda: not daemon.owned(), "the end of all its processes")
