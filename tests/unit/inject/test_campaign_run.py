"""A campaign against a supervisor that answers from a script: what it waits for, and what it reports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import Forbidden, Unreachable
from simulator.inject.campaign.draws import Draw
from simulator.inject.campaign.mixes import MixedFault
from simulator.inject.campaign.outcome import FaultOutcome, FaultVerdict
from simulator.inject.campaign.run import Campaign
from simulator.inject.injector import FaultRequest, InjectedFault

KILL = Draw(0.0, MixedFault("kill", 1.0, "CPU"), 0.9)


class PlayedApi:
    """One job of two ranks, which makes five steps whenever somebody looks. A fault opens an incident, which is closed
    at the second look; `fails`: the job does not survive it."""

    def __init__(self, *, fails: bool = False, refuses: bool = False) -> None:
        self.fails, self.refuses = fails, refuses
        self.step, self.looks = 0, 0
        self.requests: list[FaultRequest] = []

    @property
    def active(self) -> tuple[str, ...]:
        return ()

    def inject(self, request: FaultRequest) -> InjectedFault:
        if self.refuses:
            raise Forbidden("Job gpt may not be broken on purpose.", hint="mark it")
        self.requests.append(request)
        return InjectedFault("one", "kill", 100.0, "rank 1 on host-b", "host-b", 1, 1, ("gpt",), 0.0)

    def get(self, path: str, **_: str | int | None) -> Any:  # noqa: ANN401 - JSON
        if path == "/v1/jobs/gpt":
            self.step += 5
            ranks = [{"rank": 0, "host_id": "host-a"}, {"rank": 1, "host_id": "host-b"}]
            state = "failed" if self.fails and self.requests else "running"
            return {"job": "gpt", "state": state, "message": "no more", "newest_step": self.step, "ranks": ranks}
        assert path == "/v1/incidents"
        if not self.requests:
            return {"items": []}
        self.looks += 1
        incident = {
            "incident_id": "inc-1",
            "cause": "worker_killed",
            "signal": "worker_exited",
            "state": "resolved" if self.looks > 1 else "open",
            "host_id": "host-b",
            "opened_at": 100.5,
            "observed_at": 100.2,
            "resolved_at": 102.0,
            "decisions": ["restart_in_place"],
            "lost_steps": 0,
            "message": "",
            "holding_for": "",
        }
        return {"items": [incident]}

    def post(self, path: str, body: object = None) -> None:
        raise AssertionError(f"{path}: the injector records faults, not the campaign: {body}")


class JumpingClock(SystemClock):
    """Goes on by itself and by jumps. Nobody waits for it."""

    jumped_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.jumped_s

    def sleep(self, _seconds: float, /) -> None:
        time.sleep(0)  # the other threads run


def campaign(api: PlayedApi, lines: list[str] | None = None, **settings: Any) -> Campaign:  # noqa: ANN401 - of it
    usual = {"clock": JumpingClock(), "announce": [].append if lines is None else lines.append, "patience_s": 30.0}
    return Campaign(api, api, job="gpt", **(usual | settings))


def test_a_fault_is_followed_until_the_job_trains_again() -> None:
    api, lines = PlayedApi(), []
    outcomes, early = campaign(api, lines).run([KILL])
    assert early == "" and [o.verdict for o in outcomes] == [FaultVerdict.RECOVERED]
    assert (outcomes[0].recovered_s, outcomes[0].stands_for) == (2.0, "CPU")
    assert api.requests == [FaultRequest("kill", job="gpt", rank=1)], "the place of the draw, among two ranks"
    assert "recovered after 2.0 s" in lines[0]


def test_a_job_that_a_fault_ends_is_the_fault_that_was_handled_wrong() -> None:
    outcomes, early = campaign(PlayedApi(fails=True), []).run([KILL, KILL])
    assert "the job has ended: failed" in early
    assert [o.verdict for o in outcomes] == [FaultVerdict.WRONG] and "has ended" in outcomes[0].why


def test_what_cannot_be_injected_is_in_the_report() -> None:
    outcomes, _ = campaign(PlayedApi(refuses=True), []).run([KILL])
    assert (outcomes[0].verdict, outcomes[0].why) == (
        FaultVerdict.NOT_INJECTED,
        "Job gpt may not be broken on purpose.",
    )


def test_a_supervisor_that_stays_away_ends_the_campaign_and_leaves_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    api = PlayedApi()
    running = campaign(api, patience_s=0.0)
    answer = api.get

    def get(path: str, **query: str | int | None) -> Any:  # noqa: ANN401 - JSON
        if len(api.requests) > 1:
            raise Unreachable("The supervisor is away.", hint="wait")
        return answer(path, **query)

    monkeypatch.setattr(api, "get", get)
    outcomes, early = running.run([KILL, KILL, KILL])
    assert len(outcomes) == 1 and len(api.requests) == 2
    assert "fault 2 (kill, rank 1 on host-b) was injected, and has no verdict: The supervisor is away." in early


def test_an_interrupted_campaign_reports_what_there_is() -> None:
    api = PlayedApi()
    running = campaign(api, is_over=lambda: bool(api.requests))
    later = Draw(1e9, KILL.fault, 0.0)
    outcomes, early = running.run([KILL, later])
    assert early == "it was interrupted" and len(outcomes) <= 1


class SlowApi(PlayedApi):
    """The incident of the first fault stays open until the second one has struck."""

    def get(self, path: str, **query: str | int | None) -> Any:  # noqa: ANN401 - JSON
        found = super().get(path, **query)
        if path == "/v1/incidents" and len(self.requests) == 1:
            found["items"][0]["state"] = "open"
        return found


def test_with_overlap_a_fault_strikes_while_another_has_no_verdict() -> None:
    api, lines = SlowApi(), []
    running = campaign(api, lines, overlap=True)
    outcomes, early = running.run([KILL, KILL])
    assert early == "" and [o.number for o in outcomes] == [1, 2]
    assert [o.verdict for o in outcomes] == [FaultVerdict.RECOVERED] * 2, "one incident was both"
    assert [o.why for o in outcomes] == ["at the same time as 2", "at the same time as 1"]


def test_with_overlap_a_job_that_fails_ends_the_campaign() -> None:
    api = PlayedApi(fails=True)
    running = campaign(api, overlap=True)
    outcomes, early = running.run([KILL] * 5)
    assert "the job has ended" in early and len(api.requests) < 5
    assert all(o.verdict is FaultVerdict.WRONG for o in outcomes)


class StruckAgain(PlayedApi):
    """As soon as the incident is closed and the job trains again, another fault opens another one."""

    trains_again = False

    def get(self, path: str, **query: str | int | None) -> Any:  # noqa: ANN401 - JSON
        found = super().get(path, **query)
        if path == "/v1/jobs/gpt":
            self.trains_again = self.looks > 1
        elif self.trains_again:
            found["items"].append({**found["items"][0], "incident_id": "inc-2", "state": "open"})
        return found


def test_with_overlap_an_incident_that_opens_after_the_recovery_is_the_next_faults() -> None:
    api = StruckAgain()
    running = campaign(api, patience_s=5.0, overlap=True)
    [outcome], _ = running.run([KILL])
    assert (outcome.verdict, outcome.incident_ids) == (FaultVerdict.RECOVERED, ("inc-1",))


class TwoFaults(PlayedApi):
    """A fault at 100, another at 200. The incident of the second one appears at the fourth look after it; the first
    one's goes on as `first` says, after 200, too."""

    def __init__(self, **first: Any) -> None:  # noqa: ANN401 - of an incident
        super().__init__()
        self.first = first
        self.looks_since = 0
        self.until_injected: Callable[[], object] = lambda: None

    def inject(self, request: FaultRequest) -> InjectedFault:
        if not self.requests:
            return super().inject(request)
        self.until_injected()
        done = super().inject(request)
        return msgspec.structs.replace(done, fault="nan", at=200.0)

    def get(self, path: str, **query: str | int | None) -> Any:  # noqa: ANN401 - JSON
        found = super().get(path, **query)
        if path == "/v1/incidents" and found["items"]:
            [usual] = found["items"]
            found["items"] = [usual | self.first]
            self.looks_since += len(self.requests) > 1
            if self.looks_since > 3:
                mine = {"incident_id": "inc-2", "cause": "loss_diverged", "opened_at": 200.5, "state": "resolved"}
                found["items"].append(usual | mine)
        return found


def test_with_overlap_an_incident_that_only_ends_after_a_fault_is_not_waited_for_in_its_place() -> None:
    api = TwoFaults(state="open")

    def open_no_longer() -> None:
        api.first = {"state": "resolved", "timeline": [{"at": 201.0, "state": "resolved", "cause": ""}]}

    api.until_injected = open_no_longer
    running = campaign(api, overlap=True)
    outcomes, _ = running.run([KILL, KILL])
    assert [(o.verdict, o.incident_ids) for o in outcomes][1] == (FaultVerdict.RECOVERED, ("inc-2",))


def test_with_overlap_an_incident_that_stays_open_is_held_against_one_fault_only() -> None:
    clock = JumpingClock()
    api = TwoFaults(state="open", timeline=[{"at": 200.2, "state": "acting", "cause": "worker_killed"}])

    def judged(_: FaultOutcome) -> None:
        clock.jumped_s = 1e6

    running = campaign(api, clock=clock, patience_s=0.05, overlap=True, judged=judged)
    outcomes, _ = running.run([KILL, Draw(1e5, KILL.fault, 0.9)])
    assert [o.verdict for o in outcomes] == [FaultVerdict.WRONG, FaultVerdict.RECOVERED], outcomes
    assert outcomes[1].incident_ids == ("inc-2",)


def test_with_overlap_a_fault_that_is_judged_while_the_next_is_injected_is_beside_it() -> None:
    api, is_judged = TwoFaults(state="open"), threading.Event()
    running = campaign(api, overlap=True, judged=lambda _: is_judged.set())

    def until_the_first_is_judged() -> None:
        api.first = {"state": "resolved"}
        assert is_judged.wait(30.0)

    api.until_injected = until_the_first_is_judged
    outcomes, _ = running.run([KILL, KILL])
    assert outcomes[1].beside == (1,)


def test_with_overlap_a_harm_that_the_restart_of_another_brought_back_is_waited_for() -> None:
    api, is_judged = TwoFaults(state="open"), threading.Event()
    running = campaign(api, overlap=True, judged=lambda _: is_judged.set())

    def until_the_first_is_judged() -> None:
        restart = {"at": 200.2, "state": "acting", "cause": "worker_killed"}  # it restored what the NaN had spoilt
        api.first = {"state": "resolved", "timeline": [restart]}
        assert is_judged.wait(30.0)

    api.until_injected = until_the_first_is_judged
    outcomes, _ = running.run([KILL, KILL])
    assert outcomes[1].incident_ids == ("inc-1", "inc-2")


class OpenForLong(PlayedApi):
    """The incident is open for fifty looks, or for longer."""

    is_open: Callable[[], bool] = staticmethod(lambda: False)

    def get(self, path: str, **query: str | int | None) -> Any:  # noqa: ANN401 - JSON
        found = super().get(path, **query)
        if path == "/v1/incidents" and found["items"] and (self.looks < 50 or self.is_open()):
            found["items"][0]["state"] = "open"
        return found


@pytest.mark.parametrize(("fault", "judged_before"), [("out-of-memory", 1), ("kill", 0)])
def test_with_overlap_equal_errors_of_the_script_are_apart(fault: str, judged_before: int) -> None:
    """Two at one step are a bug of the script to the supervisor, which rightly ends the job."""
    api, judged, before = OpenForLong(), [], []

    class Hurrying(JumpingClock):
        def sleep(self, seconds: float, /) -> None:
            if len(before) > 1:  # the second error has no incident of its own, and is waited for in vain
                self.jumped_s += seconds
            super().sleep(seconds)

    running = campaign(api, clock=Hurrying(), patience_s=5.0, overlap=True, judged=judged.append)
    inject = api.inject
    if not judged_before:
        api.is_open = lambda: len(before) < 2  # type: ignore[method-assign]

    def injected(request: FaultRequest) -> InjectedFault:
        before.append(len(judged))
        return inject(request)

    api.inject = injected  # type: ignore[method-assign]
    running.run([Draw(0.0, MixedFault(fault, 1.0), 0.9)] * 2)
    assert before == [0, judged_before]


class CutOff(PlayedApi):
    """The network of a host is cut until the campaign has asked for the third time; its return is an incident, too."""

    asked = 0

    @property
    def active(self) -> tuple[str, ...]:
        self.asked += 1
        return ("one",) if self.asked < 4 else ()

    def inject(self, request: FaultRequest) -> InjectedFault:
        return msgspec.structs.replace(super().inject(request), fault="net-cut")

    def get(self, path: str, **query: str | int | None) -> Any:  # noqa: ANN401 - JSON
        found = super().get(path, **query)
        if path == "/v1/incidents" and found["items"]:
            found["items"][0]["cause"] = "host_silent"
            if self.asked > 3:
                found["items"].append({**found["items"][0], "incident_id": "inc-2", "cause": "superseded_workers"})
        return found


def test_what_the_return_of_a_host_brings_is_of_the_fault_that_cut_it_off() -> None:
    api = CutOff()
    running = campaign(api, overlap=True)
    [outcome], _ = running.run([KILL])
    assert (outcome.verdict, outcome.incident_ids) == (FaultVerdict.RECOVERED, ("inc-1", "inc-2"))


def test_with_overlap_an_incident_held_against_another_fault_that_takes_up_this_one_is_its_own() -> None:
    """A harm waited for a person; then a rank raised, and the same incident restarted the job for that."""
    clock = JumpingClock()
    api = TwoFaults(state="open")

    def judged(_: FaultOutcome) -> None:
        clock.jumped_s = 1e6
        restart = {"at": 200.3, "state": "acting", "cause": "loss_diverged"}
        api.first = {"state": "resolved", "cause": "loss_diverged", "timeline": [restart]}
        api.looks_since = -1000  # no other incident comes

    running = campaign(api, clock=clock, patience_s=0.05, overlap=True, judged=judged)
    outcomes, _ = running.run([KILL, Draw(1e5, KILL.fault, 0.9)])
    assert [(o.verdict, o.incident_ids) for o in outcomes] == [
        (FaultVerdict.WRONG, ("inc-1",)),
        (FaultVerdict.RECOVERED, ("inc-1",)),
    ]
