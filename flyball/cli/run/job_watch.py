"""Submit a job, announce the decisions about it, and wait for its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isinf
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import msgspec

from flyball.cli.run.embedded import KeptSupervisor
from flyball.cli.run.host_leave import NOTICES, HostLeave, Next
from flyball.cli.run.host_process import HostProcess
from flyball.cli.show.messages import announce, announce_decision
from flyball.cli.signals import EndSignals
from flyball.contracts.cluster import JobSpec, JobState, Phase
from flyball.contracts.decisions import ActionState
from flyball.contracts.errors import FlyballError, NotFound, StateVersionMismatch, Unauthorized, Unreachable
from flyball.contracts.on_host.os_text import to_text

if TYPE_CHECKING:
    from flyball.cli.reach.client import ApiClient  # its libraries are imported while the daemon starts

LOOK_INTERVAL_S = 0.1
STATUS_INTERVAL_S = 0.25
NEWS_PAUSE_S = 0.02  # after news, because more usually follows at once
STOP_MARGIN_S = 20.0  # on top of the workers' grace period, for decision, engine and replies
LAST_FLUSH_S = 60.0  # on top of that, for writing the newest step to disk or store
BATCH_MARGIN_S = 5.0  # before a batch system's SIGKILL, for this command's own end
AWAY_LIMIT_S = 60.0  # give up a supervisor that ends with the job if it is away this long while nothing trains
AWAY_AT_END_S = 10.0  # the same while the job is being stopped
TRAINS_LOOK_INTERVAL_S = 5.0  # between scans of all processes
MAX_DAEMON_RESTARTS = 3  # within DAEMON_RESTART_WINDOW_S
DAEMON_RESTART_WINDOW_S = 600.0
FALSE_ALARM_RULE = "withdraw_a_false_alarm"  # its decision is a hold that holds nothing: announce it at once
QUIET_DECISIONS = frozenset({"start_job", "complete_job", "stop_job"})
UNATTACHED_IDLE_S = 1800.0  # the supervisor's default (services.sensor.detector.patience)
NO_STEPS_NOTICE_AFTER_S = 60.0  # enough time to import and attach
HOLD_ANNOUNCED_AFTER_S = 5.0  # shorter holds only wait for the cause; longer ones wait for somebody

Job = Mapping[str, Any]
Decision = Mapping[str, Any]
NO_QUERY: Mapping[str, str | float | None] = {}


def submit(client: ApiClient, spec: JobSpec, query: Mapping[str, str | float | None] = NO_QUERY) -> Job:
    """Submit the job. Submitting the same specification twice gives one job; a different one raises Conflict.

    `query` says whether to start an ended job again.
    """
    given = {name: value for name, value in query.items() if value not in ("", None)}
    return dict(client.post(f"/v1/jobs?{urlencode(given)}" if given else "/v1/jobs", _as_text(spec)))


def _as_text(spec: JobSpec) -> JobSpec:
    """What names files and arguments may have bytes that are not UTF-8. The host daemon gets them back."""
    named, replace = spec.checkpoint, msgspec.structs.replace
    folders = replace(named, disk_dir=to_text(named.disk_dir), persistent_dir=to_text(named.persistent_dir))
    argv, log_dir = tuple(map(to_text, spec.argv)), to_text(spec.log_dir)
    return replace(spec, argv=argv, workdir=to_text(spec.workdir), log_dir=log_dir, checkpoint=folders)


def known_decisions(client: ApiClient, job: str) -> list[Decision]:
    """Those about the job so far: of its earlier runs, if it is about to be submitted again."""
    try:
        return list(client.items("/v1/decisions", job=job))
    except FlyballError:  # it is not known yet, or the supervisor is away for a moment: then all are announced
        return []


def _name_of(decision: Decision) -> str:
    """A database that was replaced by an older one gives the same numbers again."""
    return f"{decision['decision_id']} {decision['at']}"


class JobWatch:
    """Follows one job until it ends, for one terminal."""

    def __init__(
        self,
        client: ApiClient,
        spec: JobSpec,
        signals: EndSignals,
        *,
        daemon: HostProcess | None = None,
        supervisor: KeptSupervisor | None = None,
        trains: Callable[[], bool] = lambda: False,
        away_limit_s: float = AWAY_LIMIT_S,
        leave: HostLeave | None = None,
    ) -> None:
        """`trains()`: whether workers run here; if so, wait out any outage of the supervisor.

        `leave`: how this host leaves a job that other hosts can continue.
        """
        self.announces_decisions = True  # else the command of another host does it
        self.once_attached = ""  # to be announced when a rank has called `flyball.attach`
        self._client = client
        self._spec = spec
        self._signals = signals
        self._daemon = daemon
        self._supervisor = supervisor
        self._given_up: FlyballError | None = None  # why the supervisor is gone for good
        self._trains = trains
        self._check_trains_at = 0.0
        self._away_limit_s = away_limit_s
        self._leave = leave
        self._daemon_ended_at: list[float] = []
        self._is_acting = False  # whether an action on the job is in progress
        self._announced: set[str] = set()
        self._settled: str | None = None  # all decisions up to this one are announced and carried out
        self._starting_since = 0.0  # since when all ranks are starting; 0.0 if one is further
        self._held_at: dict[str, float] = {}  # decision -> when its hold was first seen
        self._answered_at = time.monotonic()
        self._was_known = False  # whether the supervisor ever knew the job

    def leave_out(self, known: Iterable[Decision]) -> None:
        """Do not announce these: they are of before."""
        self._announced |= {_name_of(decision) for decision in known}

    def wait(self) -> Job:
        """Wait for the job's end, and return the job; after a second signal, return it as it is."""
        stop_by, ended = 0.0, _UNKNOWN  # `ended`: the job, once its end was seen
        while True:
            polled_at = time.monotonic()
            if stop_by and self._away_limit_s == AWAY_LIMIT_S:  # the supervisor ends with the job
                self._away_limit_s = AWAY_AT_END_S
            try:
                job = self._poll()
            except Unreachable:
                if not stop_by and not self._leaves:
                    raise
                return ended  # the supervisor ended with the job, perhaps before this command saw the job's end
            if job:
                self._announce_missing_steps(job)
            has_ended = job is not None and JobState(job["state"]).ended
            then = self._on_signal(job) if self._signals.count and not (stop_by or has_ended) else Next.WAIT
            if then is Next.END:
                return job or ended
            if then is Next.STOP_JOB:
                announce(self._stops)
                waits_s = self._longest_end_s if self._request_stop() else 0.0
                stop_by = time.monotonic() + waits_s
            if job and has_ended:
                ended = job
                if not self._is_acting:  # everything is cleaned up; the end may have changed what the job's record says
                    return self._as_recorded(job)
                stop_by = stop_by or time.monotonic() + self._longest_end_s
            if self._signals.count > 1 or (stop_by and time.monotonic() > stop_by):
                return job or ended
            while time.monotonic() - polled_at < STATUS_INTERVAL_S:
                self._keep_daemon()
                self._keep_supervisor()
                if self._wait_for_news():
                    break

    @property
    def _longest_end_s(self) -> float:
        """The longest time from the decision that ends a job to the end of its workers and its last save."""
        flush_s = LAST_FLUSH_S if self._spec.checkpoint.is_durable else 0.0
        return min(self._spec.stop_grace_s + flush_s + STOP_MARGIN_S, self._signals.left_s - BATCH_MARGIN_S)

    @property
    def _stops(self) -> str:
        """What the job's stop is announced with."""
        left_s, first = self._signals.left_s, self._signals.first
        if first is None or isinf(left_s):
            return f"stopping job {self._spec.job} (Ctrl-C again: stop at once)"
        return f"{first.name}: the batch system ends this step within {left_s:.0f} s: stopping job {self._spec.job}"

    def _on_signal(self, job: Job | None) -> Next:
        """A person's signal stops the job. A notice only makes this host leave, unless no other host is left."""
        leave = self._leave
        if leave is None or self._signals.first not in NOTICES:
            return Next.STOP_JOB
        if not leave.has_begun:
            leave.begin(self._signals.first)
        try:
            hosts = self._client.everything("/v1/hosts") if job is not None else None
        except FlyballError:
            job = hosts = None
        return leave.next_step(job, hosts, is_acting=self._is_acting)

    def _request_stop(self) -> bool:
        """Ask the supervisor to stop the job. False if that failed for a supervisor of this process, or because all
        hosts leave and its host was first: the workers are then ended directly."""
        try:
            self._client.post(f"/v1/jobs/{self._spec.job}/stop")
        except FlyballError as error:
            has_left = self._leaves and isinstance(error, Unreachable)  # the supervisor's host leaves too
            if self._supervisor is None and self._given_up is None and not has_left:
                raise
            announce(f"{error.message} Ending the workers without it.")
            return False
        return True

    @property
    def _leaves(self) -> bool:
        return self._leave is not None and self._leave.has_begun

    def _wait_for_news(self) -> bool:
        """Wait a moment. Returns True early if a supervisor in this process has news."""
        if self._supervisor is None:
            time.sleep(LOOK_INTERVAL_S)
            return False
        news = self._supervisor.news
        if not news.wait(LOOK_INTERVAL_S):
            return False
        time.sleep(NEWS_PAUSE_S)
        news.clear()
        return True

    def _poll(self) -> Job | None:
        """Fetch the job and announce new decisions. None while the supervisor is out of reach."""
        try:
            job: Job = self._client.get(f"/v1/jobs/{self._spec.job}")
            decisions = self._client.items("/v1/decisions", job=self._spec.job, after=self._settled)
        except FlyballError as error:
            is_forgotten = isinstance(error, NotFound) and self._was_known
            if isinstance(error, _FINAL_ANSWERS) and not is_forgotten:
                raise
            if not self._still_trains():
                raise (self._given_up or error) from None
            if "away" not in self._announced:
                self._announced.add("away")
                why = error.message
                if is_forgotten:  # the database was removed, or replaced by an older one
                    self._settled = None
                    why = f"The supervisor's database no longer knows job {self._spec.job}."
                announce(f"{why} Training goes on; retrying.")
            return None
        self._announced.discard("away")
        self._was_known = True
        self._answered_at = time.monotonic()
        action_states = [d["action_state"] for d in decisions if d.get("action_state")]
        self._is_acting = any(not ActionState(state).ended for state in action_states)
        self._announce_decisions(sorted(decisions, key=lambda d: float(d["at"])))
        self._settle(decisions)
        return job

    def _as_recorded(self, job: Job) -> Job:
        """The job's record, of which `job` may be an older state."""
        try:
            return dict(self._client.get(f"/v1/jobs/{self._spec.job}"))
        except FlyballError:  # the supervisor ends with the job
            return job

    def _announce_missing_steps(self, job: Job) -> None:
        """Warn once if the script reports no steps, because then a hang is detected late."""
        phases = {rank["phase"] for rank in job.get("ranks", ())}
        if phases & _OF_ATTACHED and self.once_attached and not JobState(job["state"]).ended:
            announce(self.once_attached)
            self.once_attached = ""
        if phases != {"starting"} or job["newest_step"] >= 0 or "no steps" in self._announced:
            self._starting_since = 0.0
            return
        now = time.monotonic()
        self._starting_since = self._starting_since or now
        if now - self._starting_since >= NO_STEPS_NOTICE_AFTER_S:
            self._announced.add("no steps")
            limit_s = self._spec.hang_timeout_s or UNATTACHED_IDLE_S
            announce(
                f"{self._spec.argv[0]} has reported no steps so far (see flyball.attach). Without steps, Flyball "
                f"notices a worker's end at once, but a hang only when all ranks are idle for {limit_s:g} s"
                + ("" if self._spec.hang_timeout_s else " (--hang-timeout changes that)")
            )

    def _settle(self, decisions: Sequence[Mapping[str, Any]]) -> None:
        """Stop fetching decisions that are over, except the last: a hold is announced only after a while."""
        for decision in decisions[:-1]:
            state = decision.get("action_state")
            if state and not ActionState(state).ended:
                return
            self._settled = decision["decision_id"]

    def _announce_decisions(self, decisions: Sequence[Mapping[str, Any]]) -> None:
        """Announce each decision once; a hold only if no other decision follows for a while."""
        for decision in decisions:
            name, kind = _name_of(decision), decision["kind"]
            if name in self._announced:
                continue
            if kind == "hold" and decision.get("rule") != FALSE_ALARM_RULE:
                held_at = self._held_at.setdefault(name, time.monotonic())
                if decision is not decisions[-1] or time.monotonic() - held_at < HOLD_ANNOUNCED_AFTER_S:
                    continue
            self._announced.add(name)
            if kind not in QUIET_DECISIONS and self.announces_decisions:
                announce_decision(decision)

    def _still_trains(self) -> bool:
        """Whether workers run here without a supervisor, or did so recently enough to give that time to come back."""
        now = time.monotonic()
        if now >= self._check_trains_at:
            self._check_trains_at = now + TRAINS_LOOK_INTERVAL_S
            if self._trains():
                self._answered_at = now
        return now - self._answered_at <= self._away_limit_s

    def _keep_supervisor(self) -> None:
        """Restart a failed supervisor. If that does not help, training goes on without recovery from faults."""
        if self._supervisor is None:
            return
        try:
            self._supervisor.keep()
        except FlyballError as error:
            self._supervisor, self._given_up = None, error
            announce(f"{error} Training goes on without it until the next fault.")

    def _keep_daemon(self) -> None:
        """Restart a dead host daemon, which then adopts the workers; they live on."""
        if self._daemon is None or self._leaves:
            return
        try:
            self._daemon.check()
        except FlyballError as error:
            now = time.monotonic()
            self._daemon_ended_at = [at for at in self._daemon_ended_at if now - at < DAEMON_RESTART_WINDOW_S] + [now]
            if len(self._daemon_ended_at) > MAX_DAEMON_RESTARTS or error.exit_code in _START_ERRORS:
                raise
            announce(f"the host daemon ended; restarting it ({error.message.splitlines()[0]})")
            self._daemon.start()


_OF_ATTACHED = frozenset(phase.name.lower() for phase in Phase if phase is not Phase.STARTING)
_UNKNOWN: Job = {"state": JobState.RUNNING.value, "message": "was ended before it could stop"}
_FINAL_ANSWERS = (NotFound, Unauthorized, StateVersionMismatch)  # retrying would not help
_START_ERRORS = frozenset({2, 3, 4, 5, 6, 7, 9})  # usage, configuration, port, version, disk, memory, token
