"""Submit a job, tell the decisions about it, and wait for its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from flyball.cli.run.embedded import KeptSupervisor
from flyball.cli.run.host_leave import NOTICES, HostLeave, Next
from flyball.cli.run.host_process import HostProcess
from flyball.cli.show.messages import announce
from flyball.cli.signals import EndSignals
from flyball.contracts.cluster import JobSpec, JobState
from flyball.contracts.decisions import ActionState
from flyball.contracts.errors import FlyballError, NotFound, StateVersionMismatch, Unauthorized, Unreachable

if TYPE_CHECKING:
    from flyball.cli.reach.client import ApiClient  # its libraries are imported while the daemon starts

LOOK_INTERVAL_S = 0.1
STATUS_INTERVAL_S = 0.25
NEWS_PAUSE_S = 0.02  # after news, before the supervisor is asked for it
STOP_MARGIN_S = 20.0  # beyond the workers' grace, for the decision, the engine and the way back
LAST_FLUSH_S = 60.0  # and for the newest step to reach disk or store
AWAY_LIMIT_S = 60.0  # how long a supervisor that ends with the job may be out of reach while nothing trains
AWAY_AT_END_S = 10.0  # and while the job is being stopped
TRAINS_LOOK_INTERVAL_S = 5.0  # all processes are looked through
MAX_DAEMON_RESTARTS = 3  # within DAEMON_RESTART_WINDOW_S
DAEMON_RESTART_WINDOW_S = 600.0
FALSE_ALARM_RULE = "withdraw_a_false_alarm"  # holds nothing, and is said at once
QUIET_DECISIONS = frozenset({"start_job", "complete_job", "stop_job"})
UNATTACHED_IDLE_S = 1800.0  # as the supervisor's default (services.sensor.detector.patience)
SAYS_NO_STEPS_AFTER_S = 60.0  # time enough to import, and to attach
HOLD_TOLD_AFTER_S = 5.0  # a job may be held for a moment, until the cause is known; longer means it waits for somebody

Job = Mapping[str, Any]
NO_QUERY: Mapping[str, str | float | None] = {}


def submit(client: ApiClient, spec: JobSpec, query: Mapping[str, str | float | None] = NO_QUERY) -> Job:
    """Hand the job in. The same specification twice is one job; another one of that name raises Conflict. `query` says
    what becomes of one that has ended."""
    given = {name: value for name, value in query.items() if value not in ("", None)}
    return dict(client.post(f"/v1/jobs?{urlencode(given)}" if given else "/v1/jobs", spec))


class JobWatch:
    """Follows one job until it ends, on behalf of one terminal."""

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
        """`trains` says whether workers live here: then an outage of the supervisor is waited out, however long.
        `leave`: how this host leaves a job that other hosts may go on with."""
        self._client = client
        self._spec = spec
        self._signals = signals
        self._daemon = daemon
        self._supervisor = supervisor
        self._given_up: FlyballError | None = None  # why there is no supervisor any more
        self._trains = trains
        self._look_whether_at = 0.0
        self._away_limit_s = away_limit_s
        self._leave = leave
        self._daemon_ended_at: list[float] = []
        self._is_acting = False  # something that was decided of the job is still being carried out
        self._told: set[str] = set()
        self._settled: str | None = None  # the decision up to which all has been told and carried out
        self._starting_since = 0.0  # all ranks, as far as is known; 0.0: one is further
        self._held_at: dict[str, float] = {}  # when a hold was first seen, by decision
        self._answered_at = time.monotonic()
        self._was_seen = False  # the supervisor knew the job

    def wait(self) -> Job:
        """The job when it has ended, or as it is when the person lost patience (a second Ctrl-C)."""
        stop_by, ended = 0.0, _UNKNOWN  # the job, once it was seen to have ended
        while True:
            shown_at = time.monotonic()
            if stop_by and self._away_limit_s == AWAY_LIMIT_S:  # of a supervisor that ends with the job
                self._away_limit_s = AWAY_AT_END_S
            try:
                job = self._look()
            except Unreachable:
                if not stop_by:
                    raise
                return ended  # it ended with the job, perhaps before this command heard of that
            if job:
                self._announce_missing_steps(job)
            has_ended = job is not None and JobState(job["state"]).ended
            then = self._on_signal(job) if self._signals.count and not (stop_by or has_ended) else Next.WAIT
            if then is Next.END:
                return job or ended
            if then is Next.STOP_JOB:
                announce(f"stopping job {self._spec.job} (again: at once)")
                waits_s = self._end_takes_s if self._ask_to_stop() else 0.0
                stop_by = time.monotonic() + waits_s
            if job and has_ended:
                ended = job
                if not self._is_acting:  # its newest step is brought to disk, and it is tidied up
                    return job
                stop_by = stop_by or time.monotonic() + self._end_takes_s
            if self._signals.count > 1 or (stop_by and time.monotonic() > stop_by):
                return job or ended
            while time.monotonic() - shown_at < STATUS_INTERVAL_S:
                self._keep_all()
                if self._rest():
                    break

    @property
    def _end_takes_s(self) -> float:
        """At most: a job has ended from the decision on; then its workers do, and its last step is saved."""
        flush_s = LAST_FLUSH_S if self._spec.checkpoint.is_durable else 0.0
        return self._spec.stop_grace_s + flush_s + STOP_MARGIN_S

    def _on_signal(self, job: Job | None) -> Next:
        """A person's signal ends the job; any other is a notice for this host, and ends the job only for the last."""
        leave = self._leave
        if leave is None or self._signals.first not in NOTICES:
            return Next.STOP_JOB
        if not leave.has_begun:
            leave.begin(self._signals.first)
        try:
            hosts = self._client.everything("/v1/hosts") if job is not None else None
        except FlyballError:
            job = hosts = None
        return leave.look(job, hosts, is_acting=self._is_acting)

    def _ask_to_stop(self) -> bool:
        """Whether the supervisor will stop the job. One of this process ends with it anyway, and so do the workers."""
        try:
            self._client.post(f"/v1/jobs/{self._spec.job}/stop")
        except FlyballError as error:
            if self._supervisor is None and self._given_up is None:
                raise
            announce(f"{error.message} The workers are ended without it.")
            return False
        return True

    def _rest(self) -> bool:
        """Until the next look at what runs here; whether the supervisor has news, if it lives in this process."""
        if self._supervisor is None:
            time.sleep(LOOK_INTERVAL_S)
            return False
        news = self._supervisor.news
        if not news.wait(LOOK_INTERVAL_S):
            return False
        time.sleep(NEWS_PAUSE_S)  # more follows, as a rule
        news.clear()
        return True

    def _keep_all(self) -> None:
        self._keep_daemon()
        self._keep_supervisor()

    def _look(self) -> Job | None:
        """The job as the supervisor sees it, None while that is out of reach. Decisions are told as they come."""
        try:
            job: Job = self._client.get(f"/v1/jobs/{self._spec.job}")
            decisions = self._client.items("/v1/decisions", job=self._spec.job, after=self._settled)
        except FlyballError as error:
            is_forgotten = isinstance(error, NotFound) and self._was_seen
            if isinstance(error, _FINAL_ANSWERS) and not is_forgotten:
                raise
            if not self._goes_on():
                raise (self._given_up or error) from None
            if "away" not in self._told:
                self._told.add("away")
                why = error.message
                if is_forgotten:  # by a database that was removed, or replaced by an older one
                    self._settled = None
                    why = f"The supervisor's database does not know job {self._spec.job} any more."
                announce(f"{why} Training goes on; asking again.")
            return None
        self._told.discard("away")
        self._was_seen = True
        self._answered_at = time.monotonic()
        action_states = [d["action_state"] for d in decisions if d.get("action_state")]
        self._is_acting = any(not ActionState(state).ended for state in action_states)
        self._tell(sorted(decisions, key=lambda d: float(d["at"])))
        self._settle(decisions)
        return job

    def _announce_missing_steps(self, job: Job) -> None:
        """Once: a script that tells no steps can hang for long before it shows."""
        phases = {rank["phase"] for rank in job.get("ranks", ())}
        if phases != {"starting"} or job["newest_step"] >= 0 or "no steps" in self._told:
            self._starting_since = 0.0
            return
        now = time.monotonic()
        self._starting_since = self._starting_since or now
        if now - self._starting_since >= SAYS_NO_STEPS_AFTER_S:
            self._told.add("no steps")
            limit_s = self._spec.hang_timeout_s or UNATTACHED_IDLE_S
            announce(
                f"{self._spec.argv[0]} tells no steps so far (flyball.attach): a worker that ends is seen at once, "
                f"a hang only when all ranks do nothing for {limit_s:g} s"
                + ("" if self._spec.hang_timeout_s else " (--hang-timeout sets it)")
            )

    def _settle(self, decisions: Sequence[Mapping[str, Any]]) -> None:
        """Of what is over nothing is asked again. The last decision is: a hold may be the last word for a while."""
        for decision in decisions[:-1]:
            state = decision.get("action_state")
            if state and not ActionState(state).ended:
                return
            self._settled = decision["decision_id"]

    def _tell(self, decisions: Sequence[Mapping[str, Any]]) -> None:
        """Each once; a hold only if it is the last word for a while."""
        for decision in decisions:
            name, kind = decision["decision_id"], decision["kind"]
            if name in self._told:
                continue
            if kind == "hold" and decision.get("rule") != FALSE_ALARM_RULE:
                held_at = self._held_at.setdefault(name, time.monotonic())
                if decision is not decisions[-1] or time.monotonic() - held_at < HOLD_TOLD_AFTER_S:
                    continue
            self._told.add(name)
            if kind not in QUIET_DECISIONS:
                announce(f"{name} {kind}: {decision['reason']}")

    def _goes_on(self) -> bool:
        """Whether workers live here without a supervisor. When the last has ended, that gets some time to come back."""
        now = time.monotonic()
        if now >= self._look_whether_at:
            self._look_whether_at = now + TRAINS_LOOK_INTERVAL_S
            if self._trains():
                self._answered_at = now
        return now - self._answered_at <= self._away_limit_s

    def _keep_supervisor(self) -> None:
        """Without one training goes on, but nothing is recovered from: that is said at once, and is the end then."""
        if self._supervisor is None:
            return
        try:
            self._supervisor.keep()
        except FlyballError as error:
            self._supervisor, self._given_up = None, error
            announce(f"{error} Training goes on without it, up to the first fault.")

    def _keep_daemon(self) -> None:
        """A host daemon that dies is started again: it adopts the workers, which live on."""
        if self._daemon is None or (self._leave is not None and self._leave.has_begun):
            return
        try:
            self._daemon.check()
        except FlyballError as error:
            now = time.monotonic()
            self._daemon_ended_at = [at for at in self._daemon_ended_at if now - at < DAEMON_RESTART_WINDOW_S] + [now]
            if len(self._daemon_ended_at) > MAX_DAEMON_RESTARTS or error.exit_code in _START_ERRORS:
                raise
            announce(f"the host daemon ended; starting it again ({error.message.splitlines()[0]})")
            self._daemon.start()


_UNKNOWN: Job = {"state": JobState.RUNNING.value, "message": "was ended before it could stop"}
_FINAL_ANSWERS = (NotFound, Unauthorized, StateVersionMismatch)  # asking again would not help
_START_ERRORS = frozenset({2, 3, 4, 5, 6, 7, 9})  # usage, configuration, port, version, disk, memory, token
