"""Which signals change something, and which come too late or from a host that has no say."""

from __future__ import annotations

import msgspec
import pytest
from support.policy.checked import decide
from support.policy.views import KILLED, NOW, SETTINGS, decided, exited, say, view

from flyball.contracts.cluster import Phase
from flyball.contracts.decisions import DecisionKind
from flyball.contracts.reports.signals import (
    EngineRestarted,
    HostReturned,
    HostSilent,
    PeerUnreachable,
    PreemptionNotice,
    RankStalled,
    SaveFailed,
    SaveLate,
    SignalBody,
    WorkerStartFailed,
)


@pytest.mark.parametrize(
    "body",
    [
        exited(generation=1, exit_code=None, signal=9),
        exited(generation=3, exit_code=None, signal=9),
        msgspec.structs.replace(KILLED, job="unknown"),
        msgspec.structs.replace(KILLED, expected=True),
        WorkerStartFailed("job", 1, 0, "gone"),
        RankStalled("job", 1, (0,), Phase.STEP, 5, 3.0, 2.0),
        HostReturned("a", 3.0),
        HostReturned("nobody", 3.0),
        HostSilent("nobody", 3.0, 2.0, ()),
        PreemptionNotice(0.0, "x"),
        PeerUnreachable("b", "x"),
        SaveFailed("job", 2, 0, 5, "x"),
        SaveLate("job", 2, 0, 5, 1.0, 3),
        EngineRestarted("x"),
    ],
)
def test_these_signals_change_nothing(body: SignalBody) -> None:
    assert decide(view(), [say(body)], SETTINGS, NOW).empty


def test_news_of_a_silent_host_that_reported_since_is_old() -> None:
    assert decide(view(), [say(HostSilent("b", 3.0, 2.0, ()), at=NOW - 5)], SETTINGS, NOW).empty


def test_ranks_that_moved_since_are_not_stalled() -> None:
    stall = RankStalled("job", 2, (0, 1), Phase.STEP, 49, 3.0, 2.0)
    assert decide(view(), [say(stall, at=NOW - 5)], SETTINGS, NOW).empty
    assert decided(decide(view(), [say(stall)], SETTINGS, NOW)).kind is DecisionKind.RESTART_IN_PLACE


def test_a_host_is_not_heard_of_the_ranks_of_others() -> None:
    start_failed = WorkerStartFailed("job", 2, 1, "no memory")
    for source in ("a", "c"):
        for body in (KILLED, exited(exit_code=0, error=""), start_failed):
            outcome = decide(view(), [say(body, source=source)], SETTINGS, NOW)
            assert not outcome.decisions and not outcome.incidents, (source, body)
    assert decide(view(), [say(start_failed)], SETTINGS, NOW).decisions


def test_a_host_that_another_sensor_hears_is_not_silent() -> None:
    silent = say(HostSilent("b", 30.0, 30.0, ()), source="sensor.2")
    assert decide(view(), [silent], SETTINGS, NOW).empty  # its last report, 0.1 s ago, went elsewhere
