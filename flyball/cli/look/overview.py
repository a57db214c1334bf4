"""What `flyball status` shows: one screen of jobs, hosts, incidents and what to do next. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from flyball.cli.look.hosts_table import HEALTHY, host_row
from flyball.cli.look.jobs_table import (
    JOB_COLUMNS,
    doing_note,
    doing_word,
    hosts_note,
    job_row,
    known,
    outcome,
    save_note,
)
from flyball.cli.show.compact import cut, table
from flyball.cli.show.output import cell
from flyball.cli.show.times import clock
from flyball.contracts.cluster import HostState, JobState
from flyball.contracts.decisions import IncidentState
from flyball.contracts.orders import AWAITS_APPROVAL

Json = dict[str, Any]

HEIGHT = 24  # lines of a terminal, one of them for the prompt
JOBS_SHOWN, NOTES_SHOWN, HOSTS_SHOWN, INCIDENTS_SHOWN, DECISIONS_SHOWN = 6, 2, 2, 3, 5  # at most
LABEL_WIDTH = 17
OPEN_INCIDENTS = [state.value for state in IncidentState if not state.closed]

_DROPPED = ("for", "restarts", "a step", "loss", "resumes from", "last step")  # where the terminal is narrow, in turn
_BREAK = re.compile(r"\s*\n\s*")  # a message may have lines
_WORST_FIRST = (HostState.SILENT, HostState.DEGRADED, HostState.SUSPECT, HostState.IN_REPAIR, HostState.CORDONED)


class Overview(msgspec.Struct, frozen=True):
    """What the screen is made of, as the API shows it."""

    jobs: Sequence[Json]  # those to show, see `first_jobs`
    more_jobs: int  # than are shown; at least, if `jobs_are_cut`
    recoverable: Mapping[str, Json]  # job -> what a restart would go on from
    host_states: Mapping[str, int]
    free_hosts: int  # without ranks, and well
    hosts: Sequence[Json]  # those to show, see `troubled_hosts`
    troubled: int  # how many hosts are not as they should be
    open_incidents: Sequence[Json]  # the newest
    newest_incident: Json | None
    decisions: Sequence[Json]  # the newest last
    orders: Sequence[Json]
    jobs_are_cut: bool = False  # there may be more than were read
    incidents_are_cut: bool = False
    ended_at: float | None = None  # of the supervisor
    problem: str = ""  # why the supervisor can decide nothing


def first_jobs(jobs: Sequence[Json], open_incidents: Sequence[Json]) -> list[Json]:
    """The jobs in the order in which they are shown: those with an open incident, others that have not ended, and then
    those that have, the newest first."""
    troubled = {incident["job"] for incident in open_incidents}

    def place(job: Json) -> tuple[bool, bool, float]:
        ended = bool(job.get("ended_at"))
        return ended, job["job"] not in troubled, -float(job["submitted_at"])

    return sorted(jobs, key=place)


def troubled_hosts(host_map: Json) -> list[str]:
    """The names of hosts that are not healthy, or that their ranks should leave: the worst first."""
    place = {state.value: number for number, state in enumerate(_WORST_FIRST)}
    found = [
        (place.get(state, len(place)), host_id)
        for domain in host_map["items"]
        for host_id, state, mark in zip(domain["host_ids"], domain["states"], domain["marks"], strict=True)
        if state not in HEALTHY or mark
    ]
    return [host_id for _, host_id in sorted(found)]


def free_hosts(host_map: Json) -> int:
    """How many hosts could take ranks: they are well, have none, and nothing speaks against them."""
    return sum(
        state in HEALTHY and not job and not mark
        for domain in host_map["items"]
        for state, job, mark in zip(domain["states"], domain["jobs"], domain["marks"], strict=True)
    )


def screen(found: Overview, now: float, width: int) -> list[str]:
    """The lines, each at most `width` wide: no more than fit into a terminal, whatever is found."""
    lines = [*_jobs(found, now, width), *_hosts(found, now)]
    if found.problem:
        lines.append(_labelled("Supervisor", f"decides nothing: {found.problem}"))
    lines += _incidents(found, now)
    if orders := [order for order in found.orders if order["kind"] != "clear"]:
        lines.append(_labelled("Orders", _counted(order["kind"] for order in orders) + " (flyball get orders)"))
    room = HEIGHT - len(lines) - 3  # the decisions' title, the next step, and the prompt
    lines += _decisions(found.decisions[-min(max(room, 1), DECISIONS_SHOWN) :], now)
    lines.append(_labelled("Next", next_step(found)))
    return [cut(_BREAK.sub(" ", line).rstrip(), width) for line in lines]


def _jobs(found: Overview, now: float, width: int) -> Iterator[str]:
    if not found.jobs:
        yield "No jobs"
        return
    rows = [
        dict(zip(JOB_COLUMNS, map(cell, job_row(job, now)), strict=True))
        | {"resumes from": resumes_from(found.recoverable.get(job["job"]), has_ended=bool(job.get("ended_at")))}
        for job in found.jobs
    ]
    columns = ("job", "state", "for", "step", "last step", "resumes from", "loss", "a step", "restarts")
    yield from table(columns, rows, width, dropped=_DROPPED)
    if found.more_jobs:
        yield f" and {_at_least(found.more_jobs, found.jobs_are_cut)} more (flyball get jobs)"
    notes = [(job["job"], note) for job in found.jobs for note in job_notes(job, now)]
    yield from (f" {name}: {note}" for name, note in notes[:NOTES_SHOWN])


def job_notes(job: Json, now: float) -> list[str]:
    """What is out of the ordinary with a job, a sentence each."""
    message = doing_note(job) if job["state"] == JobState.RUNNING else outcome(job, now)
    return [note for note in (message, hosts_note(job, wide=False), save_note(job)) if note]


def resumes_from(recoverable: Json | None, *, has_ended: bool = False) -> str:
    """The step that a restart would go on from if nothing but the processes were lost, and its slowest tier."""
    if recoverable is None:
        return "-"
    step, tier = _without_ranks(recoverable)
    for case in recoverable["losses"]:
        if case["lost"] == "processes":
            step, tier = case["recovery_step"], case["tier"]
    return f"{step} {tier}" if step >= 0 else "-" if has_ended else "step 0"  # hosts report no copies after the end


def _without_ranks(recoverable: Json) -> tuple[int, str]:
    newest = max(recoverable["tiers"], key=lambda rung: rung["step"])  # of equal ones, the fastest tier
    return newest["step"], newest["tier"]


def _hosts(found: Overview, now: float) -> Iterator[str]:
    counts = {state: count for state, count in found.host_states.items() if count}
    when = f", when the supervisor ended at {clock(found.ended_at, now)} UTC" if found.ended_at else ""
    free = f"; {found.free_hosts} free" if counts else "none"
    yield _labelled("Hosts", ", ".join(f"{count} {state}" for state, count in counts.items()) + free + when)
    for host in found.hosts:
        host_id, state, lasting, job, _ = map(cell, host_row(host, now))
        about = "" if job == "-" else f", with ranks of {job}"
        yield f" {host_id}: {state} for {lasting}{about}: {_trouble(host)}"
    if found.troubled > len(found.hosts):
        yield f" and {found.troubled - len(found.hosts)} more (flyball status --hosts)"


def _trouble(host: Json) -> str:
    """Why ranks should leave a host, or why it is in its state."""
    pressing = [one["message"] for one in host.get("conditions") or () if one["severity"] != "info"]
    drain = host.get("drain") or {}
    return cell(pressing[0] if pressing else drain.get("reason") or host.get("reason"))


def _incidents(found: Overview, now: float) -> Iterator[str]:
    newest, shown = found.newest_incident, found.open_incidents[-INCIDENTS_SHOWN:]
    count, is_cut = len(found.open_incidents), found.incidents_are_cut
    if shown:
        yield _labelled("Open incidents", f"{count} or more" if is_cut else str(count))
    else:
        yield _labelled("Open incidents", "none" + (f"; newest: {_ended(newest, now)}" if newest else ""))
    for one in shown:
        yield f" {one['incident_id']} {one['cause']}, {one['state']}: {cell(one['message'])}"
    if count > len(shown):
        yield f" and {_at_least(count - len(shown), is_cut)} older ones (flyball get incidents)"


def _ended(incident: Json, now: float) -> str:
    lost = known(incident["lost_steps"])
    where = f" on {incident['host_id']}" if incident["host_id"] else ""
    at = clock(incident["resolved_at"] or incident["since"], now)
    ended = f"{incident['incident_id']} {incident['cause']}{where}, {incident['state']} {at}"
    return ended if lost is None else f"{ended}, {lost} steps lost"


def _decisions(decisions: Sequence[Json], now: float) -> Iterator[str]:
    if not decisions:
        return
    yield "Newest decisions (UTC; flyball explain DECISION)"
    for one in decisions:
        about = f" {one['job']}" if one["job"] else ""
        yield f" {one['decision_id']} {clock(one['at'], now)}{about} {one['kind']}: {cell(one['reason'])}"


def next_step(found: Overview) -> str:
    """The command that helps most now, and why."""
    return next(_steps(found))


def _steps(found: Overview) -> Iterator[str]:
    """What could be done, the most pressing first."""
    if found.problem:
        yield "mend what the supervisor says first: until then no fault is answered"
    newest_first = found.open_incidents[::-1]
    for incident in newest_first:
        if incident["holding_for"].startswith(AWAITS_APPROVAL):
            yield f"flyball approve {incident['incident_id']}: it waits for {incident['holding_for']}"
    for incident in newest_first:
        yield f"flyball describe incident {incident['incident_id']}: what goes on, and why"
    for job in found.jobs:
        name, state = job["job"], job["state"]
        if state == JobState.SUBMITTED:
            yield f"flyball describe job {name}: what it waits for"
        elif doing_word(job) in ("standing", "unheard"):
            yield f"flyball describe job {name}: it makes no step"
        elif state not in list(JobState):  # interrupted: its supervisor is gone
            yield f"flyball run --resume {name}: goes on where it was"
    for host in found.hosts:
        yield f"flyball describe host {host['host_id']}: what is wrong with it"
    if any(not job.get("ended_at") for job in found.jobs):
        yield "nothing to do; flyball watch follows what happens"
    for job in found.jobs:
        if job["state"] == JobState.FAILED:
            yield f"flyball logs {job['job']} --tail 50: why it failed"
    yield "nothing trains; flyball run SCRIPT starts a job"


def _labelled(label: str, text: str) -> str:
    return f"{label:{LABEL_WIDTH}}{text}"


def _at_least(count: int, is_cut: bool) -> str:
    return f"at least {count}" if is_cut else str(count)


def _counted(words: Iterator[str]) -> str:
    return ", ".join(f"{count} {word}" for word, count in Counter(words).most_common())
