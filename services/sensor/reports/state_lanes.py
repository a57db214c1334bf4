"""The state of hosts that waits to be stored: of each host the newest report, and older ones with contents that are
reported once. Not thread-safe; the queue's lock guards it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import islice
from math import inf

import msgspec

from flyball.contracts.reports.signals import Report, Signal
from services.sensor.rules.slots import slot_of

MAX_STORED = 100_000  # hosts that are remembered


class Received(msgspec.Struct, frozen=True, gc=False):
    """A report that waits to be stored, or (report None) signals that the sensor raised itself."""

    report: Report | None
    signals: tuple[Signal, ...]
    size_bytes: int
    at: float  # wall clock
    at_monotonic_s: float
    waits_since_s: float = 0.0  # monotonic: since when some state of its host has waited


class Lane(IntEnum):
    """Who goes first. Somebody waits for the next move of the first three; see `StateLanes.take_pressed`."""

    URGENT = 0  # hosts that report more than their state: signals, marks, restores
    TROUBLED = 1  # hosts of open incidents and of jobs that wait to start
    NEW = 2  # hosts that this sensor has not stored yet
    STEADY = 3  # all others; hosts of one slot are stored together


class Oldest(msgspec.Struct, frozen=True):
    """Since when the host that waits longest has waited (monotonic); inf: none waits."""

    pressed_s: float
    steady_s: float


class StateLanes:
    """Within a lane, who has waited longest goes first."""

    def __init__(self) -> None:
        self._pressed: tuple[dict[str, Received], ...] = ({}, {}, {})
        self._steady: dict[int, dict[str, Received]] = {}  # by slot
        self._lanes: dict[str, Lane] = {}  # of every host that waits
        self._older: dict[str, list[Received]] = {}
        self._stored: set[str] = set()
        self._troubled: frozenset[str] = frozenset()
        self.kept = 0  # older reports

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def has_pressed(self) -> bool:
        return any(self._pressed)

    @property
    def has_steady(self) -> bool:
        return bool(self._steady)

    def newest(self, host_id: str) -> Received | None:
        """The report of a host that waits."""
        lane = self._lanes.get(host_id)
        return None if lane is None else self._in(lane, host_id)[host_id]

    def older(self, host_id: str) -> Sequence[Received]:
        return self._older.get(host_id, ())

    def put(self, host_id: str, item: Received, *, is_urgent: bool, keeps_before: bool) -> Lane:
        """Let a host's newest report wait in place of the one before, which is kept beside it if `keeps_before`.
        Returns the host's lane."""
        lane = Lane.URGENT if is_urgent else self._lane_of(host_id)
        present = self._lanes.get(host_id)
        if present is not None:
            before = self._in(present, host_id)[host_id]
            if keeps_before:
                self._older.setdefault(host_id, []).append(before)
                self.kept += 1
            item = msgspec.structs.replace(item, waits_since_s=before.waits_since_s)
            if lane < present:
                self._remove(present, host_id)
            else:
                lane = present
        self._lanes[host_id] = lane
        self._in(lane, host_id)[host_id] = item
        return lane

    def take_pressed(self, max_hosts: int) -> list[Received]:
        """Take out the reports of hosts that are not steady. Each lane leaves half of the places to those behind it:
        nobody waits forever."""
        names: list[str] = []
        for lane in self._pressed:
            names += islice(lane, (max_hosts - len(names) + 1) // 2)
        taken = set(names)
        rest = (name for lane in self._pressed for name in lane if name not in taken)
        names += list(islice(rest, max_hosts - len(names)))
        return [item for name in names for item in self._take(name)]

    def take_steady(self, max_hosts: int) -> list[Received]:
        """Take out the reports of the steady hosts of whole slots: of the first, and of more up to `max_hosts`."""
        taken: list[Received] = []
        while self._steady:
            slot = next(iter(self._steady.values()))
            if taken and len(taken) + len(slot) > max_hosts:
                break
            taken += [item for name in list(slot) for item in self._take(name)]
        return taken

    def oldest(self) -> Oldest:
        pressed = (next(iter(lane.values())).waits_since_s for lane in self._pressed if lane)
        steady = (next(iter(slot.values())).waits_since_s for slot in islice(self._steady.values(), 1))
        return Oldest(min(pressed, default=inf), min(steady, default=inf))

    def note_stored(self, host_ids: Iterable[str]) -> None:
        """These hosts are new no more."""
        if len(self._stored) > MAX_STORED:
            self._stored.clear()
        self._stored.update(host_ids)

    def trouble(self, host_ids: Collection[str]) -> None:
        """From now on these hosts, and no others, are troubled."""
        fresh = frozenset(host_ids)
        for host_id in fresh - self._troubled:
            if (present := self._lanes.get(host_id)) is not None and present > Lane.TROUBLED:
                item = self._in(present, host_id)[host_id]
                self._remove(present, host_id)
                self._lanes[host_id] = Lane.TROUBLED
                self._pressed[Lane.TROUBLED][host_id] = item
        self._troubled = fresh

    def _lane_of(self, host_id: str) -> Lane:
        if host_id in self._troubled:
            return Lane.TROUBLED
        return Lane.STEADY if host_id in self._stored else Lane.NEW

    def _in(self, lane: Lane, host_id: str) -> dict[str, Received]:
        return self._steady.setdefault(slot_of(host_id), {}) if lane is Lane.STEADY else self._pressed[lane]

    def _remove(self, lane: Lane, host_id: str) -> None:
        of_lane = self._in(lane, host_id)
        del of_lane[host_id]
        if lane is Lane.STEADY and not of_lane:
            del self._steady[slot_of(host_id)]

    def _take(self, host_id: str) -> Iterator[Received]:
        lane = self._lanes.pop(host_id)
        item = self._in(lane, host_id)[host_id]
        self._remove(lane, host_id)
        older = self._older.pop(host_id, ())
        self.kept -= len(older)
        yield from older
        yield item
