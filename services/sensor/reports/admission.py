"""Whether a report is taken. Pure: time comes in as an argument.

What the types say (bounds of numbers, lengths, alphabets) is checked when a report is decoded; here is what only its
context tells: whose token came with it, what this daemon said before, what time it is. A report that is refused
changes nothing, here or elsewhere.

A daemon that succeeds the present one of its host is heard at once; a second one is not, as long as the first reports.
A daemon numbers its reports. One whose reply was lost sends the next with the next number, and so is never stuck; its
signals carry numbers of their own and are deduplicated where they are stored. One whose clock is wrong is told the
time, and comes again at once. Each sensor knows only what it saw itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

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
from flyball.contracts.reports.rank_columns import (
    CompletedSteps,
    Workers,
    check_completed,
    check_progress,
    check_workers,
)
from flyball.contracts.reports.signals import (
    HostReturned,
    HostSilent,
    HostSuspect,
    RankLoss,
    RankMarks,
    RankStalled,
    Report,
    Signal,
    SignalUnreadable,
)
from flyball.contracts.reports.succession import is_given_up
from flyball.contracts.wire import check_version

INCARNATIONS_KEPT = 5  # per host
MAX_NAMES = 4_096  # of jobs, remembered as ones that can be
_SUPERVISORS_OWN = (HostSilent, HostSuspect, HostReturned, RankStalled, SignalUnreadable)


class AdmissionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every number that the admission uses, with its unit."""

    max_clock_error_s: float = 60.0  # by which the sender's clock may be wrong, either way
    resume_after_s: float = 30.0  # a superseded daemon is heard again when its successor was silent for this long
    max_hosts: int = 20_000  # the one not heard of for longest makes room
    max_signals: int = 1_000  # in one report; a daemon sends 200
    # Of one host, on the average. A spool of 10,000 signals is told in less than a minute.
    signals_per_s: float = 200.0
    signal_bytes_per_s: float = 256 << 10
    large_bytes_per_s: float = 2 << 20  # of large reports, which cost time to decode
    burst_s: float = 10.0  # so much of each at once


class _Host:
    __slots__ = ("copies", "has_left", "heard_s", "incarnation", "interval_s", "older", "sent_at", "seq", "workers")

    def __init__(self, incarnation: str) -> None:
        self.heard_s = 0.0
        # Of the newest report; the same objects mean the same again.
        self.copies: Sequence[ShardCopy] = ()
        self.workers: Sequence[Workers] = ()
        # Of the present daemon's newest report
        self.incarnation = incarnation
        self.seq = 0
        self.sent_at = 0.0
        self.interval_s = 0.0
        self.has_left = False
        self.older: dict[str, tuple[int, float]] = {}  # of daemons before it: incarnation -> (seq, sent_at)

    def begin(self, incarnation: str) -> None:
        """Another daemon speaks for the host now."""
        self.older[self.incarnation] = (self.seq, self.sent_at)
        self.older.pop(incarnation, None)
        if len(self.older) >= INCARNATIONS_KEPT:
            del self.older[next(iter(self.older))]
        self.incarnation = incarnation


class Allowance:
    """What each host may send of something, counted in seconds of its rate (a token bucket): up to `burst_s` at once.
    Who has some left may go beyond, and waits the longer: so everything gets through in the end."""

    def __init__(self, what: str, *, burst_s: float, max_hosts: int) -> None:
        self._what = what
        self._burst_s = burst_s
        self._max_hosts = max_hosts
        self._paid_until_s: dict[str, float] = {}

    def check(self, host_id: str, now_s: float) -> None:
        """Raise TooBusy while the host has nothing left."""
        wait_s = self._paid_until_s.get(host_id, 0.0) - self._burst_s - now_s
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
    """`check` asks, `taken` remembers: between them the report may still find the queue full, and then it may come
    again as it is. Not thread-safe: one loop feeds it."""

    def __init__(self, settings: AdmissionSettings = AdmissionSettings()) -> None:  # noqa: B008 - frozen
        self._settings = settings
        self._hosts: dict[str, _Host] = {}  # in the order of heard_s
        self._names: set[str] = set()
        self._signals = Allowance("signals", burst_s=settings.burst_s, max_hosts=settings.max_hosts)
        self._large = Allowance("bytes", burst_s=settings.burst_s, max_hosts=settings.max_hosts)

    def check(self, report: Report, *, host_id: str, now: float, now_s: float) -> None:
        """Raise the reason for which a report, that came with the token of `host_id`, is not taken.

        `now` is wall clock, `now_s` a monotonic clock that never goes back.
        """
        check_version(report.version)
        if report.facts.host_id != host_id:
            raise Forbidden(
                f"A report of host {report.facts.host_id!r} came with the token of {host_id!r}.",
                hint="a daemon speaks for its own host; make a token with `flyball token host HOST_ID`",
            )
        known = self._hosts.get(host_id)
        if known is not None:
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
        self._check_clock(report, now)
        if report.signals:
            self._check_signals(report.signals, host_id)
        if report.copies and (known is None or report.copies is not known.copies):
            _check_copies(report.copies, host_id)

    def check_large(self, host_id: str, size_bytes: int, *, now_s: float) -> None:
        """Raise TooBusy for a large report, before it is decoded, of a host that sent too much of that kind."""
        self._large.check(host_id, now_s)
        self._large.spend(host_id, size_bytes / self._settings.large_bytes_per_s, now_s)

    def check_quota(self, host_id: str, *, now_s: float) -> None:
        """Raise TooBusy while a host may send no further signals."""
        self._signals.check(host_id, now_s)

    def spend(self, host_id: str, n_signals: int, size_bytes: int, *, now_s: float) -> None:
        """Signals of the host were taken, so many and so large."""
        settings = self._settings
        cost_s = max(n_signals / settings.signals_per_s, size_bytes / settings.signal_bytes_per_s)
        self._signals.spend(host_id, cost_s, now_s)

    def taken(self, report: Report, *, now_s: float) -> None:
        """The report was taken: what is not newer is refused from now on."""
        host_id = report.facts.host_id
        host = self._hosts.pop(host_id, None)
        if host is None:
            while len(self._hosts) >= self._settings.max_hosts:
                del self._hosts[next(iter(self._hosts))]
            host = _Host(report.incarnation)
        elif host.incarnation != report.incarnation:
            host.begin(report.incarnation)
        host.seq, host.sent_at = report.seq, report.sent_at
        host.interval_s, host.has_left = report.interval_s, report.leaves
        host.heard_s = now_s
        self._hosts[host_id] = host
        host.copies, host.workers = report.copies, report.workers

    def _check_signals(self, signals: Sequence[Signal], host_id: str) -> None:
        limit = self._settings.max_signals
        if len(signals) > limit:
            raise InvalidMessage(
                f"The report of {host_id!r} carries {len(signals)} signals; {limit} are the most.",
                hint="send them in several reports",
            )
        _check_signals(signals, host_id)

    def _check_order(self, report: Report, host: _Host, now_s: float) -> None:
        if report.incarnation == host.incarnation:
            last_seq, last_sent_at = host.seq, host.sent_at
        elif report.incarnation in host.older:
            if now_s - host.heard_s <= self._settings.resume_after_s:
                raise DaemonSuperseded(
                    f"Another daemon, started later, reports for host {report.facts.host_id!r}.",
                    hint="two daemons have one host id: give each machine its own --host-id, and end the one too many",
                )
            last_seq, last_sent_at = host.older[report.incarnation]
        else:
            is_next = host.has_left or host.incarnation in report.succeeds
            if not is_next and not is_given_up(now_s - host.heard_s, max(host.interval_s, report.interval_s)):
                raise DaemonSuperseded(
                    f"Another daemon reports for host {report.facts.host_id!r} right now.",
                    hint="give each machine its own --host-id; of two daemons with one id the first one is heard",
                )
            return
        numbered = report.seq > 0 and last_seq > 0
        this, last = (report.seq, last_seq) if numbered else (report.sent_at, last_sent_at)
        if this > last:
            return
        if this == last:
            raise ReportReplayed("This report was taken before.", hint="send the next one; nothing was changed")
        raise ReportOutOfOrder(
            "A newer report of this daemon was taken before.", hint="send the next one; nothing was changed"
        )

    def _check_names(self, parts: Iterable[CompletedSteps | RankMarks | RestoreReport | RankLoss]) -> None:
        """What `RepeatedJobName` leaves to whoever takes a report."""
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
        tolerance_s = self._settings.max_clock_error_s
        if abs(report.sent_at - now) > tolerance_s:
            raise _wrong_clock("The report", report.sent_at - now, now)
        if report.signals or report.marks or report.restores:
            latest = max(_moments(report), default=now)
        elif report.completed:
            latest = max([max(times) for steps in report.completed for times in steps.completed_at], default=now)
        else:
            return
        if latest - now > tolerance_s:
            raise _wrong_clock("What the report tells of", latest - now, now)


def reason_of(error: FlyballError) -> str:
    """A label for counting: one of few words."""
    return "invalid" if isinstance(error, InvalidMessage) else error.code


def _wrong_clock(what: str, ahead_s: float, now: float) -> WrongClock:
    where = "in the future" if ahead_s > 0 else "in the past"
    return WrongClock(
        f"{what} is dated {abs(ahead_s):.0f} s {where}, by the supervisor's clock.",
        server_time=now,
        hint="the daemon corrects its time and sends again; let the hosts keep time with NTP",
    )


def _moments(report: Report) -> Iterator[float]:
    """When the things of a report happened."""
    for signal in report.signals:
        yield signal.at
    for steps in report.completed:
        yield from map(max, steps.completed_at)
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
            f"The report of {host_id!r} tells of copies on other hosts.", hint="a daemon sends what it observed itself"
        )


def _check_signals(signals: Iterable[Signal], host_id: str) -> None:
    newest: dict[str, int] = {}
    for signal in signals:
        if signal.source != host_id:
            raise Forbidden(
                f"The report of {host_id!r} carries another host's signals.",
                hint="a daemon sends what it observed itself",
            )
        if isinstance(signal.body, _SUPERVISORS_OWN):
            raise Forbidden(
                f"The report of {host_id!r} carries a {signal.body.__struct_config__.tag} signal, which only the "
                "supervisor can raise.",
                hint="a daemon sends what it observed itself",
            )
        if signal.seq <= newest.get(signal.incarnation, 0):
            raise InvalidMessage(
                f"The signals of incarnation {signal.incarnation!r} are not in order at {signal.seq}.",
                hint="signals count up from 1, and go in order",
            )
        newest[signal.incarnation] = signal.seq
