"""How late a host may be with its next report: by the interval that it announces, and by its reports so far. Pure."""

from __future__ import annotations

from array import array

import msgspec

from services.sensor.detector.patience import gap_limit_s

FORGET_AFTER_S = 3600.0  # without a report
_WINDOW = 32  # gaps remembered per host
_DEVIATION_FACTOR = 6.0  # of the spread of the gaps, above their median
_YELLOW_FRACTION = 0.5  # of the deadline: the host's neighbours are asked from then on
# The sensor that such a host reports to may have nobody to ask. So this one asks earlier, before that one gives up.
_ELSEWHERE_YELLOW_FRACTION = 0.25


class SilenceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a host counts as silent. The factors multiply the host's deadline."""

    interval_factor: float = 3.0  # the deadline, in report intervals of the daemon
    min_deadline_s: float = 0.6  # the shortest, for a host that reports often
    max_deadline_s: float = 30.0  # unless the daemon's own interval asks for more
    expected_deadline_s: float = 10.0  # for a host that has not reported to this sensor yet
    suspect_factor: float = 1.5  # reported as suspect, if somebody vouches for it
    near_factor: float = 1.5  # silent, if only hosts of its own failure domain cannot reach it
    unwitnessed_factor: float = 3.0  # silent, if no witness says that it is unreachable
    correlated_factor: float = 5.0  # silent without a witness, while many hosts are overdue
    vouched_max_s: float = 300.0  # how long one neighbour's word counts while no steps confirm it


class WatchedHost:
    """A host that reports here, or should report to some sensor."""

    __slots__ = (
        "_adapted_s",
        "_gaps_s",
        "_seen",
        "_settings",
        "domain",
        "incarnation",
        "interval_s",
        "is_red",
        "is_suspect",
        "last_seen_s",
        "least_s",
        "reported_at",
        "sent_at",
        "stated_s",
        "yellow_fraction",
    )

    def __init__(self, last_seen_s: float, settings: SilenceSettings) -> None:
        self._settings = settings
        self.last_seen_s = last_seen_s
        self.interval_s = 0.0  # between two reports, as the daemon announces
        self.stated_s = settings.expected_deadline_s  # the deadline that follows from that interval
        self.yellow_fraction = _ELSEWHERE_YELLOW_FRACTION  # of the deadline
        self.least_s = self.yellow_fraction * self.stated_s  # never yellow sooner than this after its last report
        self._adapted_s: float | None = 0.0  # the deadline that follows from the gaps; None: to be computed
        self._gaps_s: array[float] | None = None  # a ring buffer; the order does not matter
        self._seen = 0  # gaps so far
        self.is_red = False
        self.is_suspect = False
        self.incarnation = ""  # of the daemon that reports here; '': none has
        self.sent_at = 0.0
        self.domain = ""
        self.reported_at = 0.0  # to any sensor, by that sensor's clock, as last read

    def note_gap(self, gap_s: float) -> None:
        """Remember the time between two reports."""
        if self._gaps_s is None:
            self._gaps_s = array("d", bytes(8 * _WINDOW))
        self._gaps_s[self._seen % _WINDOW] = gap_s
        self._seen += 1
        self._adapted_s = None

    def begin(self, incarnation: str, interval_s: float) -> None:
        """A daemon reports here, and announces its interval."""
        settings = self._settings
        self.incarnation, self.interval_s = incarnation, interval_s
        within_s = min(max(interval_s, 0.0), FORGET_AFTER_S)
        self.stated_s = max(settings.interval_factor * within_s, settings.min_deadline_s)
        self.yellow_fraction = _YELLOW_FRACTION
        self.least_s = self.yellow_fraction * self.stated_s

    def end(self) -> None:
        """Nothing is known any more about the daemon that reports here."""
        self.incarnation, self.interval_s = "", 0.0
        self.stated_s = self._settings.expected_deadline_s
        self.yellow_fraction = _ELSEWHERE_YELLOW_FRACTION
        self.least_s = self.yellow_fraction * self.stated_s

    @property
    def deadline_s(self) -> float:
        """How long after its last report the host is overdue."""
        if self._adapted_s is None:
            gaps_s = self._gaps_s[: self._seen] if self._gaps_s is not None else ()
            adapted_s = gap_limit_s(gaps_s, _DEVIATION_FACTOR)
            self._adapted_s = min(adapted_s, self._settings.max_deadline_s)
        return max(self.stated_s, self._adapted_s)

    def is_yellow(self, now_s: float) -> bool:
        """Whether it is late enough to ask its neighbours."""
        late_s = now_s - self.last_seen_s
        return late_s > self.least_s and late_s > self.yellow_fraction * self.deadline_s

    def look_at_s(self, now_s: float) -> float:
        """The earliest moment at which it may be yellow."""
        at_s = self.last_seen_s + self.least_s
        return at_s if at_s > now_s else max(now_s, self.last_seen_s + self.yellow_fraction * self.deadline_s)
