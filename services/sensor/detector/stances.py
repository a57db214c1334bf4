"""Derives what the ranks of a job do together while no step completes, from the activity of each process. Pure.

Beacons cannot distinguish a rank that hangs in a step from ranks that evaluate after it: all show the same step. What
their processes do shows the difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from enum import StrEnum

from flyball.contracts.cluster import DUE_SLEEP, Activity

# System calls in which a rank waits for others: locks and condition variables (gloo, NCCL's host side), sockets.
_WAITS = frozenset({"futex", "poll", "ppoll", "epoll_wait", "epoll_pwait", "select", "pselect6", "recvfrom", "recvmsg"})


class Stance(StrEnum):
    """What a job's ranks do together. The first ones are the surest faults, with the shortest deadlines."""

    FROZEN = "frozen"  # some processes are stopped by a signal, and others are not
    STANDS = "stands"  # some are idle, and the others wait for them
    TOGETHER = "together"  # all are idle
    BLOCKED = "blocked"  # none works, and some wait for a disk or a driver
    WORKING = "working"  # some work, or cannot be seen
    SUSPENDED = "suspended"  # all are stopped by a signal
    ATTENDED = "attended"  # in a debugger, or at a prompt


def stance_of(
    ranks: Set[int], doing: Mapping[Activity, Set[int]], places: Mapping[str, Set[int]], *, sees_all: bool = True
) -> tuple[Stance, Set[int]]:
    """The stance of these ranks, and those among them that can be overdue. `doing`: the ranks by activity, without the
    unknown ones; `places`: the idle ranks by system call. `sees_all`: false if other ranks of the job may work."""
    if doing.get(Activity.TRACED) or doing.get(Activity.READS_INPUT):
        return Stance.ATTENDED, ranks
    if stopped := doing.get(Activity.STOPPED):
        return (Stance.FROZEN, stopped) if len(stopped) < len(ranks) else (Stance.SUSPENDED, ranks)
    idle, blocked = len(doing.get(Activity.IDLE, ())), len(doing.get(Activity.BLOCKED, ()))
    if idle + blocked < len(ranks):
        return Stance.WORKING, ranks
    if not blocked and (awaited := _awaited(len(ranks), places, sees_all=sees_all)):
        return Stance.STANDS, awaited
    if not sees_all:  # these may all wait for one of the others, which works
        return Stance.WORKING, ranks
    return (Stance.BLOCKED if blocked else Stance.TOGETHER), ranks


_SEEN = {
    Stance.FROZEN: "stopped by a signal, while the processes of other ranks are not",
    Stance.TOGETHER: "all ranks are idle: none uses a processor, a GPU or a disk",
    Stance.BLOCKED: "no rank works, and some wait in the kernel for a disk, a network file system or a driver",
    Stance.WORKING: "some ranks work, or cannot be seen, and no step completes",
    Stance.SUSPENDED: "the processes of all ranks are stopped by a signal",
}


def seen_in(stance: Stance, place: str, places: Mapping[str, Set[int]]) -> str:
    """Describe in words what the processes do; `place`: the system call of a rank to blame."""
    if stance is not Stance.STANDS:
        return _SEEN.get(stance, stance.value)
    common = max(places, key=lambda other: len(places[other]) if other != place else -1)
    return f"idle in {place}, while the others wait in {common}"


def _awaited(count: int, places: Mapping[str, Set[int]], *, sees_all: bool) -> Set[int]:
    """The idle ranks that the others, at least as many, wait for in one system call; none if that is unclear. Of two
    halves that both wait, either may be the cause. Ranks that wait may wait for one that is not seen. A sleep
    that ends soon is not the cause."""
    if "" in places or DUE_SLEEP in places or len(places) < 2:
        return frozenset()
    common = max(places, key=lambda place: (len(places[place]), place in _WAITS))
    others = [place for place in places if place != common]
    is_half = 2 * len(places[common]) == count
    if (
        common not in _WAITS
        or 2 * len(places[common]) < count
        or ((is_half or not sees_all) and not _WAITS.isdisjoint(others))
    ):
        return frozenset()
    return frozenset().union(*(places[place] for place in others))
