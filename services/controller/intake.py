"""Takes signals and the state of hosts into a round. A signal may come twice, late, or speak of what is long past:
such a one is stored by the loop like all others, and changes nothing here."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flyball.contracts.cluster import HostState, JobState, Phase
from flyball.contracts.signals import (
    HostReturned,
    HostSilent,
    PreemptionNotice,
    RankStalled,
    Signal,
    WorkerExited,
    WorkerStartFailed,
)
from services.controller import diagnosis
from services.controller.incident_states import HOST, HostEvent
from services.controller.round import Round
from services.controller.view import GenerationView, HostView, RankView

_RETURNED_AFTER_S = 2.0  # reports that much newer than the silence are a return, even if no sensor said so
_SAME_NOTICE_S = 1.0  # notices that end that close to each other are one, told again


def take_signals(round_: Round, signals: Sequence[Signal]) -> None:
    """Let every signal say what it has to say, in order."""
    for signal in signals:
        match signal.body:
            case WorkerExited() as body:
                _worker_exited(round_, signal, body)
            case WorkerStartFailed() as body:
                if _present(round_, body.job, body.generation) is not None:
                    failure = diagnosis.start_failure(body, signal.source, signal.at)
                    round_.reported.setdefault(body.job, []).append(failure)
            case RankStalled() as body:
                _rank_stalled(round_, signal, body)
            case HostSilent() as body:
                _host_silent(round_, signal, body)
            case HostReturned() as body:
                host = round_.hosts.get(body.host_id)
                if host is not None and host.state is HostState.SILENT:
                    _returned(round_, host, f"it reports again, after {body.away_s:.1f} s")
            case PreemptionNotice() as body:
                _preempted(round_, signal, body)
            case _:  # a peer out of reach, a failed save, a restarted engine: on record, and nothing to decide
                pass


def settle_hosts(round_: Round) -> None:
    """What follows from a host's state by itself, without a signal of this round."""
    for host in list(round_.hosts.values()):
        if host.state is HostState.SILENT and host.last_report_at > host.since + _RETURNED_AFTER_S:
            _returned(round_, host, "it reports again")
        elif host.state is HostState.IN_REPAIR and not host.stale_jobs:
            round_.change_host(host.host_id, HostEvent.CLEANED, "the superseded workers on it are gone")
        elif host.preempt_deadline_at > 0.0 and not host.job and _may(host, HostEvent.CORDONED):
            round_.change_host(host.host_id, HostEvent.CORDONED, f"no rank is on it any more: {host.reason}")


def _present(round_: Round, job: str, generation: int) -> GenerationView | None:
    """The running job's newest generation, if that is the one."""
    view = round_.jobs.get(job)
    if view is None or view.state is not JobState.RUNNING or view.generation is None:
        return None
    return view.generation if view.generation.generation == generation else None


def _worker_exited(round_: Round, signal: Signal, body: WorkerExited) -> None:
    generation = _present(round_, body.job, body.generation)
    if generation is None or body.expected:
        return
    ranks = {rank.rank: rank for rank in generation.ranks}
    known = ranks.get(body.rank) or RankView(body.rank, signal.source, body.last_step, Phase.STARTING, signal.at)
    if known.exited is not None:
        return
    ranks[body.rank] = msgspec.structs.replace(known, exited=body, exited_at=signal.at)
    changed = msgspec.structs.replace(generation, ranks=tuple(ranks[number] for number in sorted(ranks)))
    round_.jobs[body.job] = msgspec.structs.replace(round_.jobs[body.job], generation=changed)


def _rank_stalled(round_: Round, signal: Signal, body: RankStalled) -> None:
    generation = _present(round_, body.job, body.generation)
    if generation is None:
        return
    named = [rank for rank in generation.ranks if rank.rank in body.ranks]
    if named and all(rank.step > body.step and rank.reported_at > signal.at for rank in named):
        return  # they have moved since
    failure = diagnosis.stall_failure(body, generation.ranks, signal.at)
    round_.reported.setdefault(body.job, []).append(failure)


def _host_silent(round_: Round, signal: Signal, body: HostSilent) -> None:
    host = round_.hosts.get(body.host_id)
    heard_since = signal.at - body.silent_s / 2  # a report newer than that went to another sensor, or came after all
    if host is None or host.last_report_at > heard_since or not _may(host, HostEvent.FELL_SILENT):
        return
    seen = f"{', '.join(body.witnesses)} cannot reach it either" if body.witnesses else "nobody else could be asked"
    reason = f"no report for {body.silent_s:.1f} s, where one was due within {body.deadline_s:.1f} s; {seen}."
    round_.change_host(body.host_id, HostEvent.FELL_SILENT, reason)


def _returned(round_: Round, host: HostView, reason: str) -> None:
    event = HostEvent.REJOINED if host.job else HostEvent.RETURNED_BUSY if host.stale_jobs else HostEvent.RETURNED
    notice_is_over = 0.0 < host.preempt_deadline_at <= round_.now
    round_.change_host(host.host_id, event, reason, preempt_deadline_at=0.0 if notice_is_over else None)


def _preempted(round_: Round, signal: Signal, body: PreemptionNotice) -> None:
    """The host's clock may be any: what it says is how long it had left. That counts from now, as news of a notice
    travels fast or, from a host that is about to go, not at all."""
    host = round_.hosts.get(signal.source)
    if host is None or body.deadline_at <= 0.0:
        return
    remaining_s = body.deadline_at - signal.at
    deadline_at = round_.now + remaining_s
    if abs(host.preempt_deadline_at - deadline_at) < _SAME_NOTICE_S:
        return
    round_.noticed[host.host_id] = signal.at
    reason = f"a preemption notice ({body.source}) gave it {remaining_s:.1f} s."
    round_.change_host(host.host_id, None, reason, preempt_deadline_at=deadline_at)


def _may(host: HostView, event: HostEvent) -> bool:
    return event in HOST.table[host.state]
