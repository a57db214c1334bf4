"""Conditions of hosts: what begins, ends and expires, and the incidents of jobs that have ranks there."""

from __future__ import annotations

import functools

from flyball.contracts.cluster import HostState
from flyball.contracts.decisions import IncidentState
from flyball.contracts.orders import OrderKind
from flyball.contracts.reports.conditions import MAX_CONDITIONS, HostCondition, Severity
from flyball.contracts.reports.signals import ConditionBegan, ConditionEnded, ConditionsStand, Signal
from services.controller.round import given_up
from services.controller.round.diagnosis import BESIDE_FAILURES, DEPARTURES, HOST_CONDITION, newest_common_step
from services.controller.round.round import Round
from services.controller.round.view import GenerationView, HostView, JobView
from services.rules.incident_states import IncidentEvent

_CORDONED = "no rank is on it, and it has a condition: "


def take_signal(round_: Round, signal: Signal) -> None:
    """Take in a condition that begins or ends on the host that sent the signal. Others are left alone."""
    host = round_.hosts.get(signal.source)
    if host is None:
        return
    match signal.body:
        case ConditionBegan(condition):
            _begin(round_, host, condition)
        case ConditionEnded(source, kind, subject):
            for one in host.conditions:
                if one.condition.key == (source, kind, subject):
                    _end(round_, host.host_id, one.condition)
        case ConditionsStand() as stand:
            for condition in [one.condition for one in host.conditions]:
                if condition.since <= signal.at and _denies(stand, condition):  # else it began after that was sent
                    _end(round_, host.host_id, condition)


def settle(round_: Round) -> None:
    """End conditions whose time is over."""
    for host in list(round_.hosts.values()):
        for one in host.conditions:
            until = one.condition.until
            if 0.0 < until <= round_.now:
                _end(round_, host.host_id, one.condition)
            elif until:
                round_.wake(until)


def reason_to_cordon(host: HostView) -> str:
    """Say why an empty host with a condition is cordoned. The host's reason tells its cordon from others later."""
    return f"{_CORDONED}{host.pressing[0].message}"


def may_release(round_: Round, host: HostView) -> bool:
    """Whether a host was cordoned for a condition, and for nothing else, that is no reason any more. A warning is one
    only as long as ranks are there."""
    if host.state is not HostState.CORDONED or (OrderKind.CORDON, host.host_id) in round_.orders:
        return False
    if not host.reason.startswith((_CORDONED, f"{host.host_id} has a {Severity.WARNING.value} condition (")):
        return False
    return not host.is_unfit and not host.silenced_until and not ((host.job or host.stale_jobs) and host.pressing)


def overrule(round_: Round, host: HostView) -> None:
    """An operator gives the host work in spite of all that stands against it now."""
    for condition in host.pressing:
        round_.change_condition(host.host_id, condition, is_overruled=True)


def leave_before_it_fails(round_: Round, job: JobView) -> None:
    """Decide again about a failure if a host of the generation that is to end it turns out to be broken, and others are
    free: a worker ends moments before a probe tells why, and would end there again."""
    generation = job.generation
    if generation is None or not round_.broke:
        return
    hosts = [round_.hosts[part.host_id] for part in generation.hosts if part.host_id in round_.hosts]
    found = [host for host in hosts if host.host_id in round_.broke and host.is_broken]  # unless that ended again
    lost = sum(host.is_broken or round_.is_silent(host.host_id) for host in hosts)
    for incident in round_.open_incidents(job.spec.job) if found else ():
        recovers = incident.state in (IncidentState.ACTING, IncidentState.VERIFYING)
        if recovers and incident.cause not in BESIDE_FAILURES and len(round_.free_hosts(job.spec)) >= lost:
            why = " ".join(_message(host.host_id, host.pressing) for host in found)
            round_.advance(incident, IncidentEvent.FAILED_AGAIN, message=f"{incident.message} {why}")


def find(round_: Round, job: JobView, generation: GenerationView) -> None:
    """Open an incident for each host of the job with a pressing condition, or update its message."""
    departures = [i for i in round_.open_incidents(job.spec.job) if i.cause in DEPARTURES]
    known = {incident.host_id: incident for incident in departures}
    common = functools.cache(lambda: newest_common_step(generation))  # once for all hosts
    for part in generation.hosts:
        host = round_.hosts.get(part.host_id)
        if host is None or not host.conditions or not host.pressing:
            continue
        message = _message(host.host_id, host.pressing)
        incident = known.get(host.host_id)
        if incident is not None:
            if incident.cause == HOST_CONDITION and incident.state is IncidentState.DECIDING:
                round_.advance(incident, None, message=message)
            continue
        if host.state in (HostState.SILENT, HostState.CORDONED):
            continue  # already lost, or given up by an earlier incident
        if given_up.is_given_up(job, generation, host, HOST_CONDITION):
            continue
        round_.open_incident(
            job=job.spec.job,
            host_id=host.host_id,
            cause=HOST_CONDITION,
            message=message,
            generation=generation.generation,
            failed_step=common(),
            observed_at=min(host.pressing[0].since, round_.now),
        )


def _message(host_id: str, pressing: tuple[HostCondition, ...]) -> str:
    worst, more = pressing[0], len(pressing) - 1
    others = f" {more} more condition{'' if more == 1 else 's'} stand{'s' if more == 1 else ''}." if more else ""
    what = f"{worst.kind}, {worst.source}"
    return f"{host_id} has a {worst.severity.value} condition ({what}): {_sentence(worst.message)}{others}"


def _sentence(text: str) -> str:
    return f"{text.strip().rstrip('.')}."


def _begin(round_: Round, host: HostView, condition: HostCondition) -> None:
    """A repetition changes nothing; a change of severity, or of the boot, ends an operator's overruling."""
    known = next((one for one in host.conditions if one.condition.key == condition.key), None)
    if known is None and len(host.conditions) >= MAX_CONDITIONS:
        return
    if known is None or not known.condition.says_the_same(condition):
        before = known.condition if known is not None and known.is_overruled else None
        stays = before is not None and (before.severity, before.boot) == (condition.severity, condition.boot)
        round_.change_condition(host.host_id, condition, is_overruled=stays)
        if round_.hosts[host.host_id].is_broken and not host.is_broken:
            round_.broke.add(host.host_id)


def _denies(stand: ConditionsStand, condition: HostCondition) -> bool:
    """Whether a host that says what stands says that this does not. What is remembered counts until its boot ends."""
    if condition.source not in stand.sources or condition.key in stand.keys:
        return False
    is_of_another_boot = bool(condition.boot and stand.boot) and condition.boot != stand.boot
    return is_of_another_boot or not condition.is_remembered


def _end(round_: Round, host_id: str, condition: HostCondition) -> None:
    round_.change_condition(host_id, condition, has_ended=True)
