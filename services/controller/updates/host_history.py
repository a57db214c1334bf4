"""Keeps hosts out of work that failed again and again, as long as there are others."""

from __future__ import annotations

from flyball.contracts.cluster import HostState
from flyball.contracts.decisions import DecisionKind
from flyball.contracts.orders import OrderKind
from services.controller.round import blast_radius
from services.controller.round.round import Round
from services.controller.round.view import HostView
from services.rules.incident_states import HostEvent

_WELL = (HostState.HEALTHY, HostState.SPARE)
_DAY_S = 86_400.0
_UNTIL = "it gets no work until an operator uncordons it"


def keep_out_hosts_that_fail(round_: Round) -> None:
    """Cordon free hosts that failed too often within the window, since they were last uncordoned: few at a time and in
    all, and only while others are left for the jobs. Otherwise they are the last choice."""
    settings = round_.settings
    worn = [h for h in round_.hosts.values() if len(h.failed_at) > settings.host_failures_allowed and _is_free(h)]
    kept = [host for host in round_.hosts.values() if _is_kept_out(host)]
    if not worn and not kept:
        return
    needed = max((job.spec.nnodes for job in round_.jobs.values() if not job.state.ended), default=1)
    allowed = blast_radius.limit(blast_radius.fleet_of(round_), settings)
    for host in worn:
        others = [other for other in _well_hosts(round_) if other.host_id != host.host_id]
        if len(kept) >= allowed or len(others) < needed or not any(_is_free(other) for other in others):
            return
        if blast_radius.too_many(round_, (host.host_id,)):
            return
        days = settings.host_failure_window_s / _DAY_S
        reason = f"it failed {len(host.failed_at)} times within {days:.3g} days; {_UNTIL}, or too few others are left"
        why = f"{host.host_id}: {reason}."
        round_.decide_host(host.host_id, DecisionKind.CORDON, "keep_out_a_host_that_fails", why)
        round_.change_host(host.host_id, HostEvent.CORDONED, reason)
        kept.append(round_.hosts[host.host_id])
    missing = needed - len(_well_hosts(round_)) if round_.view.is_whole else 0
    usable = (host for host in kept if not host.is_unfit and (OrderKind.CORDON, host.host_id) not in round_.orders)
    for host in sorted(usable, key=lambda host: (len(host.failed_at), host.host_id))[: max(0, missing)]:
        reason = "too few other hosts are left: it may have work again, as the last choice"
        rule = "give_back_a_host_that_fails"
        round_.decide_host(host.host_id, DecisionKind.UNCORDON, rule, f"{host.host_id}: {reason}.")
        round_.change_host(host.host_id, HostEvent.RELEASED, reason)


def _well_hosts(round_: Round) -> list[HostView]:
    """The hosts that have work or may get it."""
    fresh_at = round_.now - round_.settings.spare_fresh_s
    return [
        host
        for host in round_.hosts.values()
        if host.state in _WELL
        and not host.left_at
        and not host.is_unfit
        and (host.job or host.last_report_at >= fresh_at)
        and (OrderKind.CORDON, host.host_id) not in round_.orders
    ]


def _is_free(host: HostView) -> bool:
    return not host.job and not host.stale_jobs and host.state in _WELL


def _is_kept_out(host: HostView) -> bool:
    return host.state is HostState.CORDONED and _UNTIL in host.reason
