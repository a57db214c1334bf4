"""Rules that wait for news within moments: the root cause, further lost hosts, returning hosts."""

from __future__ import annotations

from flyball.contracts.cluster import HostState
from flyball.contracts.decisions import DecisionKind, Incident
from services.controller.round.diagnosis import CONNECTION_LOST, HOST_SILENT, has_failed, shows_steps
from services.controller.round.round import Case
from services.controller.round.verdict import Verdict
from services.controller.round.view import GenerationView, HostView
from services.controller.rules.recovery_rules import is_retry
from services.rules.wording import kept, listed

_SILENT_WINDOWS = 5  # how many root-cause windows to wait for a report of a host


def wait_for_the_root_cause(case: Case) -> Verdict | None:
    """A lost connection shows that a rank is gone, but not which. Wait for the cause, longer while a host of the job
    has not reported since."""
    asked = _asked_about(case, CONNECTION_LOST)
    if asked is None:
        return None
    incident, generation = asked
    window_s = case.settings.root_cause_window_s
    unreported = [host.host_id for host in _known_hosts(case, generation) if host.last_report_at < incident.since]
    until = incident.since + window_s
    if case.now >= until and unreported:
        until = incident.since + _SILENT_WINDOWS * window_s
    if case.now >= until:
        return None
    awaited = f"a report of {listed(unreported)}" if case.now >= incident.since + window_s else "the root cause"
    return Verdict(
        DecisionKind.HOLD,
        f"{incident.message} Another failure must have caused this, which has not been reported yet: "
        f"waiting for {awaited} for up to {until - case.now:.1f} s.",
        evidence={"unheard": kept(unreported), "window_s": window_s},
        holding_for=awaited,
        hold_until=until,
    )


def wait_for_the_others_that_fell(case: Case) -> Verdict | None:
    """If a host fell silent, others may have too (a switch, a network cut, paused machines). Other sensors may find
    them moments later. Make one decision for all."""
    asked = _asked_about(case, HOST_SILENT)
    if asked is None:
        return None
    incident, generation = asked
    hosts = _known_hosts(case, generation)
    silent = [host for host in hosts if host.state is HostState.SILENT]
    window_s = case.settings.root_cause_window_s
    until = max((host.since for host in silent), default=0.0) + window_s
    newest = max(
        host.last_report_at for host in case.round.hosts.values()
    )  # by the sensors' clocks, not the controller's
    fell_at = max((host.last_report_at for host in silent), default=newest)
    reported_by = min(0.5 * (fell_at + newest), newest - window_s)  # others may have fallen as well
    unreported = [h.host_id for h in hosts if not case.round.is_silent(h.host_id) and h.last_report_at < reported_by]
    if not unreported or case.now >= until:
        return None
    named = listed(unreported)
    return Verdict(
        DecisionKind.HOLD,
        f"{incident.message} {named} {'has' if len(unreported) == 1 else 'have'} not reported since: "
        f"waiting up to {until - case.now:.1f} s to see whether more hosts are lost.",
        evidence={"unheard": kept(unreported)},
        holding_for=f"a report of {named}",
        hold_until=until,
    )


def wait_for_the_others_that_return(case: Case) -> Verdict | None:
    """Hosts that were silent together come back one after the other, and their ranks may never have stopped: wait for
    all."""
    asked = _asked_about(case, HOST_SILENT)
    if asked is None:
        return None
    incident, generation = asked
    hosts = _known_hosts(case, generation)
    away = [host.host_id for host in hosts if host.state is HostState.SILENT]
    returned = [host for host in hosts if host.state is not HostState.SILENT and host.since > incident.opened_at]
    until = max((host.since for host in returned), default=0.0) + _SILENT_WINDOWS * case.settings.root_cause_window_s
    if not away or case.now >= until or any(has_failed(rank) for rank in generation.ranks):
        return None
    named = listed([host.host_id for host in returned])
    return Verdict(
        DecisionKind.HOLD,
        f"{incident.message} {named} {'reports' if len(returned) == 1 else 'report'} again, and no worker ended there: "
        f"waiting up to {until - case.now:.1f} s for {listed(away)} to report, too.",
        evidence={"away": kept(away)},
        holding_for=f"the return of {listed(away)}",
        hold_until=until,
    )


def watch_returned_hosts(case: Case) -> Verdict | None:
    """Hosts that report again may never have stopped training: wait to see whether steps advance. Where none can be
    seen (a script that does not attach, a rank that is done) the workers may run on, or end well: a restart would take
    from them what they have done."""
    asked = _asked_about(case, HOST_SILENT)
    if asked is None:
        return None
    incident, generation = asked
    hosts = _known_hosts(case, generation)
    if any(host.state is HostState.SILENT for host in hosts) or any(has_failed(rank) for rank in generation.ranks):
        return None
    awaits_steps = shows_steps(generation)
    window_s = case.settings.root_cause_window_s if awaits_steps else case.settings.unwatched_verify_s
    until = max(host.since for host in hosts) + window_s
    if case.now >= until:
        return None
    awaited = f"steps advance past {incident.failed_step}" if awaits_steps else "the workers run on, or end well"
    return Verdict(
        DecisionKind.HOLD,
        f"All hosts of generation {generation.generation} report again, and no worker failed: "
        f"waiting up to {until - case.now:.1f} s to see whether {awaited}.",
        holding_for="steps to advance after the return" if awaits_steps else "the workers to run on after the return",
        hold_until=until,
    )


def _asked_about(case: Case, cause: str) -> tuple[Incident, GenerationView] | None:
    """The incident and its generation, if it has this cause, is about the current generation, and no action failed."""
    incident, generation = case.incident, case.job.generation
    if incident is None or generation is None or incident.cause != cause:
        return None
    return None if incident.generation != generation.generation or is_retry(case) else (incident, generation)


def _known_hosts(case: Case, generation: GenerationView) -> list[HostView]:
    return [case.round.hosts[part.host_id] for part in generation.hosts if part.host_id in case.round.hosts]
