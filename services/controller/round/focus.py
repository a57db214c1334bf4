"""Restricts a view to some jobs: a failed job must not wait for a look at very many hosts. Pure.

It always contains whatever may need a decision: jobs with an open incident or action, jobs that wait to start or stop,
jobs that an order is about, jobs with hosts that are drained or have a condition for which ranks should leave, and jobs
that the round's signals are about. It also contains all that rules may need about these: their hosts, hosts without a
job, and hosts that hold something of theirs. The other jobs are healthy as far as is known, and have their turn in
later rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from flyball.contracts.cluster import JobState
from flyball.contracts.decisions import Incident
from flyball.contracts.orders import Order, OrderKind
from flyball.contracts.reports.signals import ReplicasDiffer, Signal
from flyball.contracts.reports.training_health import LossDiverged, ReplayDiffers
from services.controller.round.view import ActionView, Fleet, JobView, View


class Focus(msgspec.Struct, frozen=True):
    """The part of a round besides everything that is open: `jobs` whose turn it is, and new signals."""

    jobs: frozenset[str] = frozenset()
    signals: Sequence[Signal] = ()


def named_jobs(signals: Iterable[Signal]) -> set[str]:
    """The jobs that signals name."""
    return {signal.body.job for signal in signals if hasattr(signal.body, "job")}


def clean_steps(signals: Iterable[Signal], incidents: Iterable[Incident]) -> dict[str, set[int]]:
    """By job, the newest steps before the harms that signals and incidents tell of."""
    found: dict[str, set[int]] = {}
    for incident in incidents:
        if incident.harm is not None and incident.harm.clean_step >= 0:
            found.setdefault(incident.job, set()).add(incident.harm.clean_step)
    for body in (signal.body for signal in signals):
        if isinstance(body, LossDiverged | ReplicasDiffer | ReplayDiffers):
            step = body.clean_step if isinstance(body, LossDiverged) else body.equal_step
            if step >= 0:
                found.setdefault(body.job, set()).add(step)
    return found


def named_hosts(signals: Iterable[Signal]) -> set[str]:
    """The hosts that sent signals, or that signals name."""
    found = {signal.source for signal in signals}
    for signal in signals:
        found.update(getattr(signal.body, name) for name in ("host_id", "peer") if hasattr(signal.body, name))
    return found


def asks(state: JobState, *, stop_requested: bool) -> bool:
    """Whether every round must cover this job."""
    return state is JobState.SUBMITTED or state.ending or (stop_requested and not state.ended)


def open_jobs(incidents: Iterable[Incident], actions: Iterable[ActionView]) -> set[str]:
    """The jobs with an open incident or action."""
    return {incident.job for incident in incidents} | {action.plan.job for action in actions}


def ordered_jobs(orders: Iterable[Order]) -> set[str]:
    """The jobs that operators' orders are about."""
    return {order.target for order in orders if order.kind is OrderKind.CHECKPOINT}


def open_hosts(incidents: Iterable[Incident], actions: Iterable[ActionView]) -> Iterator[str]:
    """The hosts that these are about, whatever job they have now."""
    for incident in incidents:
        yield incident.host_id
    for action in actions:
        yield from action.plan.stop_hosts
        yield from action.plan.unreachable_hosts
        yield from action.plan.warm_hosts
        if action.plan.next is not None:
            yield from (part.host_id for part in action.plan.next.hosts)


def placed_hosts(jobs: Iterable[JobView]) -> Iterator[str]:
    """The hosts with ranks of the newest generations of jobs."""
    for job in jobs:
        if job.generation is not None:
            yield from (part.host_id for part in job.generation.hosts)


def focused(view: View, focus: Focus) -> View:
    """The part of a whole view that a round covers."""
    hosts_named = named_hosts(focus.signals)
    wanted = {*focus.jobs, *named_jobs(focus.signals), *open_jobs(view.incidents, view.actions)}
    wanted |= ordered_jobs(view.orders)
    wanted.update(job.spec.job for job in view.jobs if asks(job.state, stop_requested=job.stop_requested))
    noted = {host.host_id for host in view.hosts if host.drain is not None or host.pressing}
    wanted.update(host.job for host in view.hosts if host.host_id in hosts_named or host.host_id in noted)
    jobs = tuple(job for job in view.jobs if job.spec.job in wanted)
    copies = tuple(copy for copy in view.copies if copy.job in wanted)
    involved = {*hosts_named, *open_hosts(view.incidents, view.actions), *placed_hosts(jobs)}
    involved.update(copy.host_id for copy in copies)
    hosts = tuple(
        host
        for host in view.hosts
        if not host.job or host.host_id in involved or host.job in wanted or host.stale_jobs or host.host_id in noted
    )
    fleet = view.fleet if view.fleet.hosts else Fleet.of(host.failure_domain for host in view.hosts)
    return msgspec.structs.replace(view, jobs=jobs, hosts=hosts, copies=copies, is_whole=False, fleet=fleet)
