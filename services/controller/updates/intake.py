"""Takes signals and the state of hosts into a round. A signal may come twice, late, or be outdated: then it changes
nothing here, but the loop stores it like all others."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flyball.contracts.cluster import HostState, JobState, Phase
from flyball.contracts.decisions import DecisionKind
from flyball.contracts.reports.drains import DrainState
from flyball.contracts.reports.signals import (
    FalseAlarm,
    HostReturned,
    HostSilent,
    HostSuspect,
    PreemptionNotice,
    RankStalled,
    Signal,
    WorkerExited,
    WorkerStartFailed,
)
from services.controller.round import blast_radius, diagnosis
from services.controller.round.round import Round
from services.controller.round.view import GenerationView, HostView, PastFailure, RankView
from services.controller.rules import health_rules, save_rules, straggler_rules
from services.controller.updates import host_conditions
from services.rules.incident_states import HOST, HostEvent
from services.rules.wording import listed, ranks_of

RELEASED = "an operator released it"  # begins the reason

_NOT_REPORTING = (HostState.SILENT, HostState.SUSPECT)
_WELL = (HostState.HEALTHY, HostState.SPARE)
_WATCHED_S = 20.0
_RETURNED_AFTER_S = 2.0  # a report this much newer than the silence is a return, even without a signal
_STAYED_S = 10.0  # as below, for a host with ranks, which may stand and wait
_OUTLIVED_S = 30.0  # a report this much later than a notice's deadline: the host was not taken away
_SAME_NOTICE_S = 1.0  # notices whose deadlines are this close are the same one


def take_signals(round_: Round, signals: Sequence[Signal]) -> None:
    """Apply all signals, in order."""
    workers = _Workers(round_)
    for signal in signals:
        match signal.body:
            case WorkerExited() as body:
                workers.ended(signal, body)
            case WorkerStartFailed() as body:
                if workers.has_rank(signal.source, body.job, body.generation, body.rank):
                    failure = diagnosis.start_failure(body, signal.source, signal.at)
                    round_.reported.setdefault(body.job, []).append(failure)
            case RankStalled() as body:
                workers.settle()
                _rank_stalled(round_, signal, body)
            case FalseAlarm() as body:
                _false_alarm(round_, body)
            case HostSilent() as body:
                _host_silent(round_, signal, body)
            case HostSuspect() as body:
                _host_suspect(round_, signal, body)
            case HostReturned() as body:
                host = round_.hosts.get(body.host_id)
                if host is not None and host.state in _NOT_REPORTING:
                    _returned(round_, host, f"it reports again, after {body.away_s:.1f} s")
            case PreemptionNotice() as body:
                _preempted(round_, signal, body)
            case (
                _
            ):  # of the others, conditions, failing saves and a harmed training are acted on; the rest is on record
                host_conditions.take_signal(round_, signal)
                save_rules.take_signal(round_, signal)
                health_rules.take_signal(round_, signal)
                straggler_rules.take_signal(round_, signal)
    workers.settle()


def settle_hosts(round_: Round) -> None:
    """Apply what follows from the state of hosts, without signals."""
    host_conditions.settle(round_)
    for host in [host for host in round_.hosts.values() if not _is_quiet(host)]:
        reported_at = min(host.last_report_at, round_.now)  # a sensor's clock may be ahead
        if host.state in _NOT_REPORTING and reported_at > host.since + _RETURNED_AFTER_S:
            _returned(round_, host, "it reports again")
        elif host.left_at and host.job and _may(host, HostEvent.FELL_SILENT):
            reason = f"its daemon ended in order while ranks of job {host.job} were placed on it"
            round_.change_host(host.host_id, HostEvent.FELL_SILENT, reason)
        elif host.state is HostState.IN_REPAIR and not host.stale_jobs:
            round_.change_host(host.host_id, HostEvent.CLEANED, "the superseded workers on it are gone")
        elif host.drain is not None and host.drain.state is DrainState.CANCELLED:
            undrain(round_, host, f"{RELEASED}: it may have work again")
        elif host_conditions.may_release(round_, host):
            rule, reason = "release_a_recovered_host", "the condition that it was cordoned for is over"
            round_.decide_host(host.host_id, DecisionKind.UNCORDON, rule, f"{host.host_id}: {reason}.")
            _release(round_, host, reason)
        elif (
            host.is_unfit and _is_empty(host) and host.state is not HostState.SILENT and _may(host, HostEvent.CORDONED)
        ):
            _left(round_, host)
        elif host.state is HostState.CORDONED and _outlived_its_notice(host):
            reason = f"it reports {_OUTLIVED_S:.0f} s after its deadline, so it was not taken away"
            _release(round_, host, reason)
        elif host.job and 0.0 < host.preempt_deadline_at < host.last_report_at - _STAYED_S and _may_stay(host):
            reason = f"it reports {_STAYED_S:.0f} s after its deadline, so it was not taken away"
            why = f"{host.host_id}: {reason}. Its notice is void."
            round_.decide_host(host.host_id, DecisionKind.HOLD, "withdraw_an_outlived_notice", why)
            round_.change_host(host.host_id, None, reason, preempt_deadline_at=0.0)


def _is_quiet(host: HostView) -> bool:
    """Whether a host is as nearly all are, so that nothing follows from its state."""
    return host.state in _WELL and not (host.conditions or host.left_at or host.drain or host.preempt_deadline_at)


def _is_empty(host: HostView) -> bool:
    """Whether no worker runs or should run on it. Superseded ones are stopped while it is in repair."""
    return not host.job and not host.stale_jobs


def _may_stay(host: HostView) -> bool:
    return host.state not in (HostState.SILENT, HostState.CORDONED)


def _left(round_: Round, host: HostView) -> None:
    """Cordon a host that had to be left, and has no rank any more."""
    if host.is_drained and host.drain is not None:
        why = f": {host.drain.reason}" if host.drain.reason else ""
        reason = f"an operator drained it, and no rank is on it{why}"
        round_.decide_host(host.host_id, DecisionKind.CORDON, "cordon_a_drained_host", f"{host.host_id}: {reason}.")
    elif host.preempt_deadline_at == 0.0 and host.pressing:
        if blast_radius.too_many(round_, (host.host_id,)):
            return  # it gets no work all the same, and is free at once if the report was wrong
        reason = host_conditions.reason_to_cordon(host)
        rule = "cordon_a_host_with_a_condition"
        round_.decide_host(host.host_id, DecisionKind.CORDON, rule, f"{host.host_id}: {reason}")
    else:
        reason = f"no rank is on it any more{f': {host.reason}' if host.reason else ''}"
    round_.change_host(host.host_id, HostEvent.CORDONED, reason)


def undrain(round_: Round, host: HostView, reason: str) -> None:
    """An operator withdraws a drain. Ranks that wait for it train on; those that were moved stay where they are. What
    stands against the host now is overruled."""
    host_conditions.overrule(round_, host)
    if host.state is HostState.CORDONED:
        rule, why = "release_an_undrained_host", f"{host.host_id}: {reason}."
        round_.decide_host(host.host_id, DecisionKind.UNCORDON, rule, why)
        _release(round_, host, reason, ends_drain=True)
    else:
        round_.change_host(host.host_id, None, host.reason, ends_drain=True)


def _release(round_: Round, host: HostView, reason: str, *, ends_drain: bool = False) -> None:
    round_.change_host(host.host_id, HostEvent.RELEASED, reason, preempt_deadline_at=0.0, ends_drain=ends_drain)
    if host.job:
        round_.change_host(host.host_id, HostEvent.ASSIGNED, f"it has ranks of job {host.job}")


def _outlived_its_notice(host: HostView) -> bool:
    is_over = 0.0 < host.preempt_deadline_at < host.last_report_at - _OUTLIVED_S
    return is_over and not host.job and not host.is_drained and not host.pressing


def _present(round_: Round, job: str, generation: int) -> GenerationView | None:
    """The running job's newest generation, if it has this number."""
    view = round_.jobs.get(job)
    if view is None or view.state is not JobState.RUNNING or view.generation is None:
        return None
    return view.generation if view.generation.generation == generation else None


class _Workers:
    """Collects the ended workers of a round. There may be many, so the ranks of a job are rebuilt only once."""

    def __init__(self, round_: Round) -> None:
        self._round = round_
        self._placed: dict[str, dict[str, tuple[int, ...]]] = {}  # job -> host -> its ranks
        self._ranks: dict[str, dict[int, RankView]] = {}
        self._unsettled: dict[str, None] = {}  # jobs

    def has_rank(self, host_id: str, job: str, generation: int, rank: int) -> bool:
        """Whether the host was given this rank in the current generation. Signals about other ranks do not count."""
        present = _present(self._round, job, generation)
        if present is None:
            return False
        if job not in self._placed:
            self._placed[job] = {host.host_id: host.ranks for host in present.hosts}
        return rank in self._placed[job].get(host_id, ())

    def ended(self, signal: Signal, body: WorkerExited) -> None:
        """Note the end of a worker; only its first signal counts."""
        if body.expected or not self.has_rank(signal.source, body.job, body.generation, body.rank):
            return
        generation = self._round.jobs[body.job].generation
        if body.job not in self._ranks and generation is not None:
            self._ranks[body.job] = {rank.rank: rank for rank in generation.ranks}
        ranks = self._ranks[body.job]
        known = ranks.get(body.rank) or RankView(body.rank, signal.source, body.last_step, Phase.STARTING, signal.at)
        if known.exited is None:
            ranks[body.rank] = msgspec.structs.replace(known, exited=body, exited_at=signal.at)
            self._unsettled[body.job] = None

    def settle(self) -> None:
        """Put the ended workers so far into the round."""
        for name in self._unsettled:
            job, ranks = self._round.jobs[name], self._ranks[name]
            assert job.generation is not None  # otherwise no host has a rank of it
            changed = msgspec.structs.replace(job.generation, ranks=tuple(ranks[number] for number in sorted(ranks)))
            self._round.jobs[name] = msgspec.structs.replace(job, generation=changed)
        self._unsettled.clear()


def _rank_stalled(round_: Round, signal: Signal, body: RankStalled) -> None:
    generation = _present(round_, body.job, body.generation)
    if generation is None:
        return
    stalled = frozenset(body.ranks)
    named = [rank for rank in generation.ranks if rank.rank in stalled]
    if named and all(rank.step > body.step and rank.reported_at > signal.at for rank in named):
        return  # they have moved since
    failure = diagnosis.stall_failure(body, generation.ranks, signal.at)
    round_.reported.setdefault(body.job, []).append(failure)


def _false_alarm(round_: Round, body: FalseAlarm) -> None:
    """Record that a stall was a false alarm, also on the job's record: its restart does not count."""
    generation = _present(round_, body.job, body.generation)
    record = PastFailure(body.generation, diagnosis.FALSE_ALARM, "", "", body.step)
    if generation is None or record in round_.jobs[body.job].failures:
        return
    job = round_.jobs[body.job]
    round_.decide_job(
        body.job,
        DecisionKind.HOLD,
        "withdraw_a_false_alarm",
        f"The stall of {ranks_of(body.ranks)} after step {body.step} in generation {body.stalled_generation} was a "
        f"false alarm: generation {body.generation} paused there for {body.paused_s:.1f} s and went on. From now on, "
        f"deadlines of this job are {body.patience:g} times as long; --hang-timeout sets one. "
        "That restart does not count.",
        {"step": body.step, "paused_s": round(body.paused_s, 3), "patience": body.patience},
    )
    round_.change_job(body.job, job.state, job.message, record)


def _host_silent(round_: Round, signal: Signal, body: HostSilent) -> None:
    host = _not_reporting(round_, signal, body)
    if host is None or not _may(host, HostEvent.FELL_SILENT) or _is_watched_elsewhere(round_, host, body):
        return
    seen = f"{listed(body.witnesses)} cannot reach it either" if body.witnesses else "no other host could be asked"
    reason = f"no report for {body.silent_s:.1f} s, where one was due within {body.deadline_s:.1f} s; {seen}."
    if body.together > 1:
        behind = f" behind {body.domain}" if body.domain else ""
        reason += f" {body.together} hosts{behind} fell silent within {body.within_s:.1f} s."
    round_.change_host(body.host_id, HostEvent.FELL_SILENT, reason)


def _is_watched_elsewhere(round_: Round, host: HostView, body: HostSilent) -> bool:
    """Whether another sensor, which can ask the host's neighbours, just reported that it is alive. That sensor will
    also report its end. If that sensor fails, this one finds the host again after this has expired."""
    was_suspected = host.state is HostState.SUSPECT and round_.now < host.since + _WATCHED_S
    return was_suspected and not body.after_suspect and not body.witnesses


def _host_suspect(round_: Round, signal: Signal, body: HostSuspect) -> None:
    host = _not_reporting(round_, signal, body)
    if host is None or not _may(host, HostEvent.SUSPECTED):
        return
    reaches = "reaches" if len(body.reached_by) == 1 else "reach"
    evidence = [f"{listed(body.reached_by)} {reaches} it"] if body.reached_by else []
    evidence += ["the steps of its job advance"] if body.steps_advance or not evidence else []
    reason = (
        f"no report for {body.silent_s:.1f} s, where one was due within {body.deadline_s:.1f} s; but "
        f"{' and '.join(evidence)}: only its way to the supervisor is cut."
    )
    round_.change_host(body.host_id, HostEvent.SUSPECTED, reason)


def _not_reporting(round_: Round, signal: Signal, body: HostSilent | HostSuspect) -> HostView | None:
    """The host, unless another report came during the second half of its silence, to any sensor."""
    host = round_.hosts.get(body.host_id)
    return host if host is not None and host.last_report_at <= signal.at - body.silent_s / 2 else None


def _returned(round_: Round, host: HostView, reason: str) -> None:
    if host.state is HostState.SUSPECT:
        round_.change_host(host.host_id, HostEvent.TRUSTED, reason)
        return
    event = HostEvent.REJOINED if host.job else HostEvent.RETURNED_BUSY if host.stale_jobs else HostEvent.RETURNED
    notice_is_over = 0.0 < host.preempt_deadline_at <= round_.now
    round_.change_host(host.host_id, event, reason, preempt_deadline_at=0.0 if notice_is_over else None)


def _preempted(round_: Round, signal: Signal, body: PreemptionNotice) -> None:
    """Take in a preemption notice. The host's clock may be wrong, so only the remaining time counts, from now: notices
    arrive quickly, or not at all."""
    host = round_.hosts.get(signal.source)
    if host is None:
        return
    if body.deadline_at <= 0.0:
        _notice_is_void(round_, host, f"its preemption notice ({body.source}) was withdrawn")
        return
    remaining_s = body.deadline_at - signal.at
    deadline_at = round_.now + remaining_s
    if abs(host.preempt_deadline_at - deadline_at) < _SAME_NOTICE_S:
        return
    round_.noticed[host.host_id] = signal.at
    reason = f"a preemption notice ({body.source}) gave it {remaining_s:.1f} s."
    round_.change_host(host.host_id, None, reason, preempt_deadline_at=deadline_at)


def _notice_is_void(round_: Round, host: HostView, reason: str) -> None:
    if host.preempt_deadline_at == 0.0:
        return
    if host.state is HostState.CORDONED and not host.is_drained and not host.pressing:
        _release(round_, host, reason)
    else:
        round_.change_host(host.host_id, None, reason, preempt_deadline_at=0.0)


def _may(host: HostView, event: HostEvent) -> bool:
    return event in HOST.table[host.state]
