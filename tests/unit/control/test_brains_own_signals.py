"""What a sensor raised itself is told until it is committed, in order, and in bounded memory."""

from __future__ import annotations

from itertools import pairwise

from flyball.contracts.reports.signals import HostReturned, HostSilent, PeerUnreachable
from services.sensor.rules.own_signals import MAX_SEND_AGAIN_S, OwnSignals

SILENT, RETURNED = HostSilent("a", 3.0, 2.0, ()), HostReturned("a", 9.0)


def test_a_signal_is_published_again_until_it_is_committed() -> None:
    own = OwnSignals(source="sensor.s", incarnation="i")
    first = own.raise_([SILENT, RETURNED], at=1000.0, now_s=10.0)
    assert [(s.source, s.incarnation, s.seq, s.at) for s in first] == [
        ("sensor.s", "i", 1, 1000.0),
        ("sensor.s", "i", 2, 1000.0),
    ]
    assert own.due(11.9) == ()
    assert own.due(12.0) == first, "both, so that the return still follows the silence"
    assert own.due(12.1) == () and own.due(15.9) == () and own.due(16.0) == first
    own.committed(1)
    assert own.due(1000.0) == first[1:]
    own.committed(2)
    assert len(own) == 0 and own.due(10_000.0) == ()


def test_the_pauses_grow_to_a_bound_and_start_again_with_the_next_trouble() -> None:
    own = OwnSignals(source="sensor.s", incarnation="i")
    own.raise_([SILENT], at=1000.0, now_s=0.0)
    told = [now for now in range(3000) if own.due(float(now))]
    assert told[:4] == [2, 6, 14, 30]
    assert all(later - earlier == MAX_SEND_AGAIN_S for earlier, later in pairwise(told[8:]))
    own.committed(own.newest_seq())
    own.raise_([SILENT], at=1000.0, now_s=5000.0)
    assert own.due(5002.0)


def test_when_there_are_too_many_only_what_still_holds_goes_on_under_new_seqs() -> None:
    own = OwnSignals(source="sensor.s", incarnation="i", max_kept=8)
    own.raise_([SILENT, RETURNED, HostSilent("b", 3.0, 2.0, ())], at=1.0, now_s=0.0)
    own.raise_([SILENT, PeerUnreachable("c", "lost"), RETURNED], at=2.0, now_s=0.0)
    handed_on = own.raise_([HostReturned("b", 1.0), HostSilent("b", 3.0, 2.0, ()), SILENT], at=3.0, now_s=0.0)
    assert [(s.incarnation, s.seq, s.body) for s in handed_on] == [
        ("i-1", 1, PeerUnreachable("c", "lost")),
        ("i-1", 2, HostSilent("b", 3.0, 2.0, ())),
        ("i-1", 3, SILENT),
    ]
    (after,) = own.raise_([RETURNED], at=4.0, now_s=0.0)
    assert (after.incarnation, after.seq) == ("i-1", 4)
    own.committed(4)
    assert len(own) == 0


def test_memory_is_bounded_whatever_comes() -> None:
    own = OwnSignals(source="sensor.s", incarnation="i", max_kept=10)
    for number in range(1000):
        own.raise_([HostSilent(f"h{number}", 3.0, 2.0, ())], at=1.0, now_s=0.0)
        assert len(own) <= 10
