"""Finds the root cause among the failures that ended a generation.

When a worker dies, the others fail within milliseconds with lost connections. Those failures are secondary: they do not
show the cause.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from flyball.contracts.cluster import Phase
from flyball.contracts.decisions import Harm
from flyball.contracts.error_classes import MEANINGS, SECONDARY, ErrorClass, classify
from flyball.contracts.errors import RestoreFailed
from flyball.contracts.reports.signals import RankStalled, WorkerExited, WorkerStartFailed
from services.controller.round.view import ActionView, GenerationView, HostView, PastFailure, RankView
from services.rules.wording import explained, kept, listed, ranks_by_host, ranks_kept, ranks_of, shortened

HOST_SILENT = "host_silent"
HOST_RESTARTED = "host_restarted"
RESTORE_FAILED = "restore_failed"
WORKER_KILLED = "worker_killed"
WORKER_START_FAILED = "worker_start_failed"
WORKER_EXCEPTION = "worker_exception"
RANK_STALLED = "rank_stalled"
FALSE_ALARM = "false_alarm"  # on a job's record only: a stall that proved false
CONNECTION_LOST = "connection_lost"
PREEMPTION_NOTICE = "preemption_notice"
DRAIN_REQUESTED = "drain_requested"
HOST_CONDITION = "host_condition"
SUPERSEDED_WORKERS = "superseded_workers"
START_OVERDUE = "start_overdue"
SAVES_FAILING = "saves_failing"
STRAGGLER = "straggler"
CHECKPOINT_REQUESTED = "checkpoint_requested"  # by an operator
ROOM_TO_GROW = "room_to_grow"  # hosts are free for a job that runs on fewer than it asked for
DOMAIN_SILENT = "domain_silent"  # hosts of several jobs fell silent together; no job's incident
LOSS_DIVERGED = "loss_diverged"
REPLICAS_DIFFER = "replicas_differ"
REPLAY_DIFFERS = "replay_differs"
HARMS = frozenset({LOSS_DIVERGED, REPLICAS_DIFFER, REPLAY_DIFFERS})  # all ranks run, and what they train is wrong
RANKS_PARKED = "ranks_parked"  # at an emergency step that no action knows any more
RANKS_STOPPED = "ranks_stopped"  # by a daemon, or a command that no action knows any more
DEPARTURES = frozenset({PREEMPTION_NOTICE, DRAIN_REQUESTED, HOST_CONDITION})  # a host that works, and must be left
BESIDE_FAILURES = frozenset(
    {*DEPARTURES, SUPERSEDED_WORKERS, SAVES_FAILING, STRAGGLER, ROOM_TO_GROW, CHECKPOINT_REQUESTED}
)  # the generation keeps running

# Each cause explains the later ones. A kill comes before an exception, since not all exceptions that a kill causes
# elsewhere can be recognised by their messages.
ORDERED_CAUSES = (
    HOST_SILENT,
    HOST_RESTARTED,
    RESTORE_FAILED,
    REPLAY_DIFFERS,
    REPLICAS_DIFFER,
    LOSS_DIVERGED,
    WORKER_KILLED,
    WORKER_START_FAILED,
    WORKER_EXCEPTION,
    RANK_STALLED,
    CONNECTION_LOST,
    START_OVERDUE,
    RANKS_PARKED,
    RANKS_STOPPED,
)
CAUSES = frozenset({*ORDERED_CAUSES, *BESIDE_FAILURES, DOMAIN_SILENT})  # all that the policy knows
EXIT_CODE = "exit code"  # the kind of an error of which nothing else is known
_ORDER = {cause: position for position, cause in enumerate(ORDERED_CAUSES)}

# Signals that a process causes itself, for example when library threads outlive the interpreter.
_CRASHES = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})


class Failure(msgspec.Struct, frozen=True):
    """One reason why a generation cannot go on. `at` is the observer's wall clock; step -1: none completed."""

    cause: str
    message: str  # for a person, in complete sentences
    generation: int
    at: float
    quiet_s: float = 0.0  # before `at`: since the last sign of life
    rank: int = -1
    host_id: str = ""
    step: int = -1
    error_kind: str = ""
    error_message: str = ""
    is_step_known: bool = False  # the worker had attached, so -1 means that it completed none
    evidence: Mapping[str, str | int | float | bool | None] = {}
    harm: Harm | None = None

    def explains(self, cause: str) -> bool:
        """Whether this failure explains one with that cause."""
        return _ORDER[self.cause] < _ORDER.get(cause, len(_ORDER))

    @property
    def record(self) -> PastFailure:
        """The entry for the job's record."""
        return PastFailure(
            generation=self.generation,
            cause=self.cause,
            error_kind=self.error_kind,
            error_message=self.error_message,
            step=self.step,
            host_id=self.host_id,
        )


def is_done(rank: RankView) -> bool:
    """Whether the rank's worker ended well. True also if it reported that it was done and then crashed on exit, or
    ended while no daemon could see its exit status."""
    ended = rank.exited
    if ended is None or ended.expected:
        return False
    if ended.exit_code is None and (ended.signal_number is None or ended.signal_number in _CRASHES):
        return Phase.DONE in (rank.phase, ended.last_phase)
    return ended.exit_code == 0


def has_failed(rank: RankView) -> bool:
    """Whether the rank's worker ended, and not well."""
    return rank.exited is not None and not is_done(rank)


def shows_no_steps(rank: RankView) -> bool:
    """Whether the rank runs a script that does not attach, or has not yet."""
    return rank.exited is None and rank.phase is Phase.STARTING


def shows_steps(generation: GenerationView) -> bool:
    """Whether steps have to advance if the ranks train on. A script may report none; once a rank is done, the others
    may have none left."""
    ranks = generation.ranks
    return not any(is_done(rank) for rank in ranks) and not all(shows_no_steps(rank) for rank in ranks)


def crash_after_done(rank: RankView) -> str:
    """Describe a crash on exit after the rank was done, for the evidence; '' if there was none."""
    if rank.exited is None or rank.exited.signal_number is None or not is_done(rank):
        return ""
    return f"rank {rank.rank} on {rank.host_id}: {_signal_name(rank.exited.signal_number)}"


def newest_step_of(rank: RankView, generation: GenerationView) -> int:
    """Return the newest step that a rank is known to have completed; its restored step counts."""
    restored = -1 if generation.restore_step is None else generation.restore_step
    return max(rank.step, restored, rank.exited.last_step if rank.exited else -1)


def newest_common_step(generation: GenerationView) -> int:
    """Return the newest step that all ranks are known to have completed, -1 if none. Ignores ranks that never
    reported."""
    steps = [newest_step_of(rank, generation) for rank in generation.ranks]
    restored = -1 if generation.restore_step is None else generation.restore_step
    return min(steps, default=restored)


def exit_failure(rank: RankView, generation: GenerationView) -> Failure | None:
    """Return the failure of a worker that ended; None if it runs, ended well, or was stopped on command."""
    ended = rank.exited
    if ended is None or ended.expected or is_done(rank):
        return None
    step = newest_step_of(rank, generation)
    who = f"Rank {rank.rank} on {rank.host_id} (pid {ended.pid})"
    is_step_known = step >= 0 or rank.phase is not Phase.STARTING or ended.last_phase not in (None, Phase.STARTING)
    # A script that does not attach may have trained for days.
    before = "before its first step" if is_step_known else "before it reported any step"
    when = before if step < 0 else f"after step {step}"
    kind, text = _error_of(ended)
    cause = _exit_cause(ended, was_restoring=_was_restoring(rank, generation))
    error = f"{kind}: {shortened(text)}" if text else kind
    match cause:
        case "restore_failed":
            message = f"{who} could not restore step {generation.restore_step} from any source ({error})."
        case "connection_lost":
            message = f"{who} lost its connection to the other ranks {when} ({error})."
        case "worker_killed" if ended.signal_number is not None:
            message = f"{who} was killed by signal {ended.signal_number} ({_signal_name(ended.signal_number)}) {when}."
        case "worker_killed":
            message = f"{who} ended {when} while its daemon was being restarted, so its exit status is unknown."
        case _:
            message = f"{who} failed {when} with {error}."
    error_class = class_of_exit(ended)
    return Failure(
        cause=cause,
        message=message + _explained(ended, error_class),
        generation=generation.generation,
        at=rank.exited_at,
        rank=rank.rank,
        host_id=rank.host_id,
        step=step,
        error_kind=kind or (error_class.value if error_class is ErrorClass.HOST_OUT_OF_MEMORY else ""),
        error_message=text,
        is_step_known=is_step_known,
        evidence={
            "rank": rank.rank,
            "host": rank.host_id,
            "pid": ended.pid,
            "step": step,
            "exit_code": ended.exit_code,
            "signal": ended.signal_number,
            "error": error or None,
            "error_class": error_class.value,
            **({"core_dumped": True} if ended.core_dumped else {}),
            **({"kernel": ended.kernel} if ended.kernel else {}),
        },
    )


def class_of_exit(ended: WorkerExited) -> ErrorClass:
    """The class that the daemon found; for a daemon of another release, what its report shows."""
    if ended.error_class in ErrorClass.__members__.values():
        return ErrorClass(ended.error_class)
    error = ended.error
    return classify(
        exit_code=ended.exit_code,
        signal_number=ended.signal_number,
        kind=error.kind if error else "",
        message=error.message if error else "",
        traceback=error.traceback if error else "",
    )


def _explained(ended: WorkerExited, error_class: ErrorClass) -> str:
    meaning = f" This is {MEANINGS[error_class]}." if error_class in MEANINGS else ""
    core = " It dumped core." if ended.core_dumped else ""
    kernel = f" The kernel says: {shortened(ended.kernel)}." if ended.kernel else ""
    return meaning + core + kernel


def start_failure(body: WorkerStartFailed, host_id: str, at: float) -> Failure:
    """Return the failure of a rank that could not be started."""
    return Failure(
        cause=WORKER_START_FAILED,
        message=f"Rank {body.rank} could not be started on {host_id}: {shortened(body.message)}.",
        generation=body.generation,
        at=at,
        rank=body.rank,
        host_id=host_id,
        error_kind=body.code or WORKER_START_FAILED,
        error_message=body.message,
        is_step_known=True,
        evidence={"rank": body.rank, "host": host_id, "error": body.message, "code": body.code},
    )


def failed_starts(actions: Iterable[ActionView], job: str, generation: GenerationView, at: float) -> list[Failure]:
    """Return failures of hosts that replied that they could not start their ranks. With a full disk, a host has no
    other way to report it. Skips hosts whose ranks have all reported since."""
    reported = {rank.rank for rank in generation.ranks}
    ranks = {part.host_id: part.ranks for part in generation.hosts if not reported.issuperset(part.ranks)}
    return [
        start_failure(WorkerStartFailed(job, generation.generation, ranks[host_id][0], message, code), host_id, at)
        for action in actions
        if action.plan.job == job and action.phase == "start" and action.plan.next is not None
        for host_id, (code, message) in action.failed.items()
        if action.plan.next.generation == generation.generation and ranks.get(host_id)
    ]


def stall_failure(body: RankStalled, ranks: Iterable[RankView], at: float) -> Failure:
    """Return the failure of ranks that stopped moving. `ranks` shows their hosts."""
    hosts = {rank.rank: rank.host_id for rank in ranks}
    one = len(body.ranks) == 1
    return Failure(
        cause=RANK_STALLED,
        message=(
            f"{ranks_by_host(body.ranks, hosts)} {'has' if one else 'have'} not moved for {body.silent_s:.1f} s in "
            f"phase {body.phase.name.lower()} after step {body.step}; at most {body.deadline_s:.1f} s were expected"
            f"{f' ({body.limit})' if body.limit else ''}.{f' Seen: {body.seen}.' if body.seen else ''}"
        ),
        generation=body.generation,
        at=at,
        quiet_s=body.silent_s,
        rank=body.ranks[0] if body.ranks else -1,
        host_id=hosts.get(body.ranks[0], "") if body.ranks else "",
        step=body.step,
        is_step_known=True,
        evidence={
            "ranks": ranks_kept(body.ranks),
            "phase": body.phase.name.lower(),
            "step": body.step,
            "silent_s": round(body.silent_s, 3),
            "deadline_s": round(body.deadline_s, 3),
            "deadline_from": body.limit,
            "stance": body.stance,
            "seen": body.seen,
        },
    )


def silence_failure(hosts: Iterable[HostView], generation: GenerationView) -> Failure | None:
    """Return one failure for all silent hosts of the generation; None if there are none."""
    silent = sorted(hosts, key=lambda host: (host.since, host.host_id))
    if not silent:
        return None
    lost = {host.host_id for host in silent}
    ranks = [rank for part in generation.hosts if part.host_id in lost for rank in part.ranks]
    named = listed([host.host_id for host in silent])
    return Failure(
        cause=HOST_SILENT,
        message=explained(f"{named} fell silent with {ranks_of(ranks)}", silent[0].reason),
        generation=generation.generation,
        at=silent[0].since,
        quiet_s=silent[0].since - last_heard_at(silent),
        rank=ranks[0] if ranks else -1,
        host_id=silent[0].host_id,
        step=newest_common_step(generation),
        evidence={"hosts": kept([host.host_id for host in silent]), "ranks": ranks_kept(ranks)},
    )


def last_heard_at(silent: Sequence[HostView]) -> float:
    """When the first of these hosts reported last; when it was called silent if that is not known."""
    return min(min(host.last_report_at or host.since, host.since) for host in silent)


def restart_failure(generation: GenerationView, at: float) -> Failure | None:
    """Return one failure for all ranks whose hosts came back without them; None if there are none."""
    gone = [rank for rank in generation.ranks if rank.is_gone and rank.exited is None]
    if not gone:
        return None
    hosts = sorted({rank.host_id for rank in gone})
    numbers = [rank.rank for rank in gone]
    one = len(hosts) == 1
    return Failure(
        cause=HOST_RESTARTED,
        message=f"{listed(hosts)} came back empty: the {'daemon' if one else 'daemons'} that "
        f"{'runs' if one else 'run'} there now {'knows' if one else 'know'} nothing of {ranks_of(numbers)}.",
        generation=generation.generation,
        at=at,
        rank=numbers[0],
        host_id=hosts[0],
        step=newest_step_of(gone[0], generation),
        evidence={"hosts": kept(hosts), "ranks": ranks_kept(numbers)},
    )


def root_cause(failures: Iterable[Failure]) -> Failure | None:
    """Return the failure that explains the others: the deepest cause, of several the first."""
    return min(failures, key=lambda failure: (_ORDER[failure.cause], failure.at, failure.rank), default=None)


def _exit_cause(ended: WorkerExited, *, was_restoring: bool) -> str:
    kind, _ = _error_of(ended)
    # The exit code alone proves nothing: a script may use any.
    if ended.exit_code == RestoreFailed.exit_code and (kind == RestoreFailed.__name__ or was_restoring):
        return RESTORE_FAILED
    if class_of_exit(ended) in SECONDARY:  # or NCCL's watchdog aborted the process (SIGABRT)
        if ended.signal_number in (None, signal.SIGABRT):
            return CONNECTION_LOST
        return WORKER_KILLED
    if ended.exit_code is None:
        return WORKER_KILLED
    return WORKER_EXCEPTION


def _was_restoring(rank: RankView, generation: GenerationView) -> bool:
    last_phase = rank.exited.last_phase if rank.exited else None
    return generation.restore_step is not None and Phase.RESTORING in (rank.phase, last_phase)


def _error_of(ended: WorkerExited) -> tuple[str, str]:
    if ended.error is not None and (ended.error.kind or ended.error.message):
        return ended.error.kind.rpartition(".")[2] or "an unnamed error", ended.error.message.strip()
    return ("" if ended.exit_code is None else f"{EXIT_CODE} {ended.exit_code}"), ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"
