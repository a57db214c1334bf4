"""Finds hosts that stopped reporting. Pure: time comes in as an argument.

A host is yellow (suspect) well before it is red (silent). Its neighbours are asked as soon as it is yellow. If one of
them reaches it, or its job completes steps, which needs its ranks, only its way to this sensor is cut: it stays
yellow. To turn red at its deadline it needs a witness: another host, itself reporting, whose engine cannot reach it.
Without a witness this sensor may be the one that is cut off. So it waits longer, and longest when many are overdue. A
neighbour that its job got only now, by a move, has time to answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Set
from math import inf
from typing import Protocol

import msgspec

from flyball.contracts.reports.signals import HostReturned, HostSilent, HostSuspect, Report, SignalBody
from services.sensor.detector.correlation import WINDOW_S, Fall, SilentHosts, due_groups, groups_of
from services.sensor.detector.watched_host import FORGET_AFTER_S, SilenceSettings, WatchedHost
from services.sensor.detector.witnesses import Witnesses

MAX_HOSTS = 20_000  # the one that is silent for longest makes room
_ELSEWHERE_SUSPECT_FACTOR = 0.5  # as `suspect_factor`, for a host that reports to another sensor
_MANY_HOSTS, _MANY_FRACTION = 3, 0.5  # so many overdue hosts, and such a part of all, or all of several, are a mass
# Ranks may not need each other, and so steps alone count only for a while. Even less if neighbours cannot reach the
# host: then it may train, but nobody holds its checkpoints.
_STEPS_ALONE_MAX_S, _ACCUSED_MAX_S = 30.0, 10.0
_ELSEWHERE_AFTER_S = 2.0  # without a report here, a newer one elsewhere counts, whatever the clocks say
_SCAN_S_PER_SUSPECT = 1e-4  # pause between two looks at the suspects: a look at 5,000 takes 0.08 s
_MAX_SCAN_S = 1.0
_LEAST_EVERY_S = 10.0
_JITTER_S = 0.5  # two report times that differ by less than this are of the same report


class Training(Protocol):
    """Conclusions about hosts from the steps of their job."""

    def stepped_s(self, host_id: str) -> float:
        """When a job with ranks on this host last completed a step on any host; -inf: never."""
        ...

    def advances(self, host_id: str, now_s: float) -> bool:
        """Whether such a job has completed a step within the time that it usually takes."""
        ...


class Suspicion(msgspec.Struct, frozen=True):
    """A host that is yellow or red. `witnesses` cannot reach it either, `reached_by` can."""

    host_id: str
    is_silent: bool  # red: reported as HostSilent
    silent_s: float
    deadline_s: float
    witnesses: tuple[str, ...]
    reached_by: tuple[str, ...] = ()


class _Case(msgspec.Struct, frozen=True):
    """The evidence about a yellow host."""

    name: str
    host: WatchedHost
    deadline_s: float
    alive_s: float  # when it was last alive, by its report or by evidence that counts as one
    accusers: tuple[str, ...]
    reached_by: tuple[str, ...]
    steps_advance: bool


class SilenceWatch:
    """Watches report times per host. A report costs O(1): its gaps are evaluated only if the next one is late."""

    def __init__(self, settings: SilenceSettings, training: Training) -> None:
        self._settings = settings
        self._training = training
        self._witnesses = Witnesses()
        self.questions = self._witnesses.questions  # host -> the hosts to ask it about, as of the last tick
        self._hosts: dict[str, WatchedHost] = {}  # in the order of last_seen_s
        self._domains: Counter[str] = Counter()
        self._next_scan_s = 0.0
        self._least_again_s = 0.0
        self._least_s = inf  # no host whose last report is younger than this is yellow
        self._doubt_until_s = -inf
        self._forgotten: list[str] = []
        self._only_expected: set[str] = set()  # no report came here

    def __len__(self) -> int:
        return len(self._hosts)

    def set_neighbours(self, known: Mapping[str, tuple[str, ...]]) -> None:
        """host -> the hosts to ask about it."""
        self._witnesses.set_neighbours(known)

    def doubt(self, until_s: float) -> None:
        """Let no host turn red before that."""
        self._doubt_until_s = max(self._doubt_until_s, until_s)

    def expect(self, host_id: str, now_s: float, report_ago_s: float, reported_at: float) -> None:
        """Watch a host that should report to some sensor. A report to another sensor `report_ago_s` ago counts like one
        to this sensor, if it is clearly newer. So does a `reported_at` (that sensor's wall clock) that advances while
        no report comes here: this works even if the clocks of the sensors disagree."""
        host = self._hosts.get(host_id)
        if host is None:
            host = self._admit(host_id, now_s)
            self._only_expected.add(host_id)
        silent_s = now_s - host.last_seen_s
        moved_s = reported_at - host.reported_at if host.reported_at else 0.0
        moved = moved_s > _JITTER_S and silent_s > _ELSEWHERE_AFTER_S
        if abs(moved_s) > _JITTER_S or not host.reported_at:
            host.reported_at = reported_at
        if 0.0 <= report_ago_s < 0.5 * silent_s or moved:
            host.last_seen_s = now_s - report_ago_s if 0.0 <= report_ago_s < silent_s else now_s
            host.is_red = host.is_suspect = False
            self._hosts[host_id] = self._hosts.pop(host_id)
            self._next_scan_s = min(self._next_scan_s, now_s)

    def expect_no_others(self, expected: Set[str]) -> None:
        """Forget hosts that never reported here, and should report nowhere any more."""
        for host_id in self._only_expected - expected:
            self.leave(host_id)

    def observe(self, report: Report, now_s: float) -> tuple[list[SignalBody], bool]:
        """Returns signals, and whether this is the host's newest report. A repeated or late one only shows that it
        is alive."""
        host_id = report.facts.host_id
        signals: list[SignalBody] = []
        host = self._hosts.pop(host_id, None)
        self._only_expected.discard(host_id)
        if host is None:
            host = self._admit(host_id, now_s)
        else:
            gap_s = max(0.0, now_s - host.last_seen_s)
            if host.is_red or host.is_suspect:
                signals.append(HostReturned(host_id=host_id, away_s=gap_s))
                host.is_red = host.is_suspect = False
            elif host.incarnation == report.incarnation:
                host.note_gap(gap_s)
            self._hosts[host_id] = host
        host.last_seen_s = max(host.last_seen_s, now_s)
        is_new = report.incarnation != host.incarnation
        is_newest = is_new or report.sent_at > host.sent_at
        if is_newest:
            host.sent_at = report.sent_at
            self._witnesses.observe(report, now_s)
            if host.domain != report.facts.failure_domain:
                self._move(host, report.facts.failure_domain)
        if is_new or host.interval_s != report.interval_s:
            host.begin(report.incarnation, report.interval_s)
            self._least_s = min(self._least_s, host.least_s)
        due_s = now_s + host.least_s
        if due_s < self._next_scan_s:  # noqa: PLR1730 - for every report, and min() takes four times as long
            self._next_scan_s = due_s
        return signals, is_newest

    def note_alive(self, host_id: str, now_s: float) -> list[SignalBody]:
        """A host is alive, but it is not known when its next report is due."""
        host = self._hosts.pop(host_id, None) or self._admit(host_id, now_s)
        signals: list[SignalBody] = []
        if host.is_red or host.is_suspect:
            signals.append(HostReturned(host_id=host_id, away_s=max(0.0, now_s - host.last_seen_s)))
            host.is_red = host.is_suspect = False
        host.end()
        host.last_seen_s = max(host.last_seen_s, now_s)
        self._hosts[host_id] = host
        self._least_s = min(self._least_s, host.least_s)
        self._next_scan_s = min(self._next_scan_s, now_s + host.least_s)
        return signals

    def leave(self, host_id: str) -> None:
        """A host announced its end: do not expect reports."""
        if host_id in self._hosts:
            self._forget(host_id)

    def tick(self, now_s: float) -> list[SignalBody]:
        """HostSilent for every host that turned red; HostSuspect for one that did not because somebody vouches for it.
        Cheap while no host can be overdue."""
        if now_s < self._next_scan_s:
            return []
        overdue = self._overdue(now_s)
        for name in [n for n, h in overdue.items() if now_s - h.last_seen_s > FORGET_AFTER_S]:
            if overdue[name].is_red:
                self._forget(name)
        yellow = {name: host for name, host in overdue.items() if not host.is_red}
        self._witnesses.ask_about(yellow, now_s)
        signals: list[SignalBody] = []
        if now_s >= self._doubt_until_s:
            cases = {name: self._weigh(name, host, overdue, now_s) for name, host in yellow.items()}
            signals += self._suspects(cases, now_s)
            signals += self._silent(cases, len(overdue), now_s)
        if now_s >= self._least_again_s:  # the host with the shortest deadline may be gone
            self._least_s = min((h.least_s for h in self._hosts.values()), default=inf)
            self._least_again_s = now_s + _LEAST_EVERY_S
        soonest_s = self._soonest_s(now_s)
        self._next_scan_s = max(soonest_s, now_s + min(_SCAN_S_PER_SUSPECT * len(yellow), _MAX_SCAN_S))
        return signals

    @property
    def has_forgotten(self) -> bool:
        """Whether `take_forgotten` has any."""
        return bool(self._forgotten)

    def take_forgotten(self) -> list[str]:
        """Hosts that were dropped since the last call, so that others can drop them too."""
        taken, self._forgotten = self._forgotten, []
        return taken

    def suspicion(self, now_s: float) -> tuple[Suspicion, ...]:
        """Every host that is yellow or red, by name."""
        overdue = self._overdue(now_s)
        cases = [self._weigh(name, host, overdue, now_s) for name, host in sorted(overdue.items())]
        return tuple(
            Suspicion(
                host_id=case.name,
                is_silent=case.host.is_red,
                silent_s=now_s - case.host.last_seen_s,
                deadline_s=case.deadline_s,
                witnesses=case.accusers,
                reached_by=case.reached_by,
            )
            for case in cases
        )

    # --- weighing ----------------------------------------------------------------------------------------------------

    def _weigh(self, name: str, host: WatchedHost, overdue: Collection[str], now_s: float) -> _Case:
        """Collect the evidence for a host and against it. One neighbour may lie or be wrong: its word counts without
        limit only together with a second one's, or with steps that need the host's ranks."""
        settings, deadline_s = self._settings, host.deadline_s
        silent_s, alive_s = now_s - host.last_seen_s, host.last_seen_s
        testified = self._witnesses.testified(name)
        reached_by = tuple(sorted(w for w, at in testified.items() if at > alive_s and now_s - at <= deadline_s))
        advances = self._training.advances(name, now_s)
        if testified and (advances or len(reached_by) > 1 or silent_s <= settings.vouched_max_s):
            alive_s = max(alive_s, *testified.values())
        accusers = tuple(self._witnesses.accusers(name, overdue))
        if reached_by or silent_s <= (_ACCUSED_MAX_S if accusers else _STEPS_ALONE_MAX_S):
            alive_s = max(alive_s, self._training.stepped_s(name))
        return _Case(
            name=name,
            host=host,
            deadline_s=deadline_s,
            alive_s=min(alive_s, now_s),
            accusers=accusers,
            reached_by=reached_by,
            steps_advance=advances,
        )

    def _suspects(self, cases: Mapping[str, _Case], now_s: float) -> list[SignalBody]:
        signals: list[SignalBody] = []
        for case in cases.values():
            silent_s = now_s - case.host.last_seen_s
            settings = self._settings
            factor = settings.suspect_factor if case.host.incarnation else _ELSEWHERE_SUSPECT_FACTOR
            is_late = silent_s > factor * case.deadline_s
            is_vouched_for = case.alive_s > case.host.last_seen_s and now_s - case.alive_s <= case.deadline_s
            if case.host.is_suspect or not is_late or not is_vouched_for:
                continue
            case.host.is_suspect = True
            signals.append(
                HostSuspect(
                    host_id=case.name,
                    silent_s=silent_s,
                    deadline_s=case.deadline_s,
                    reached_by=case.reached_by,
                    steps_advance=case.steps_advance,
                )
            )
        return signals

    def _silent(self, cases: Mapping[str, _Case], overdue: int, now_s: float) -> list[SignalBody]:
        alone = self._factor_alone(overdue)
        falls = [
            self._fall(case, self._factor(case, alone), -inf if case.accusers else self._answered_s(case))
            for case in cases.values()
        ]
        falls = [fall for fall in falls if now_s - cases[fall.host_id].alive_s > cases[fall.host_id].deadline_s / 2]
        signals: list[SignalBody] = []
        for group in due_groups(self._together(falls, cases), now_s):
            signals += [self._call_silent(cases[name], group, alone, now_s) for name in group.host_ids]
        return signals

    def _together(self, falls: list[Fall], cases: Mapping[str, _Case]) -> list[Fall]:
        """If hosts of one failure domain fell together, one outside witness against any of them counts against all."""
        found = []
        for group in groups_of(falls, WINDOW_S):
            domains = Counter(fall.domain for fall in group if fall.domain)
            witnessed = {
                f.domain for f in group if domains[f.domain] > 1 and self._factor(cases[f.host_id], inf) <= 1.0
            }
            found += [self._fall(cases[f.host_id], 1.0) if f.domain in witnessed else f for f in group]
        return found

    def _answered_s(self, case: _Case) -> float:
        """When all its witnesses have had time to answer. A new one answers with its next report but one."""
        return self._witnesses.all_asked_since(case.name) + case.host.stated_s

    def _fall(self, case: _Case, factor: float, earliest_s: float = -inf) -> Fall:
        due_s = max(case.alive_s + factor * case.deadline_s, earliest_s)
        return Fall(
            host_id=case.name,
            domain=case.host.domain,
            last_seen_s=case.host.last_seen_s,
            interval_s=case.host.stated_s / self._settings.interval_factor,
            due_s=due_s,
        )

    def _factor(self, case: _Case, alone: float) -> float:
        """How many times its deadline a host has; `alone`: if no witness accuses it."""
        if not case.accusers:
            return alone
        domains = {self._hosts[name].domain for name in case.accusers if name in self._hosts}
        is_near = domains == {case.host.domain} and len(self._domains) > 1
        return self._settings.near_factor if is_near else 1.0

    def _factor_alone(self, overdue: int) -> float:
        """The factor without witnesses. If many are overdue, this sensor itself may be cut off from them."""
        settings, known = self._settings, len(self._hosts)
        is_mass = overdue >= max(_MANY_HOSTS, _MANY_FRACTION * known) or 1 < known <= overdue
        return settings.correlated_factor if is_mass else settings.unwitnessed_factor

    def _call_silent(self, case: _Case, group: SilentHosts, alone: float, now_s: float) -> HostSilent:
        case.host.is_red = True
        return HostSilent(
            host_id=case.name,
            silent_s=now_s - case.host.last_seen_s,
            deadline_s=(1.0 if group.domain else self._factor(case, alone)) * case.deadline_s,
            witnesses=case.accusers,
            domain=group.domain,
            together=len(group.host_ids),
            within_s=group.within_s,
            after_suspect=case.host.is_suspect,
        )

    def _overdue(self, now_s: float) -> dict[str, WatchedHost]:
        """The yellow and red hosts. One comparison rules out nearly all others."""
        before_s = now_s - self._least_s
        late = [(name, host) for name, host in self._hosts.items() if host.last_seen_s < before_s]
        return {name: host for name, host in late if host.is_red or host.is_yellow(now_s)}

    def _soonest_s(self, now_s: float) -> float:
        """The earliest moment at which another host may be yellow, or a yellow one must be weighed again."""
        before_s = now_s - self._least_s
        late = [host for host in self._hosts.values() if host.last_seen_s < before_s]
        in_time_s = min(
            (host.last_seen_s for host in self._hosts.values() if host.last_seen_s >= before_s), default=inf
        )
        default_s = now_s + self._settings.max_deadline_s
        late_s = min((host.look_at_s(now_s) for host in late if not host.is_red), default=default_s)
        return min(late_s, in_time_s + self._least_s)

    # --- hosts -------------------------------------------------------------------------------------------------------

    def _admit(self, host_id: str, now_s: float) -> WatchedHost:
        if len(self._hosts) >= MAX_HOSTS:
            self._forget(next(iter(self._hosts)))
        host = WatchedHost(now_s, self._settings)
        self._hosts[host_id] = host
        self._least_s = min(self._least_s, host.least_s)
        self._domains[host.domain] += 1
        self._next_scan_s = min(self._next_scan_s, host.look_at_s(now_s))
        return host

    def _move(self, host: WatchedHost, domain: str) -> None:
        self._leave(host.domain)
        host.domain = domain
        self._domains[domain] += 1

    def _leave(self, domain: str) -> None:
        self._domains[domain] -= 1
        if not self._domains[domain]:
            del self._domains[domain]

    def _forget(self, host_id: str) -> None:
        self._leave(self._hosts.pop(host_id).domain)
        self._only_expected.discard(host_id)
        self._forgotten.append(host_id)
        self._witnesses.forget(host_id)
