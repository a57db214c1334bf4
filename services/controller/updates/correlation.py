"""Gathers the incidents of jobs whose hosts fell silent together behind one switch under one incident of their domain.

Each job keeps an incident of its own, since each has its own generation, decisions and end. The domain's incident names
them (`parts`); it needs no action, and is over when they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from flyball.contracts.cluster import HostState
from flyball.contracts.decisions import DecisionKind, Incident
from services.controller.round.diagnosis import DOMAIN_SILENT, HOST_SILENT, last_heard_at
from services.controller.round.round import Round
from services.controller.round.view import HostView
from services.rules.incident_states import IncidentEvent
from services.rules.wording import counted, kept, listed

_WINDOW_S = 10.0  # sensors find the hosts of one fall moments apart, and the controller waits for those of a job


def gather(round_: Round) -> None:
    """Open the incidents of domains, add the jobs' incidents to them, and end those whose parts are over."""
    for domain, found in sorted(_by_domain(round_).items()):
        # One that lost hosts in two domains became a part of the first, in this round.
        fallen = [(one, hosts) for one, hosts in found if not round_.incidents[one.incident_id].part_of]
        if not fallen:
            continue
        whole = _open_one(round_, domain, fallen)
        if whole is None and len(fallen) > 1:
            whole = _open(round_, domain, fallen)
        if whole is not None:
            _add(round_, whole, fallen)
    for whole in [one for one in round_.incidents.values() if one.cause == DOMAIN_SILENT and not one.state.closed]:
        if not any(_is_open(round_, part) for part in whole.parts):
            round_.advance(whole, IncidentEvent.CLEARED)


_Fallen = Sequence[tuple[Incident, list[HostView]]]  # incidents of jobs, each with its silent hosts of the domain


def _by_domain(round_: Round) -> dict[str, _Fallen]:
    """failure domain -> the incidents that are no part of another, and whose hosts fell within the window."""
    found: defaultdict[str, list[tuple[Incident, list[HostView]]]] = defaultdict(list)
    for incident in sorted(round_.incidents.values(), key=lambda one: (one.opened_at, one.job)):
        if incident.cause != HOST_SILENT or incident.state.closed or incident.part_of:
            continue
        silent: defaultdict[str, list[HostView]] = defaultdict(list)
        for host in _silent_hosts(round_, incident):
            silent[host.failure_domain].append(host)
        for domain, hosts in silent.items():
            if domain and round_.now - max(host.since for host in hosts) <= _WINDOW_S:
                found[domain].append((incident, hosts))
    return dict(found)


def _silent_hosts(round_: Round, incident: Incident) -> Iterable[HostView]:
    job = round_.jobs.get(incident.job)
    if job is None or job.generation is None:
        return
    action = round_.actions.get(incident.action_id)  # whose generation may have left them by now
    left = action.plan.unreachable_hosts if action is not None else ()
    for name in dict.fromkeys((*(part.host_id for part in job.generation.hosts), *left)):
        host = round_.hosts.get(name)
        if host is not None and host.state is HostState.SILENT:
            yield host


def _open_one(round_: Round, domain: str, fallen: _Fallen) -> Incident | None:
    """The domain's incident, if it was opened for this fall."""
    began = min(host.since for _, hosts in fallen for host in hosts)
    for whole in round_.incidents.values():
        if whole.cause == DOMAIN_SILENT and not whole.state.closed and began - whole.opened_at <= _WINDOW_S:
            known = (round_.hosts.get(host_id) for host_id in whole.hosts)
            if any(host is not None and host.failure_domain == domain for host in known):
                return whole
    return None


def _open(round_: Round, domain: str, fallen: _Fallen) -> Incident:
    hosts = [host for _, silent in fallen for host in silent]
    jobs = [incident.job for incident, _ in fallen]
    message = (
        f"{counted(len(hosts), 'host')} behind {domain} fell silent together, with ranks of "
        f"{counted(len(jobs), 'job')}: {listed(jobs)}."
    )
    whole = round_.open_incident(
        job="",
        host_id="",
        cause=DOMAIN_SILENT,
        message=message,
        generation=0,
        fault_at=last_heard_at(hosts),
        observed_at=min(host.since for host in hosts),
        hosts=tuple(host.host_id for host in hosts),
    )
    parts = listed([incident.incident_id for incident, _ in fallen])
    round_.decide_incident(
        whole,
        DecisionKind.HOLD,
        "gather_what_fell_together",
        f"{message} What they share is at fault, not each of them. Each job goes on by "
        f"decisions of its own ({parts}); this incident is over when they are.",
        {"hosts": kept([host.host_id for host in hosts]), "jobs": kept(jobs)},
    )
    return whole


def _add(round_: Round, whole: Incident, fallen: _Fallen) -> None:
    for incident, hosts in fallen:
        current = round_.incidents[incident.incident_id]
        round_.advance(current, None, part_of=whole.incident_id)
        whole = round_.advance(
            whole,
            None,
            parts=(*whole.parts, current.incident_id),
            hosts=tuple(dict.fromkeys((*whole.hosts, *(host.host_id for host in hosts)))),
        )


def _is_open(round_: Round, incident_id: str) -> bool:
    incident = round_.incidents.get(incident_id)  # a view has no closed ones
    return incident is not None and not incident.state.closed
