"""Groups hosts for a check, and finds the bad ones from what the groups measured. Pure.

In the first round neighbours are in pairs. If a pair fails, either host may be to blame, so in the next round each
suspect is in a group with a host that passed. Who is in a group that passes is good; who fails with good hosts only is
bad. Two hosts alone can only say that one of the two is bad.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from flyball.contracts.decisions import CommandUpdate, UpdateState
from flyball.contracts.reports.host_checks import CheckMeasure, CheckStage, CheckState

MAX_ROUNDS = 5
PHASE = "check"  # of an action, in the names of its commands
_NOBODY: Mapping[str, str] = MappingProxyType({})
SLOW_FACTOR = 1.5  # times the median of all hosts; ordinary hosts of one kind differ by a few percent
_Key: TypeAlias = tuple[int, tuple[str, ...], str]  # round, group, host
_SLOW_HOSTS = 3  # with fewer, there is no telling which of them is unusual
_DEVIATIONS = 4.5  # median deviations: three standard deviations


class HostAnswer(msgspec.Struct, frozen=True):
    """What a host reported from its group; `measure` None: its daemon did not answer."""

    host_id: str
    round: int
    group: tuple[str, ...]
    measure: CheckMeasure | None


class HostFinding(msgspec.Struct, frozen=True):
    """The verdict about a host."""

    state: CheckState  # never RUNNING
    message: str
    devices: int = 0
    matmul_s: float = 0.0
    all_reduce_s: float = 0.0


class _Sorted(msgspec.Struct, frozen=True):
    good: frozenset[str]
    bad: Mapping[str, str]  # host -> why
    failed: frozenset[frozenset[str]]  # groups; the same would fail again


def without_measure(updates: Iterable[CommandUpdate]) -> dict[str, str]:
    """host -> why it measured nothing, for hosts whose daemon answered a check with a refusal or an error. That shows
    nothing about the hardware: a refused command carried an old fence, say, or the host's disk is full."""
    return {
        update.host_id: f"its daemon did not check it: {update.message or update.code or 'no reason given'}"
        for update in updates
        if update.command_id.split(".")[1] == PHASE
        and update.state in (UpdateState.REFUSED, UpdateState.FAILED)
        and update.result.check is None
    }


def answers_of(
    hosts: Iterable[str], measures: Iterable[CheckMeasure], unmeasured: Mapping[str, str] = _NOBODY
) -> tuple[HostAnswer, ...]:
    """The answers so far. A member of a group of which others measured something, and a host of which nothing is known,
    did not answer, unless it is one of the `unmeasured`. Groups that were given up are not waited for."""
    measures = list(measures)
    left = given_up(measures)
    found: dict[_Key, HostAnswer] = {
        (m.round, m.group, m.host_id): HostAnswer(m.host_id, m.round, m.group, m) for m in measures
    }
    missing: dict[_Key, HostAnswer] = {
        (r, group, host): _without_answer(host, r, group, unmeasured)
        for r, group, _ in found
        if (r, group) not in left
        for host in group
    }
    known = {host for _, group, _ in found for host in group}
    silent: dict[_Key, HostAnswer] = {
        (1, (host,), host): _without_answer(host, 1, (host,), unmeasured) for host in hosts if host not in known
    }
    return tuple(answer for _, answer in sorted({**silent, **missing, **found}.items()))


def _without_answer(host: str, round_: int, group: tuple[str, ...], unmeasured: Mapping[str, str]) -> HostAnswer:
    why = unmeasured.get(host, "")
    void = CheckMeasure(host, round_, group, failed=CheckStage.VOID, message=why) if why else None
    return HostAnswer(host, round_, group, void)


def given_up(measures: Iterable[CheckMeasure]) -> set[tuple[int, tuple[str, ...]]]:
    """Round and group where a host failed by itself: the others of the group wait for it in vain."""
    return {(measure.round, measure.group) for measure in measures if measure.failed is CheckStage.DEVICE}


def first_groups(hosts: Sequence[str], helpers: Sequence[str] = ()) -> tuple[tuple[str, ...], ...]:
    """Neighbours in pairs; an odd one makes a group of three. A single host is paired with a helper if there is one."""
    if len(hosts) == 1:
        return ((*hosts, *helpers[:1]),)
    pairs = [tuple(hosts[at : at + 2]) for at in range(0, len(hosts) - len(hosts) % 2, 2)]
    if len(hosts) % 2:
        pairs[-1] = (*pairs[-1], hosts[-1])
    return tuple(pairs)


def next_groups(
    hosts: Sequence[str], helpers: Sequence[str], answers: Sequence[HostAnswer]
) -> tuple[tuple[str, ...], ...]:
    """The groups of the round after those that `answers` are from; () once every host is judged, or nothing more can be
    found out. `helpers`: other free hosts, for want of hosts that passed."""
    rounds = max((answer.round for answer in answers), default=0)
    if rounds >= MAX_ROUNDS:
        return ()
    if not rounds:
        return first_groups(hosts, helpers)
    known = _sort_out(answers)
    suspects = [host for host in hosts if host not in known.good and host not in known.bad]
    partners = [host for host in (*hosts, *helpers) if host in known.good]
    others = [host for host in helpers if host not in known.good and host not in known.bad]
    groups: list[tuple[str, ...]] = []
    while suspects:
        suspect = suspects.pop(0)
        for choice in (partners, suspects, others):
            partner = next((h for h in choice if frozenset((suspect, h)) not in known.failed), None)
            if partner is not None:
                choice.remove(partner)
                groups.append((suspect, partner))
                break
    return tuple(groups)


def judge(hosts: Iterable[str], answers: Sequence[HostAnswer]) -> dict[str, HostFinding]:
    """The verdict about each of these hosts."""
    known = _sort_out(answers)
    times = _matmul_times(answers)
    limit_s = slow_limit_s(times.values())
    found: dict[str, HostFinding] = {}
    for host in hosts:
        measures = [a.measure for a in answers if a.host_id == host and a.measure is not None]
        devices = max((measure.devices for measure in measures), default=0)
        passed_s = [m.all_reduce_s for m in measures if m.failed is None]
        facts = (devices, times.get(host, 0.0), min(passed_s, default=0.0))
        if host in known.bad:
            found[host] = HostFinding(CheckState.FAILED, known.bad[host], *facts)
        elif host not in known.good:
            found[host] = HostFinding(CheckState.UNKNOWN, _doubt(host, answers), *facts)
        elif limit_s and times.get(host, 0.0) > limit_s:
            usual_s = median(times.values())
            message = f"the matrix product took {times[host]:.3f} s, on the median of all hosts {usual_s:.3f} s"
            found[host] = HostFinding(CheckState.SLOW, message, *facts)
        else:
            found[host] = HostFinding(CheckState.PASSED, "", *facts)
    return found


def slow_limit_s(times_s: Iterable[float]) -> float:
    """The matrix product of a host that takes longer is slow; 0.0 if there are too few hosts to compare."""
    known = list(times_s)
    if len(known) < _SLOW_HOSTS:
        return 0.0
    middle = median(known)
    return max(SLOW_FACTOR * middle, middle + _DEVIATIONS * median(abs(time_s - middle) for time_s in known))


def _sort_out(answers: Sequence[HostAnswer]) -> _Sorted:
    groups: dict[tuple[int, tuple[str, ...]], list[HostAnswer]] = {}
    bad: dict[str, str] = {}
    for answer in answers:
        groups.setdefault((answer.round, answer.group), []).append(answer)
        if answer.measure is None:
            bad.setdefault(answer.host_id, "its daemon did not answer")
        elif answer.measure.failed is CheckStage.DEVICE:
            bad[answer.host_id] = answer.measure.message
    good: set[str] = set()
    failed: list[tuple[str, ...]] = []
    for (_, group), of_group in groups.items():
        if len(of_group) == len(group) and all(a.measure is not None and a.measure.failed is None for a in of_group):
            good.update(group)
        elif not any(a.measure is not None and a.measure.failed is CheckStage.VOID for a in of_group):
            failed.append(group)
    good.difference_update(bad)
    for group in failed:
        doubtful = [host for host in group if host not in good]
        if len(doubtful) == 1 and doubtful[0] not in bad:
            others = " and ".join(host for host in group if host in good)
            why = next((a.measure.message for a in answers if a.host_id == doubtful[0] and a.measure), "")
            alone = f"it failed together with {others}, which passed with another host" if others else "it failed"
            bad[doubtful[0]] = f"{alone}{f': {why}' if why else ''}"
    return _Sorted(frozenset(good), bad, frozenset(frozenset(group) for group in failed))


def _matmul_times(answers: Iterable[HostAnswer]) -> dict[str, float]:
    """host -> the shortest time of its matrix product, so that a pause in one round does not count."""
    times: dict[str, float] = {}
    for answer in answers:
        if answer.measure is not None and answer.measure.matmul_s > 0.0:
            time_s = answer.measure.matmul_s
            times[answer.host_id] = min(time_s, times.get(answer.host_id, time_s))
    return times


def _doubt(host: str, answers: Sequence[HostAnswer]) -> str:
    mine = [answer for answer in answers if host in answer.group]
    others = sorted({other for answer in mine for other in answer.group} - {host})
    why = next((a.measure.message for a in mine if a.host_id == host and a.measure and a.measure.message), "")
    if not others:
        return why or "it was not checked to the end"
    named = " and ".join(others)
    void = [a for a in mine if a.measure is not None and a.measure.failed is CheckStage.VOID]
    if void and {(a.round, a.group) for a in void} == {(a.round, a.group) for a in mine}:
        last = max(void, key=lambda answer: (answer.round, answer.host_id == host))
        blame = "" if last.host_id == host else f"{last.host_id}: "
        return f"it was not checked to the end ({blame}{last.measure.message if last.measure else ''})"
    which = "one of these two" if len(others) == 1 else "at least one of them"
    cause = f" ({why})" if why else ""
    return f"it failed together with {named}: {which} is bad, and no other host could show which{cause}"
