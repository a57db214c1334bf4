"""Runs a campaign against a job: breaks what was drawn, watches the incidents that follow, and judges them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from flyball.contracts.clock import SleepingClock
from flyball.contracts.cluster import JobState
from flyball.contracts.decisions import IncidentState
from flyball.contracts.errors import FlyballError, NotFound
from simulator.inject.campaign.draws import Draw
from simulator.inject.campaign.outcome import (
    EARLY_S,
    FaultOutcome,
    Incident,
    causes_of,
    incidents_after,
    judge,
    not_injected,
    took_up,
)
from simulator.inject.faults import Api
from simulator.inject.injector import FaultRequest, InjectedFault
from simulator.inject.kinds.catalog import kind_of
from simulator.inject.kinds.kind import FaultTarget

STEPS_BETWEEN = 5  # that the job makes between two faults
LOOK_INTERVAL_S = 0.25
AT_ONCE = 2  # faults without a verdict, with `overlap`
HARM_SHOWS_STEPS = 20  # after a restart: by then a loss that it brought back is noticed
WORKER_EXCEPTION, HOST_SILENT, LOSS_DIVERGED = "worker_exception", "host_silent", "loss_diverged"  # causes


class Hands(Protocol):
    """What injects: on this machine, or through agents."""

    def inject(self, request: FaultRequest) -> InjectedFault: ...

    @property
    def active(self) -> Sequence[str]:
        """The injections that last at the moment."""
        ...


class Ended(Exception):
    """The job has ended, or the campaign was interrupted."""


@dataclass
class _Struck:
    """A fault that was injected, until it has its verdict."""

    number: int
    draw: Draw
    done: InjectedFault
    known: frozenset[str]  # incidents that are not its own
    has_verdict: threading.Event
    beside: list[_Struck]  # faults that had no verdict while it had none

    @property
    def causes_beside(self) -> list[str]:
        return [cause for other in self.beside for cause in kind_of(other.done.fault).causes]


class Campaign:
    """`announce` gets a line for each fault. `is_over()` ends it early."""

    def __init__(
        self,
        api: Api,
        hands: Hands,
        *,
        job: str,
        clock: SleepingClock,
        announce: Callable[[str], None],
        is_over: Callable[[], bool] = lambda: False,
        patience_s: float = 180.0,
        overlap: bool = False,
        judged: Callable[[FaultOutcome], None] = lambda _: None,
    ) -> None:
        """`patience_s`: for the detection of a fault, and then for its recovery. `overlap`: do not wait for the verdict
        of a fault before the next, of which two may be without one. `judged` gets each outcome, in any thread."""
        self._api = api
        self._hands = hands
        self._job = job
        self._clock = clock
        self._announce = announce
        self._is_over = is_over
        self._patience_s = patience_s
        self._overlap = overlap
        self._judged = judged
        self._struck: list[_Struck] = []
        self._outcomes: dict[int, FaultOutcome] = {}
        self._count = 0  # of faults in all

    def run(self, draws: Sequence[Draw]) -> tuple[list[FaultOutcome], str]:
        """The outcomes, and why it ended early: '' if it did not."""
        began_s = self._clock.monotonic_s()
        self._count = len(draws)
        ends: list[str] = []
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="follow") as followers:
            following: list[Future[None]] = []
            try:
                for number, draw in enumerate(draws, 1):
                    while self._clock.monotonic_s() < began_s + draw.at_s:
                        self._look_again()
                    self._make_room(following)
                    self._wait_for_its_like(draw)
                    struck = self._strike(number, draw)
                    if struck is None:
                        continue
                    if self._overlap:
                        following.append(followers.submit(self._follow, struck))
                    else:
                        self._follow(struck)
            except Ended as end:
                ends.append(str(end))
            except FlyballError as error:  # what was found out so far is worth a report all the same
                ends.append(error.message)
            for future in following:
                try:
                    future.result()
                except Ended as end:
                    ends.append(str(end))
        return [self._outcomes[number] for number in sorted(self._outcomes)], ends[0] if ends else ""

    def _make_room(self, following: list[Future[None]]) -> None:
        """Wait until the next fault may strike. Raises Ended if a fault ended the job."""
        if not self._overlap:
            self._settle()
            return
        while sum(not future.done() for future in following) >= AT_ONCE:
            self._look_again()
        for future in following:
            if future.done():
                future.result()

    def _wait_for_its_like(self, draw: Draw) -> None:
        """Two equal exceptions at one step would be a bug of the script to every supervisor, whichever ranks they hit:
        the second strikes when the first has its verdict, with which the job has gone on."""
        if WORKER_EXCEPTION in kind_of(draw.fault.fault).causes:
            alike = [s for s in self._struck if s.draw.fault.fault == draw.fault.fault]
            while not all(s.has_verdict.is_set() for s in alike):
                self._look_again()

    def _settle(self) -> None:
        """Wait until nothing is broken, no incident is open, and the job trains. If that takes too long, go on."""
        self._until(lambda: not self._hands.active, self._patience_s)
        self._until(lambda: not self._open_incidents(), self._patience_s)
        self._trains_on()

    def _strike(self, number: int, draw: Draw) -> _Struck | None:
        """Break what was drawn. None: it could not be broken, and the outcome says so."""
        kind = kind_of(draw.fault.fault)
        # What is open already may be taken for the cause of what this one does: with `overlap` it is its own, too,
        # unless an earlier fault was judged by it. Who has no verdict now is beside it, even if it has one soon after.
        beside = [other for other in self._struck if not other.has_verdict.is_set()]
        judged = {name for outcome in tuple(self._outcomes.values()) for name in outcome.incident_ids}
        known = frozenset(
            str(i["incident_id"])
            for i in self._incidents()
            if not self._overlap or IncidentState(i["state"]).closed or i["incident_id"] in judged
        )
        try:
            done = self._hands.inject(self._request(kind.target, draw))
        except (FlyballError, OSError) as error:
            why = error.message if isinstance(error, FlyballError) else str(error)
            self._tell(not_injected(number, draw.fault, self._clock.wall_s(), why))
            return None
        if done.not_recorded:
            self._announce(f"warning: {done.not_recorded}")
        struck = _Struck(number, draw, done, known, threading.Event(), beside)
        for other in beside:
            other.beside.append(struck)
        self._struck.append(struck)
        return struck

    def _follow(self, struck: _Struck) -> None:
        """Watch what follows a fault, and judge it. Raises Ended if the campaign is over meanwhile."""
        try:
            outcome, end = self._watch(struck)
            if end is None or not self._is_over():  # one that was interrupted has no verdict
                self._tell(outcome)
        except FlyballError as error:
            raise Ended(
                f"the fault {struck.number} ({struck.done.fault}, {struck.done.target}) was injected, and has no "
                f"verdict: {error.message}"
            ) from error
        finally:
            struck.has_verdict.set()
        if end is not None:
            raise end

    def _tell(self, outcome: FaultOutcome) -> None:
        self._outcomes[outcome.number] = outcome
        self._judged(outcome)
        self._announce(_line(outcome, self._count))

    def _watch(self, struck: _Struck) -> tuple[FaultOutcome, Ended | None]:
        done = struck.done
        kind = kind_of(done.fault)

        def followed() -> list[Incident]:
            found = self._incidents()
            new = [i for i in found if i["incident_id"] not in struck.known]
            if self._overlap:
                return incidents_after(
                    [*new, *(i for i in found if i not in new and took_up(i, done.at, kind.causes))], done.at
                )
            return [i for i in new if i["opened_at"] >= done.at - EARLY_S]

        def are_closed() -> bool:
            closed[:] = followed()
            return all(IncidentState(i["state"]).closed for i in closed)

        closed: list[Incident] = []
        is_healed, trains, state, end = False, False, "", None
        try:
            if kind.causes:
                self._until(self._recognition(struck, followed), self._patience_s + done.lasts_s)
            if not kind.causes or HOST_SILENT in kind.causes:  # what the return of a host brings is of its fault
                self._until(lambda: done.injection_id not in self._hands.active, self._patience_s + done.lasts_s)
            is_healed = self._until(are_closed, self._patience_s)
            trains = self._trains_on()
            state = str(self._job_now()["state"])
        except Ended as ended:
            end, state = ended, str(ended)
        outcome = judge(
            number=struck.number,
            fault=kind.name,
            stands_for=struck.draw.fault.stands_for,
            target=done.target,
            at=done.at,
            host_id=done.host_id,
            causes=kind.causes,
            causes_beside=struck.causes_beside,
            beside=[other.number for other in struck.beside],
            incidents=closed if self._overlap and is_healed else followed(),  # not those of a fault that struck since
            trains=trains,
            job_state=state,
        )
        return outcome, end

    def _recognition(self, struck: _Struck, followed: Callable[[], list[Incident]]) -> Callable[[], bool]:
        """Whether a fault was noticed: by itself, or by a restart for a fault beside it, which healed it, too. That
        restart may have restored what a harm had spoilt: then it shows in the next steps."""
        kind = kind_of(struck.done.fault)
        restarted_at: list[int] = []

        def is_recognised() -> bool:
            found = {cause for incident in followed() for cause in causes_of(incident)}
            if found & set(kind.causes):
                return True
            if not found & set(struck.causes_beside) or LOSS_DIVERGED not in kind.causes:
                return bool(found & set(struck.causes_beside))
            step = int(self._job_now()["newest_step"])
            if not restarted_at or step < restarted_at[0]:
                restarted_at[:] = [step]
            return step >= restarted_at[0] + HARM_SHOWS_STEPS

        return is_recognised

    def _request(self, target: FaultTarget, draw: Draw) -> FaultRequest:
        ranks = sorted(self._job_now()["ranks"], key=lambda r: int(r["rank"]))
        if not ranks:
            raise NotFound(f"Job {self._job} has no ranks at the moment.", hint="wait until it runs")
        chosen = ranks[int(draw.place * len(ranks))]
        options = draw.fault.options
        match target:
            case FaultTarget.RANK:
                return FaultRequest(draw.fault.fault, job=self._job, rank=int(chosen["rank"]), options=options)
            case FaultTarget.HOST:
                return FaultRequest(draw.fault.fault, host_id=str(chosen["host_id"]), options=options)
            case FaultTarget.SERVICE:
                return FaultRequest(draw.fault.fault, options=options)

    def _trains_on(self) -> bool:
        """Whether the job makes some more steps."""
        before = int(self._job_now()["newest_step"])
        return self._until(lambda: int(self._job_now()["newest_step"]) >= before + STEPS_BETWEEN, self._patience_s)

    def _job_now(self) -> dict[str, Any]:
        job = self._ask(f"/v1/jobs/{self._job}")
        if JobState(job["state"]).ended:
            raise Ended(f"the job has ended: {job['state']}: {job['message']}")
        return job

    def _incidents(self) -> list[dict[str, Any]]:
        return list(self._ask("/v1/incidents", job=self._job, limit=500)["items"])

    def _open_incidents(self) -> list[dict[str, Any]]:
        return [i for i in self._incidents() if not IncidentState(i["state"]).closed]

    def _ask(self, path: str, **params: str | int | None) -> dict[str, Any]:
        """Ask the supervisor; wait while it is away, since it may be what was broken."""
        until_s = self._clock.monotonic_s() + self._patience_s
        while True:
            try:
                return dict(self._api.get(path, **params))
            except FlyballError:
                if self._clock.monotonic_s() > until_s:
                    raise
            self._look_again()

    def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        until_s = self._clock.monotonic_s() + timeout_s
        while not condition():
            if self._clock.monotonic_s() > until_s:
                return False
            self._look_again()
        return True

    def _look_again(self) -> None:
        if self._is_over():
            raise Ended("it was interrupted")
        self._clock.sleep(LOOK_INTERVAL_S)


def _line(outcome: FaultOutcome, count: int) -> str:
    seen = f", {outcome.detected_as} after {outcome.detected_s:.1f} s" if outcome.detected_as else ""
    back = f", recovered after {outcome.recovered_s:.1f} s" if outcome.recovered_s >= 0 else ""
    why = f" ({outcome.why})" if outcome.why else ""
    return f"{outcome.number}/{count} {outcome.fault} {outcome.target}: {outcome.verdict.value}{seen}{back}{why}"
