"""How `flyball run` waits for its job while supervisor or daemon are away."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from flyball.cli import job_watch
from flyball.cli.job_watch import DAEMON_RESTART_WINDOW_S, MAX_DAEMON_RESTARTS, JobWatch
from flyball.contracts.cluster import JobSpec
from flyball.contracts.errors import Unreachable

SPEC = JobSpec(job="job", argv=("t.py",), workdir="/")


class Time:
    """Every sleep lasts `stride_s`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.stride_s = 1.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, _seconds: float) -> None:
        self.now_s += self.stride_s


class Supervisor:
    """Out of reach until `back_s`, and by then the job has ended."""

    def __init__(self, time: Time, back_s: float) -> None:
        self._time = time
        self._back_s = back_s

    def get(self, _path: str) -> dict[str, Any]:
        if self._time.now_s < self._back_s:
            raise Unreachable("The supervisor is away.")
        return {"state": "succeeded"}

    def items(self, _path: str, **_params: object) -> list[dict[str, Any]]:
        return []


class Daemon:
    """Dies whenever it is looked at, `deaths` times."""

    def __init__(self, deaths: int) -> None:
        self.deaths = deaths
        self.starts = 0

    def check(self) -> None:
        if self.deaths:
            self.deaths -= 1
            raise Unreachable("The host daemon was ended by signal 9.")

    def start(self) -> None:
        self.starts += 1


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(job_watch, "time", time)
    return time


def watch(time: Time, back_s: float, **more: object) -> JobWatch:
    return JobWatch(Supervisor(time, back_s), SPEC, SimpleNamespace(count=0), **more)


def test_the_outage_of_a_clusters_supervisor_does_not_end_training(time: Time) -> None:
    assert watch(time, 10_000.0, away_limit_s=math.inf).wait()["state"] == "succeeded"


def test_a_supervisor_that_ends_with_the_job_is_waited_for_a_while(time: Time) -> None:
    with pytest.raises(Unreachable):
        watch(time, 10_000.0).wait()
    assert 60.0 < time.now_s < 70.0


def test_a_daemon_that_keeps_dying_is_given_up_and_a_rare_death_is_not(time: Time) -> None:
    hasty = Daemon(MAX_DAEMON_RESTARTS + 1)
    with pytest.raises(Unreachable, match="daemon"):
        watch(time, 50.0, daemon=hasty).wait()
    assert hasty.starts == MAX_DAEMON_RESTARTS
    time.stride_s = DAEMON_RESTART_WINDOW_S
    patient = Daemon(10)
    assert watch(time, time.now_s + 12 * time.stride_s, daemon=patient, away_limit_s=math.inf).wait()
    assert patient.starts == 10
