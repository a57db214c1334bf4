"""Injects faults on this machine, and undoes every one of them: at its end, at the end of the injector, or after it.

Only jobs that were started with `--injectable` are touched: the job of the rank; all jobs with ranks on the host; for a
service, all jobs of the cluster.
"""

from __future__ import annotations

import secrets
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from flyball.contracts.clock import Clock
from flyball.contracts.errors import ConfigurationError, FlyballError, Forbidden, NotFound, UsageError
from simulator.inject.faults import (
    Api,
    Injection,
    check_injectable,
    files_of,
    host_of_rank,
    injectable_on,
    note_down,
    open_jobs,
)
from simulator.inject.journal import Journal, JournalEntry
from simulator.inject.kinds.catalog import KINDS, kind_of
from simulator.inject.kinds.kind import FaultSite, FaultTarget, Plan, RealFault

JOIN_TIMEOUT_S = 10.0
ACTING_TIMEOUT_S = 90.0  # a fault waits for its step or phase for 60 s
UNDO_ERRORS = (FlyballError, OSError, ValueError, subprocess.SubprocessError)  # of files, records and commands


class FaultRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to break. The agent takes it as JSON."""

    fault: str
    job: str = ""
    rank: int = -1
    host_id: str = ""
    options: Mapping[str, str] = {}
    lasts_s: float = -1.0  # until it is undone; -1: as the fault has it


class InjectedFault(msgspec.Struct, frozen=True):
    """What was broken, and when."""

    injection_id: str
    fault: str
    at: float  # wall clock, before the first act
    target: str  # in words
    host_id: str
    rank: int
    generation: int
    jobs: tuple[str, ...]
    lasts_s: float  # it is undone after so long; 0: there is nothing to undo
    not_recorded: str = ""  # why the supervisor has no event of it; '': it has


class FaultOffer(msgspec.Struct, frozen=True):
    """One kind of fault, and whether it can be injected."""

    fault: str
    target: str
    about: str
    options: Mapping[str, str | int | float]
    lasts_s: float
    lacks: str  # why it cannot be injected there; '': it can


class _Active:
    def __init__(self, kind: RealFault, plan: Plan) -> None:
        self.kind = kind
        self.plan = plan
        self.over = threading.Event()
        self.thread: threading.Thread | None = None
        self.acting = threading.Lock()  # whoever makes or undoes it; the others wait
        self.failed = False  # at its end it could not be undone


class FaultInjector:
    """As a context manager it undoes what earlier injectors left, and at its end what it did itself."""

    def __init__(
        self,
        api: Api,
        *,
        clock: Clock,
        journal: Journal,
        state_dir: Path | None = None,
        supervisor_dir: Path | None = None,
    ) -> None:
        """`state_dir`: of the host; None: that of the daemon which runs here. `supervisor_dir`: of the services."""
        self._api = api
        self._clock = clock
        self._journal = journal
        self._state_dir = state_dir
        self._supervisor_dir = supervisor_dir
        self._active: dict[str, _Active] = {}
        self._changed = threading.Condition()
        self._acting = 0  # injections that are being made
        self._is_closed = False

    def __enter__(self) -> Self:
        undo_left(self._journal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take no more injections, wait for those that are being made, and undo all. Raises what `undo_all` does."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._acting, ACTING_TIMEOUT_S)
        self.undo_all()

    def offers(self, *, host_id: str = "", job: str = "", rank: int = -1) -> list[FaultOffer]:
        """All kinds of faults, and what is missing for each on that host, or that of the rank."""
        return [self._offer(kind, host_id=host_id, job=job, rank=rank) for kind in KINDS.values()]

    def hosts(self) -> list[str]:
        """The hosts whose daemons run on this machine."""
        found = []
        for host in self._api.get("/v1/hosts")["items"]:
            try:
                files_of(self._api, str(host["host_id"]))
            except FlyballError:  # it is elsewhere, or gone
                continue
            found.append(str(host["host_id"]))
        return found

    def inject(self, request: FaultRequest) -> InjectedFault:
        """Break something. It is undone after `lasts_s`.

        Raises NotFound if it is not there, Forbidden if the job is not injectable or the fault not available here,
        UsageError for bad options. A fault that the supervisor could not record is no error: see `not_recorded`.
        """
        with self._changed:
            if self._is_closed:
                raise Forbidden("The injector is ending: nothing was done.", hint="start it again")
            self._acting += 1
        try:
            return self._inject(request)
        finally:
            with self._changed:
                self._acting -= 1
                self._changed.notify_all()

    def _inject(self, request: FaultRequest) -> InjectedFault:
        kind = kind_of(request.fault)
        site = self._site(kind, request)
        jobs = self._checked_jobs(kind, site)
        if reason := kind.lacks(site):
            raise Forbidden(f"The fault {kind.name} is not available here: {reason}.", hint="choose another fault")
        lasts_s = kind.lasts_s if request.lasts_s < 0 else request.lasts_s
        plan = kind.plan(site)
        target = f"rank {site.rank} on {site.host_id}" if kind.target is FaultTarget.RANK else _target(kind, site)
        self._journal.note(site.injection_id, kind.name, target, plan)
        active = _Active(kind, plan)
        with self._changed:
            self._active[site.injection_id] = active  # before the act: wherever it is broken off, `undo_all` knows it
        at = self._clock.wall_s()
        try:
            with active.acting:
                at = kind.inject(plan) or at
        except BaseException:
            try:
                self.undo(site.injection_id)
            except UNDO_ERRORS:
                active.failed = True
            raise
        if kind.lasts_s:
            self._keep(site.injection_id, active, lasts_s)
        else:
            self._forget(site.injection_id)
            lasts_s = 0.0
        generation = int(plan.get("generation", -1))
        not_recorded = ""
        try:
            note_down(self._api, Injection(kind.name, at, site.host_id, target, jobs, generation, site.rank).events())
        except FlyballError as error:  # the fault may be that very service
            not_recorded = error.message
        return InjectedFault(
            site.injection_id, kind.name, at, target, site.host_id, site.rank, generation, jobs, lasts_s, not_recorded
        )

    def undo(self, injection_id: str) -> None:
        """Undo an injection, if it still lasts; when this returns, it is undone. If undoing raises, the injection stays
        active, and in the journal."""
        with self._changed:
            active = self._active.get(injection_id)
        if active is None:
            return
        active.over.set()
        if active.thread is not None and active.thread is not threading.current_thread():
            active.thread.join(JOIN_TIMEOUT_S)
        if not active.acting.acquire(timeout=ACTING_TIMEOUT_S):
            raise ConfigurationError(
                f"The fault {active.kind.name} is still being made or undone.",
                hint="end its injector, then run `flyball inject undo`",
            )
        try:
            if injection_id not in self._active:
                return  # somebody else has undone it meanwhile
            active.kind.undo(active.plan)
            self._forget(injection_id)
        finally:
            active.acting.release()

    def _forget(self, injection_id: str) -> None:
        self._journal.forget(injection_id)
        with self._changed:
            self._active.pop(injection_id, None)

    def undo_all(self) -> None:
        """Undo each one, whatever becomes of the others. Raises ConfigurationError if some could not be undone."""
        failed: list[str] = []
        for injection_id, active in list(self._active.items()):
            try:
                self.undo(injection_id)
            except UNDO_ERRORS as error:
                why = error.message if isinstance(error, FlyballError) else f"{error}."
                failed.append(f"{active.kind.name} ({injection_id}): {why}")
        if failed:
            raise ConfigurationError(
                f"Not everything that was broken could be undone. {' '.join(failed)}",
                hint="see to it, then run `flyball inject undo`",
            )

    @property
    def active(self) -> tuple[str, ...]:
        """The injections that last at the moment."""
        return tuple(self._active)

    @property
    def failed(self) -> tuple[str, ...]:
        """The active injections that could not be undone when their time was over."""
        return tuple(name for name, active in list(self._active.items()) if active.failed)

    def _keep(self, injection_id: str, active: _Active, lasts_s: float) -> None:
        if active.over.is_set():
            return  # it was undone meanwhile
        timer = threading.Timer(lasts_s, active.over.set)
        timer.daemon = True

        def hold() -> None:
            timer.start()
            try:
                try:
                    active.kind.hold(active.plan, active.over)
                finally:
                    timer.cancel()
                    self.undo(injection_id)
            except UNDO_ERRORS:
                active.failed = True  # `undo_all` tries again, and says why

        active.thread = threading.Thread(target=hold, name=f"inject-{active.kind.name}", daemon=True)
        active.thread.start()

    def _site(self, kind: RealFault, request: FaultRequest) -> FaultSite:
        site = FaultSite(self._api, self._clock, secrets.token_hex(4), supervisor_dir=self._supervisor_dir)
        site = replace(site, values=kind.values(request.options))
        match kind.target:
            case FaultTarget.SERVICE:
                return site
            case FaultTarget.HOST:
                if not request.host_id:
                    raise UsageError(f"The fault {kind.name} needs a host.", hint="name it with --host")
                host_id = request.host_id
            case FaultTarget.RANK:
                if not request.job or request.rank < 0:
                    raise UsageError(f"The fault {kind.name} needs a rank.", hint="name it with --job and --rank")
                host_id = host_of_rank(self._api, request.job, request.rank)
        files = files_of(self._api, host_id, self._state_dir)
        spec = dict(self._api.get(f"/v1/jobs/{request.job}"))["spec"] if request.job else None
        return replace(site, host_id=host_id, files=files, job=request.job, rank=request.rank, spec=spec)

    def _checked_jobs(self, kind: RealFault, site: FaultSite) -> tuple[str, ...]:
        """The jobs that the fault affects. Raises Forbidden if one of them is not injectable."""
        match kind.target:
            case FaultTarget.RANK:
                return check_injectable([self._api.get(f"/v1/jobs/{site.job}")])
            case FaultTarget.HOST:
                return injectable_on(self._api, site.host_id)
            case FaultTarget.SERVICE:
                return check_injectable(open_jobs(self._api))

    def _offer(self, kind: RealFault, *, host_id: str, job: str, rank: int) -> FaultOffer:
        options = {option.name: option.default for option in kind.options}
        try:
            site = self._site(kind, FaultRequest(kind.name, job=job, rank=rank, host_id=host_id))
            lacks = kind.lacks(site)
            if not lacks:
                kind.plan(site)
        except (ConfigurationError, Forbidden, NotFound, UsageError) as error:
            lacks = error.message.rstrip(".")
        return FaultOffer(kind.name, kind.target.value, kind.about, options, kind.lasts_s, lacks)


def undo_left(journal: Journal) -> list[JournalEntry]:
    """Undo what injectors that have ended left behind; returns it. What cannot be undone stays in the journal."""
    undone = []
    for entry in journal.left():
        kind = KINDS.get(entry.fault)
        if kind is None:
            continue
        try:
            kind.undo(entry.plan)
        except UNDO_ERRORS:
            continue
        journal.forget(entry.injection_id)
        undone.append(entry)
    return undone


def _target(kind: RealFault, site: FaultSite) -> str:
    if kind.target is FaultTarget.HOST:
        return f"host {site.host_id}"
    return ", ".join(f"{name} {value}" for name, value in (site.values or {}).items() if name in ("service", "server"))
