"""How late a host may be with its next report, by what it says and by how it has reported so far. Pure."""

from __future__ import annotations

from array import array

import msgspec

from services.sensor.detector.correlation import CorrelationSettings
from services.sensor.detector.patience import gap_limit_s


class SilenceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a host counts as silent."""

    interval_factor: float = 3.0  # of the interval that the daemon says it reports at
    deviation_factor: float = 6.0  # of the spread of the observed gaps, above their median
    min_deadline_s: float = 0.6
    max_deadline_s: float = 30.0  # unless the daemon's own interval asks for more
    expected_deadline_s: float = 10.0  # for a host that this sensor has not heard of yet
    yellow_fraction: float = 0.5  # of the deadline
    suspect_factor: float = 1.5  # times the deadline, when a host that is vouched for is said to be suspect
    # As these two, for a host that reports to another sensor: before that one calls it silent, which may have nobody to
    # ask, those who report here are asked, and what they say is told.
    elsewhere_yellow_fraction: float = 0.25
    elsewhere_suspect_factor: float = 0.5
    near_factor: float = 1.5  # times the deadline, when only hosts of its own failure domain cannot reach it
    unwitnessed_factor: float = 3.0  # times the deadline, when nobody says that he cannot reach it
    correlated_factor: float = 5.0  # times the deadline, when many hosts are not heard of
    many_hosts: int = 3  # so many, and
    many_fraction: float = 0.5  # so large a part of all that are known, or all of several
    vouched_max_s: float = 300.0  # that one neighbour's word counts while no steps show that it is true
    steps_alone_max_s: float = 30.0  # that steps count which no neighbour confirms: ranks may not need each other
    accused_max_s: float = 10.0  # that they count against neighbours who cannot reach it: it trains, and saves nowhere
    beat_again_s: float = 2.0  # without a report here, a newer one elsewhere counts, whatever the clocks say
    window: int = 32  # gaps remembered per host
    max_hosts: int = 20_000  # the one not heard of for longest makes room
    forget_after_s: float = 3600.0
    correlation: CorrelationSettings = CorrelationSettings()


class HeardHost:
    """A host that reports, or should."""

    __slots__ = (
        "_adapted_s",
        "_gaps_s",
        "_seen",
        "_settings",
        "domain",
        "heard_at",
        "incarnation",
        "interval_s",
        "is_red",
        "is_suspect",
        "last_seen_s",
        "least_s",
        "sent_at",
        "stated_s",
        "yellow_fraction",
    )

    def __init__(self, last_seen_s: float, settings: SilenceSettings) -> None:
        self._settings = settings
        self.last_seen_s = last_seen_s
        self.interval_s = 0.0  # between two reports, as the daemon says
        self.stated_s = settings.expected_deadline_s  # deadline by that interval
        self.yellow_fraction = settings.elsewhere_yellow_fraction  # of the deadline
        self.least_s = self.yellow_fraction * self.stated_s  # it is not yellow sooner after its last report
        self._adapted_s: float | None = 0.0  # deadline by the gaps between reports; None: to be computed
        self._gaps_s: array[float] | None = None  # a ring; the order does not matter
        self._seen = 0  # gaps so far
        self.is_red = False
        self.is_suspect = False
        self.incarnation = ""  # '': it has not reported here
        self.sent_at = 0.0
        self.domain = ""
        self.heard_at = 0.0  # by any sensor, as last read

    def note_gap(self, gap_s: float) -> None:
        """So long after the one before a report came."""
        if self._gaps_s is None:
            self._gaps_s = array("d", bytes(8 * self._settings.window))
        self._gaps_s[self._seen % self._settings.window] = gap_s
        self._seen += 1
        self._adapted_s = None

    def begin(self, incarnation: str, interval_s: float) -> None:
        """A daemon reports here, and says how often it will."""
        settings = self._settings
        self.incarnation, self.interval_s = incarnation, interval_s
        within_s = min(max(interval_s, 0.0), settings.forget_after_s)
        self.stated_s = max(settings.interval_factor * within_s, settings.min_deadline_s)
        self.yellow_fraction = settings.yellow_fraction
        self.least_s = self.yellow_fraction * self.stated_s

    def end(self) -> None:
        """Of the daemon that reports here nothing is known: neither which it is nor how often it will."""
        settings = self._settings
        self.incarnation, self.interval_s = "", 0.0
        self.stated_s = settings.expected_deadline_s
        self.yellow_fraction = settings.elsewhere_yellow_fraction
        self.least_s = self.yellow_fraction * self.stated_s

    @property
    def deadline_s(self) -> float:
        """How long after its last report it is overdue."""
        if self._adapted_s is None:
            gaps_s = self._gaps_s[: self._seen] if self._gaps_s is not None else ()
            adapted_s = gap_limit_s(gaps_s, self._settings.deviation_factor)
            self._adapted_s = min(adapted_s, self._settings.max_deadline_s)
        return max(self.stated_s, self._adapted_s)

    def is_yellow(self, now_s: float) -> bool:
        """Whether it is so late that others are to be asked."""
        late_s = now_s - self.last_seen_s
        return late_s > self.least_s and late_s > self.yellow_fraction * self.deadline_s

    def look_at_s(self, now_s: float) -> float:
        """When it may be yellow at the earliest."""
        at_s = self.last_seen_s + self.least_s
        return at_s if at_s > now_s else max(now_s, self.last_seen_s + self.yellow_fraction * self.deadline_s)
