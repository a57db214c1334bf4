"""Whether a report is accepted. Pure: time comes in as an argument.

Decoding checks the types (ranges, lengths, alphabets). Here is what depends on the context: whose token came with the
report, what this daemon reported before, what time it is. A refused report changes nothing, here or elsewhere.

A daemon that succeeds the current one of its host is accepted at once; a second one is not, while the first reports.
Daemons number their reports. One whose reply was lost sends the next report with the next number, so it is never stuck.
Signals have numbers of their own, and the store drops duplicates. A daemon whose clock is wrong gets the time in the
reply, and sends again at once. Each sensor knows only what it has seen itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from flyball.contracts.checkpoints import RestoreReport, ShardCopy
from flyball.contracts.errors import (
    DaemonSuperseded,
    FlyballError,
    Forbidden,
    InvalidMessage,
    ReportOutOfOrder,
    ReportReplayed,
    TooBusy,
    WrongClock,
)
from flyball.contracts.identity import is_name
from flyball.contracts.reports.conditions import BY_API
from flyball.contracts.reports.rank_columns import (
    CompletedSteps,
    Workers,
    check_completed,
    check_progress,
    check_workers,
)
from flyball.contracts.reports.signals import (
    ConditionBegan,
    ConditionEnded,
    ConditionsStand,
    FalseAlarm,
    HostReturned,
    HostSilent,
    HostSuspect,
    RankMarks,
    RankStalled,
    Report,
    Signal,
    SignalBody,
    SignalUnreadable,
)
from flyball.contracts.reports.succession import is_given_up
from flyball.contracts.reports.training_health import (
    LossDiverged,
    LossRecovered,
    RankCompute,
    RankLoss,
    Straggler,
    StragglerRecovered,
)
from flyball.contracts.wire import check_version

MAX_CLOCK_ERROR_S = 60.0  # by which the sender's clock may be wrong, either way
RESUME_AFTER_S = 30.0  # a superseded daemon is accepted again once its successor was silent for this long
MAX_HOSTS = 20_000  # the one that is silent for longest makes room
MAX_SIGNALS = 1_000  # in one report; a daemon sends 200
# Long-term rates of one host. A spool of 10,000 signals passes in less than a minute.
SIGNALS_PER_S = 200.0
SIGNAL_BYTES_PER_S = 256 << 10
LARGE_BYTES_PER_S = 2 << 20  # of large reports, which cost time to decode
BURST_S = 10.0  # so much of each at once
INCARNATIONS_KEPT = 5  # per host
MAX_NAMES = 4_096  # of jobs, remembered as valid
_SUPERVISORS_OWN = (
    HostSilent,
    HostSuspect,
    HostReturned,
    RankStalled,
    FalseAlarm,
    LossDiverged,
    LossRecovered,
    Straggler,
    StragglerRecovered,
    SignalUnreadable,
)
_OfJob: TypeAlias = CompletedSteps | RankMarks | RestoreReport | RankLoss | RankCompute


class _Host:
    __slots__ = ("copies", "has_left", "incarnation", "interval_s", "older", "reported_s", "sent_at", "seq", "workers")

    def __init__(self, incarnation: str) -> None:
        self.reported_s = 0.0
        # Of the newest report; the same objects mean the same values.
        self.copies: Sequence[ShardCopy] = ()
        self.workers: Sequence[Workers] = ()
        # Of the current daemon's newest report
        self.incarnation = incarnation
        self.seq = 0
        self.sent_at = 0.0
        self.interval_s = 0.0
        self.has_left = False
        self.older: dict[str, tuple[int, float]] = {}  # earlier daemons: incarnation -> (seq, sent_at)

    def begin(self, incarnation: str) -> None:
        """Another daemon reports for the host from now on."""
        self.older[self.incarnation] = (self.seq, self.sent_at)
        self.older.pop(incarnation, None)
        if len(self.older) >= INCARNATIONS_KEPT:
            del self.older[next(iter(self.older))]
        self.incarnation = incarnation


class Allowance:
    """A token bucket per host, in seconds of the rate: up to `BURST_S` at once. A host with anything left may overdraw
    it, and waits longer afterwards, so everything gets through in the end."""

    def __init__(self, what: str, *, max_hosts: int) -> None:
        self._what = what
        self._max_hosts = max_hosts
        self._paid_until_s: dict[str, float] = {}

    def check(self, host_id: str, now_s: float) -> None:
        """Raise TooBusy if the host has nothing left."""
        wait_s = self._paid_until_s.get(host_id, 0.0) - BURST_S - now_s
        if wait_s > 0.0:
            raise TooBusy(
                f"Host {host_id!r} sends more {self._what} than one host may.",
                retry_after_s=wait_s,
                hint="send the report again after Retry-After; signals stay in the spool until then",
            )

    def spend(self, host_id: str, cost_s: float, now_s: float) -> None:
        paid_until_s = max(now_s, self._paid_until_s.pop(host_id, now_s)) + cost_s
        while len(self._paid_until_s) >= self._max_hosts:
            del self._paid_until_s[next(iter(self._paid_until_s))]
        self._paid_until_s[host_id] = paid_until_s


class Admission:
    """`check` decides, `accepted` remembers. The queue may prove full in between; then the same report may come again.
    Not thread-safe: one loop feeds it."""

    def __init__(self, max_hosts: int = MAX_HOSTS) -> None:
        self._max_hosts = max_hosts
        self._hosts: dict[str, _Host] = {}  # in the order of reported_s
        self._names: set[str] = set()
        self._signals = Allowance("signals", max_hosts=max_hosts)
        self._large = Allowance("bytes", max_hosts=max_hosts)

    def check(self, report: Report, *, host_id: str, now: float, now_s: float) -> None:
        """Raise the reason to refuse a report that came with the token of `host_id`. `now`: wall clock; `now_s`:
        monotonic clock."""
        check_version(report.version)
        if report.facts.host_id != host_id:
            raise Forbidden(
                f"A report of host {report.facts.host_id!r} came with the token of {host_id!r}.",
                hint="a daemon reports for its own host only; make a token with `flyball token host HOST_ID`",
            )
        known = self._hosts.get(host_id)
        if known is not None and not (report.incarnation == known.incarnation and report.seq > known.seq > 0):
            self._check_order(report, known, now_s)
        workers = report.workers
        if workers and (known is None or workers is not known.workers):
            check_workers(workers)
        if workers or report.progress:
            check_progress(workers, report.progress)
        if report.completed:
            check_completed(report.completed, workers)
            self._check_names(report.completed)
        if report.marks or report.restores:
            self._check_names((*report.marks, *report.restores))
        if report.losses:
            self._check_names(report.losses)
        if report.computes:
            self._check_names(report.computes)
        self._check_clock(report, now)
        if report.signals:
            self._check_signals(report.signals, host_id)
        if report.copies and (known is None or report.copies is not known.copies):
            _check_copies(report.copies, host_id)

    def check_large(self, host_id: str, size_bytes: int, *, now_s: float) -> None:
        """Count a large report before it is decoded. Raise TooBusy if the host has sent too many such bytes."""
        self._large.check(host_id, now_s)
        self._large.spend(host_id, size_bytes / LARGE_BYTES_PER_S, now_s)

    def check_quota(self, host_id: str, *, now_s: float) -> None:
        """Raise TooBusy if the host has sent too many signals."""
        self._signals.check(host_id, now_s)

    def spend(self, host_id: str, n_signals: int, size_bytes: int, *, now_s: float) -> None:
        """Count accepted signals of a host."""
        cost_s = max(n_signals / SIGNALS_PER_S, size_bytes / SIGNAL_BYTES_PER_S)
        self._signals.spend(host_id, cost_s, now_s)

    def accepted(self, report: Report, *, now_s: float) -> None:
        """Remember an accepted report: from now on only newer ones are."""
        host_id = report.facts.host_id
        host = self._hosts.pop(host_id, None)
        if host is None:
            while len(self._hosts) >= self._max_hosts:
                del self._hosts[next(iter(self._hosts))]
            host = _Host(report.incarnation)
        elif host.incarnation != report.incarnation:
            host.begin(report.incarnation)
        host.seq, host.sent_at = report.seq, report.sent_at
        host.interval_s, host.has_left = report.interval_s, report.leaves
        host.reported_s = now_s
        self._hosts[host_id] = host
        host.copies, host.workers = report.copies, report.workers

    def _check_signals(self, signals: Sequence[Signal], host_id: str) -> None:
        if len(signals) > MAX_SIGNALS:
            raise InvalidMessage(
                f"The report of {host_id!r} carries {len(signals)} signals; at most {MAX_SIGNALS} fit into one.",
                hint="send them in several reports",
            )
        _check_signals(signals, host_id)

    def _check_order(self, report: Report, host: _Host, now_s: float) -> None:
        if report.incarnation == host.incarnation:
            last_seq, last_sent_at = host.seq, host.sent_at
        elif report.incarnation in host.older:
            if now_s - host.reported_s <= RESUME_AFTER_S:
                raise DaemonSuperseded(
                    f"Another daemon, started later, reports for host {report.facts.host_id!r}.",
                    hint="two daemons have one host id: give each machine its own --host-id, and stop the extra one",
                )
            last_seq, last_sent_at = host.older[report.incarnation]
        else:
            is_next = host.has_left or host.incarnation in report.succeeds
            if not is_next and not is_given_up(now_s - host.reported_s, max(host.interval_s, report.interval_s)):
                raise DaemonSuperseded(
                    f"Another daemon reports for host {report.facts.host_id!r} right now.",
                    hint="give each machine its own --host-id; of two daemons with one id the first one is accepted",
                )
            return
        numbered = report.seq > 0 and last_seq > 0
        this, last = (report.seq, last_seq) if numbered else (report.sent_at, last_sent_at)
        if this > last:
            return
        if this == last:
            raise ReportReplayed("This report was accepted before.", hint="send the next one; nothing was changed")
        raise ReportOutOfOrder(
            "A newer report of this daemon was accepted before.", hint="send the next one; nothing was changed"
        )

    def _check_names(self, parts: Iterable[_OfJob]) -> None:
        """Check names of type `RepeatedJobName`, which decoding does not."""
        known = self._names
        for part in parts:
            if part.job not in known:
                if not is_name(part.job):
                    raise InvalidMessage(
                        f"{part.job!r} cannot be the name of a job.", hint="check the sender's version"
                    )
                if len(known) >= MAX_NAMES:
                    known.clear()
                known.add(part.job)

    def _check_clock(self, report: Report, now: float) -> None:
        if abs(report.sent_at - now) > MAX_CLOCK_ERROR_S:
            raise _wrong_clock("The report", report.sent_at - now, now)
        latest = now
        for steps in report.completed:
            for times in steps.completed_at:
                latest = max(latest, *times)
        if report.signals or report.marks or report.restores:
            latest = max(latest, *_moments(report))
        if latest - now > MAX_CLOCK_ERROR_S:
            raise _wrong_clock("An event in the report", latest - now, now)


def reason_of(error: FlyballError) -> str:
    """A metric label: one of few words."""
    return "invalid" if isinstance(error, InvalidMessage) else error.code


def _wrong_clock(what: str, ahead_s: float, now: float) -> WrongClock:
    where = "in the future" if ahead_s > 0 else "in the past"
    return WrongClock(
        f"{what} is dated {abs(ahead_s):.0f} s {where}, by the supervisor's clock.",
        server_time=now,
        hint="the daemon corrects its time and sends again; keep the hosts' clocks in sync with NTP",
    )


def _moments(report: Report) -> Iterator[float]:
    """When the events in a report happened, except for completed steps."""
    for signal in report.signals:
        yield signal.at
    for marks in report.marks:
        yield from (
            marks.spawned_at,
            marks.attached_at,
            marks.restore_began_at,
            marks.restored_at,
            marks.first_step_at,
        )
    for restore in report.restores:
        yield restore.at


def _check_copies(copies: Iterable[ShardCopy], host_id: str) -> None:
    if any(copy.host_id not in (host_id, "") for copy in copies):
        raise Forbidden(
            f"The report of {host_id!r} lists copies on other hosts.",
            hint="a daemon reports only what it observed itself",
        )


def _check_signals(signals: Iterable[Signal], host_id: str) -> None:
    newest: dict[str, int] = {}
    for signal in signals:
        if signal.source != host_id:
            raise Forbidden(
                f"The report of {host_id!r} carries another host's signals.",
                hint="a daemon reports only what it observed itself",
            )
        if isinstance(signal.body, _SUPERVISORS_OWN):
            raise Forbidden(
                f"The report of {host_id!r} carries a {signal.body.__struct_config__.tag} signal, which only the "
                "supervisor can raise.",
                hint="a daemon reports only what it observed itself",
            )
        if any(source.startswith(BY_API) for source in _sources(signal.body)):
            raise Forbidden(
                f"The report of {host_id!r} carries a condition that others reported at the API.",
                hint="a daemon reports only what it observed itself",
            )
        if signal.seq <= newest.get(signal.incarnation, 0):
            raise InvalidMessage(
                f"The signals of incarnation {signal.incarnation!r} are out of order at {signal.seq}.",
                hint="signals are numbered from 1 and sent in order",
            )
        newest[signal.incarnation] = signal.seq


def _sources(body: SignalBody) -> tuple[str, ...]:
    """Who reports the conditions that a signal is about."""
    match body:
        case ConditionBegan():
            return (body.condition.source,)
        case ConditionEnded():
            return (body.source,)
        case ConditionsStand():
            return (*body.sources, *(source for source, _, _ in body.keys))
    return ()
