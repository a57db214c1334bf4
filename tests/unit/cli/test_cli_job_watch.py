"""How `flyball run` waits for its job while the supervisor or the daemon is away."""

from __future__ import annotations

import math
import signal
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from flyball.cli.run import job_watch
from flyball.cli.run.host_leave import HostLeave
from flyball.cli.run.job_watch import DAEMON_RESTART_WINDOW_S, MAX_DAEMON_RESTARTS, JobWatch
from flyball.contracts.cluster import JobSpec
from flyball.contracts.errors import ConfigurationError, FlyballError, NotFound, StorageFull, Unreachable

SPEC = JobSpec(job="job", argv=("t.py",), workdir="/")


def signals_of(*, count: int, first: signal.Signals | None = None) -> Any:  # noqa: ANN401 - as EndSignals
    return SimpleNamespace(count=count, first=first, left_s=inf)


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
    """Out of reach until `back_s`; by then the job has ended."""

    def __init__(self, time: Time, back_s: float) -> None:
        self._time = time
        self._back_s = back_s
        self.error: FlyballError = Unreachable("The supervisor is away.")

    def get(self, _path: str) -> dict[str, Any]:
        if self._time.now_s < self._back_s:
            raise self.error
        return {"state": "succeeded"}

    def post(self, _path: str) -> None:
        raise self.error

    def items(self, _path: str, **_params: object) -> list[dict[str, Any]]:
        return []


class Daemon:
    """Dies whenever it is checked, `deaths` times."""

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
    return JobWatch(Supervisor(time, back_s), SPEC, signals_of(count=0), **more)


def test_an_outage_of_a_clusters_supervisor_does_not_end_training(time: Time) -> None:
    assert watch(time, 10_000.0, away_limit_s=math.inf).wait()["state"] == "succeeded"


def test_a_supervisor_that_ends_with_the_job_gets_a_limited_wait(time: Time) -> None:
    with pytest.raises(Unreachable):
        watch(time, 10_000.0).wait()
    assert 60.0 < time.now_s < 70.0


@pytest.mark.parametrize("error", [StorageFull("The disk is full."), ConfigurationError("Refused."), FlyballError("?")])
def test_no_outage_ends_training(time: Time, error: FlyballError) -> None:
    supervisor = Supervisor(time, 10_000.0)
    supervisor.error = error
    watch = JobWatch(supervisor, SPEC, signals_of(count=0), trains=lambda: time.now_s < 5_000.0)
    with pytest.raises(type(error)):
        watch.wait()
    assert 5_050.0 < time.now_s < 5_080.0


def test_a_final_answer_is_not_retried(time: Time) -> None:
    supervisor = Supervisor(time, 10_000.0)
    supervisor.error = NotFound("There is no such job.")
    with pytest.raises(NotFound):
        JobWatch(supervisor, SPEC, signals_of(count=0), trains=lambda: True).wait()
    assert time.now_s == 0.0


class Given(SimpleNamespace):
    """A supervisor of this process that cannot be restarted."""

    def keep(self) -> None:
        raise FlyballError("The supervisor is given up.", hint="read its log")


def test_training_goes_on_without_the_own_supervisor(time: Time, capsys: pytest.CaptureFixture[str]) -> None:
    watch = JobWatch(
        Supervisor(time, 10_000.0),
        SPEC,
        signals_of(count=0),
        supervisor=Given(),
        trains=lambda: time.now_s < 500.0,
    )
    with pytest.raises(FlyballError, match="given up"):
        watch.wait()
    assert time.now_s > 500.0
    assert capsys.readouterr().err.count("given up") == 1


def test_a_stop_does_not_need_the_own_supervisor(time: Time) -> None:
    signals = signals_of(count=1)
    given = SimpleNamespace(keep=lambda: None, news=SimpleNamespace(wait=time.sleep))
    own = JobWatch(Supervisor(time, 10_000.0), SPEC, signals, supervisor=given)
    assert own.wait()["state"] == "running"
    assert time.now_s < 5.0
    with pytest.raises(Unreachable):  # the hosts of a cluster's supervisor would train on
        JobWatch(Supervisor(time, 10_000.0), SPEC, signals).wait()


def test_a_supervisor_that_ends_with_its_stopped_job_is_not_waited_for(time: Time) -> None:
    class EndsWithTheJob(Supervisor):
        def get(self, path: str) -> dict[str, Any]:
            return {"state": "running", "newest_step": 5} if time.now_s < 3.0 else super().get(path)

        def post(self, _path: str) -> None:
            pass

    signals = signals_of(count=1, first=None)
    watch = JobWatch(EndsWithTheJob(time, 10_000.0), SPEC, signals, trains=lambda: time.now_s < 20.0)
    assert watch.wait()["state"] == "running"
    assert 20.0 < time.now_s < 35.0, "ten seconds after workers were last seen, instead of the usual minute"


def test_a_host_that_leaves_last_ends_without_the_supervisor(time: Time) -> None:
    """All hosts get notice. The one with the supervisor ends before this one's request to stop."""

    class LeavesToo(Supervisor):
        def get(self, path: str) -> dict[str, Any]:
            return {"state": "running"} if time.now_s == 0.0 else super().get(path)

        def everything(self, _path: str) -> list[dict[str, Any]]:
            return [{"host_id": "h1", "state": "healthy", "job": SPEC.job, "preempt_deadline_at": 1.0}]

    signals = signals_of(count=1, first=signal.SIGTERM)
    leave = HostLeave(SPEC, "h1", None)
    assert JobWatch(LeavesToo(time, 10_000.0), SPEC, signals, leave=leave).wait()["state"] == "running"
    assert time.now_s < 5.0
    gone = HostLeave(SPEC, "h1", SimpleNamespace(has_ended=False, give_notice=lambda: None))
    watch = JobWatch(Supervisor(time, 10_000.0), SPEC, signals, leave=gone, away_limit_s=1.0)
    assert watch.wait()["state"] == "running"


def test_a_command_without_a_daemon_of_its_own_announces_no_move(capsys: pytest.CaptureFixture[str]) -> None:
    """The daemon of `flyball host` got no notice: its ranks train on."""
    HostLeave(SPEC, "h0", None).begin(signal.SIGHUP)
    said = capsys.readouterr().err
    assert "this command ends" in said and "moved" not in said


def test_a_daemon_that_keeps_dying_is_given_up(time: Time) -> None:
    hasty = Daemon(MAX_DAEMON_RESTARTS + 1)
    with pytest.raises(Unreachable, match="daemon"):
        watch(time, 50.0, daemon=hasty).wait()
    assert hasty.starts == MAX_DAEMON_RESTARTS
    time.stride_s = DAEMON_RESTART_WINDOW_S
    patient = Daemon(10)
    assert watch(time, time.now_s + 12 * time.stride_s, daemon=patient, away_limit_s=math.inf).wait()
    assert patient.starts == 10


class Deciding:
    """A supervisor whose job is held twice: briefly, then until `end_s`."""

    def __init__(self, time: Time, end_s: float) -> None:
        self._time = time
        self._end_s = end_s

    def get(self, _path: str) -> dict[str, Any]:
        return {"state": "succeeded" if self._time.now_s >= self._end_s else "running"}

    def items(self, _path: str, **_params: object) -> list[dict[str, Any]]:
        made = [("dec-1", "start_job", 0.0), ("dec-2", "hold", 2.0), ("dec-3", "restart_in_place", 4.0)]
        made.append(("dec-4", "hold", 20.0))
        return [
            {"decision_id": name, "kind": kind, "at": at, "reason": "why"}
            for name, kind, at in made
            if at <= self._time.now_s
        ]


def test_a_lasting_hold_is_announced(time: Time, capsys: pytest.CaptureFixture[str]) -> None:
    JobWatch(Deciding(time, 60.0), SPEC, signals_of(count=0)).wait()
    assert capsys.readouterr().err.splitlines() == [
        "flyball: dec-3 restart_in_place at 00:00:04.000 UTC: why",
        "flyball: dec-4 hold at 00:00:20.000 UTC: why",
    ]


class Restarting:
    """A supervisor whose job is restarted twice and ends at 30 s. It returns only the requested decisions."""

    made = ((1, "start_job", 0.0, 2.0), (2, "restart_in_place", 5.0, 9.0), (3, "restart_in_place", 15.0, 19.0))

    def __init__(self, time: Time) -> None:
        self._time = time
        self.given: list[list[str]] = []

    def get(self, _path: str) -> dict[str, Any]:
        return {"state": "succeeded" if self._time.now_s >= 30.0 else "running"}

    def items(self, _path: str, *, job: str, after: str | None = None) -> list[dict[str, Any]]:
        first = int(after.removeprefix("dec-")) if after else 0
        found = [
            {
                "decision_id": f"dec-{number}",
                "kind": kind,
                "at": at,
                "reason": job,
                "action_state": "succeeded" if self._time.now_s >= done_at else "dispatched",
            }
            for number, kind, at, done_at in self.made
            if number > first and at <= self._time.now_s
        ]
        self.given.append([decision["decision_id"] for decision in found])
        return found


def test_settled_decisions_are_not_fetched_again(time: Time, capsys: pytest.CaptureFixture[str]) -> None:
    supervisor = Restarting(time)
    JobWatch(supervisor, SPEC, signals_of(count=0)).wait()
    printed = capsys.readouterr().err.splitlines()
    assert printed == [
        "flyball: dec-2 restart_in_place at 00:00:05.000 UTC: job",
        "flyball: dec-3 restart_in_place at 00:00:15.000 UTC: job",
    ]
    assert max(map(len, supervisor.given)) == 2
    assert supervisor.given[-1] == ["dec-3"]


def test_decisions_of_earlier_runs_are_not_announced(time: Time, capsys: pytest.CaptureFixture[str]) -> None:
    supervisor: Any = Restarting(time)
    time.now_s = 6.0  # dec-2 is made, and its action is under way
    known = job_watch.known_decisions(supervisor, "job")
    watching = JobWatch(supervisor, SPEC, signals_of(count=0))
    watching.leave_out(known)
    watching.wait()
    assert capsys.readouterr().err.splitlines() == ["flyball: dec-3 restart_in_place at 00:00:15.000 UTC: job"]


def test_one_command_of_several_announces_decisions(time: Time, capsys: pytest.CaptureFixture[str]) -> None:
    watching = JobWatch(Restarting(time), SPEC, signals_of(count=0))
    watching.announces_decisions = False
    watching.wait()
    assert capsys.readouterr().err == ""


class Stopping:
    """A supervisor whose job is stopped with the decision, and whose last step is saved at `saved_s`."""

    def __init__(self, time: Time, saved_s: float) -> None:
        self._time = time
        self._saved_s = saved_s

    def get(self, _path: str) -> dict[str, Any]:
        return {"state": "stopped"}

    def items(self, _path: str, **_params: object) -> list[dict[str, Any]]:
        state = "succeeded" if self._time.now_s >= self._saved_s else "acknowledged"
        return [{"decision_id": "dec-1", "kind": "stop_job", "at": 0.0, "reason": "why", "action_state": state}]


def test_a_stopped_job_ends_when_its_last_step_is_saved_or_at_a_deadline(time: Time) -> None:
    assert JobWatch(Stopping(time, 12.0), SPEC, signals_of(count=0)).wait()["state"] == "stopped"
    assert 12.0 <= time.now_s < 14.0
    began_s = time.now_s
    assert JobWatch(Stopping(time, 10_000.0), SPEC, signals_of(count=0)).wait()["state"] == "stopped"
    limit_s = SPEC.stop_grace_s + job_watch.STOP_MARGIN_S
    assert limit_s <= time.now_s - began_s < limit_s + 3.0


def test_a_job_seen_to_succeed_has_even_if_its_supervisor_ends_first(time: Time) -> None:
    class Ends(Stopping):
        def get(self, path: str) -> dict[str, Any]:
            if self._time.now_s > 3.0:
                raise Unreachable("The supervisor is away.")
            return {**super().get(path), "state": "succeeded"}

    assert JobWatch(Ends(time, 10_000.0), SPEC, signals_of(count=0)).wait()["state"] == "succeeded"
    assert time.now_s < 20.0


def test_a_script_that_reports_no_steps_gives_one_warning(time: Time, capsys: pytest.CaptureFixture[str]) -> None:
    class Starting(Supervisor):
        def get(self, path: str) -> dict[str, Any]:
            if self._time.now_s >= self._back_s:
                return super().get(path)
            return {"state": "running", "newest_step": -1, "ranks": [{"phase": "starting"}] * 2}

    JobWatch(Starting(time, 50.0), SPEC, signals_of(count=0)).wait()
    assert "flyball.attach" not in capsys.readouterr().err
    time.now_s = 0.0
    JobWatch(Starting(time, 500.0), SPEC, signals_of(count=0)).wait()
    printed = capsys.readouterr().err
    assert printed.count("t.py has reported no steps so far (see flyball.attach)") == 1
    assert "all ranks are idle for 1800 s (--hang-timeout changes that)" in printed


@pytest.mark.parametrize(("phases", "count"), [(["starting", "exited"], 0), (["starting", "restoring"], 1)])
def test_where_checkpoints_go_is_said_once_a_rank_has_attached(
    time: Time, capsys: pytest.CaptureFixture[str], phases: list[str], count: int
) -> None:
    class Phases(Supervisor):
        def get(self, path: str) -> dict[str, Any]:
            job = {"state": "running", "newest_step": -1, "ranks": [{"phase": phase} for phase in phases]}
            return job if time.now_s < self._back_s else super().get(path)

    followed = JobWatch(Phases(time, 9.0), SPEC, signals_of(count=0))
    followed.once_attached = "checkpoints go to /there"
    followed.wait()
    assert capsys.readouterr().err.count("checkpoints go to /there") == count


def test_a_false_alarm_is_announced_at_once(time: Time, capsys: pytest.CaptureFixture[str]) -> None:
    class Wrong(Supervisor):
        def items(self, _path: str, **_params: object) -> list[dict[str, Any]]:
            rule, reason = "withdraw_a_false_alarm", "The stall was a false alarm."
            return [{"decision_id": "dec-9", "kind": "hold", "at": 1.0, "reason": reason, "rule": rule}]

    JobWatch(Wrong(time, 0.0), SPEC, signals_of(count=0)).wait()
    assert "dec-9 hold at 00:00:01.000 UTC: The stall was a false alarm." in capsys.readouterr().err
