"""Limits how many hosts may be taken out of work at a time: what fails on many hosts is rarely the hosts'. Pure."""

from __future__ import annotations

from collections.abc import Collection

from flyball.contracts.cluster import HostState
from services.controller.round.round import Round
from services.controller.round.view import Fleet, HostView, PolicySettings
from services.rules.wording import listed

WINDOW_S = 3600.0


def limit(fleet: Fleet, settings: PolicySettings) -> int:
    """Return how many hosts may be cordoned within the window: a share of all, at least one, and no more than the
    largest failure domain has, unless each host is a domain of its own."""
    share = max(1, int(fleet.hosts * settings.cordoned_percent_per_hour / 100.0))
    return min(share, fleet.largest_domain) if fleet.largest_domain > 1 else share


def fleet_of(round_: Round) -> Fleet:
    """Return the size of the whole cluster, also in a round that covers a part of it."""
    fleet = round_.view.fleet
    return fleet if fleet.hosts else Fleet.of(host.failure_domain for host in round_.hosts.values())


def recently_cordoned(hosts: Collection[HostView], now: float) -> list[HostView]:
    """Return the hosts cordoned within the window, without those that somebody else took away: by a drain, or a
    preemption."""
    return [
        host
        for host in hosts
        if host.state is HostState.CORDONED
        and now - host.since < WINDOW_S
        and not host.is_drained
        and host.preempt_deadline_at == 0.0
    ]


def too_many(round_: Round, names: Collection[str]) -> str:
    """Say why these hosts may not be cordoned, too; '' if they may."""
    hosts, now = round_.hosts, round_.now
    fleet = fleet_of(round_)
    new = [name for name in names if name in hosts and hosts[name].state is not HostState.CORDONED]
    before = sorted(host.host_id for host in recently_cordoned(hosts.values(), now))
    allowed = limit(fleet, round_.settings)
    if len(new) + len(before) <= allowed or not new:
        return ""
    known = (
        f"{listed(before)} {'is' if len(before) == 1 else 'are'} cordoned since less than an hour ago, and"
        if before
        else ""
    )
    all_hosts = f"{fleet.hosts} host{'' if fleet.hosts == 1 else 's'}"
    return f"{known} at most {allowed} of {all_hosts} may be within an hour".strip()
