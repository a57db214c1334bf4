"""Derives what the ranks of a job do together while no step completes, from the activity of each process. Pure.

Beacons cannot distinguish a rank that hangs in a step from ranks that evaluate after it: all show the same step. What
their processes do shows the difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from enum import StrEnum

from flyball.contracts.cluster import DUE_SLEEP, Activity
from flyball.contracts.reports.rank_stands import RankStand, Stand

# What a rank waits for outside of its job. Whether it comes is not known here: an ordinary pause waits so, too.
_WORLD = frozenset({Stand.NETWORK, Stand.PROCESS, Stand.SLEEP, Stand.FILE, Stand.DATA_LOADER, Stand.CHECKPOINT})
_EXPLAINED = frozenset({Stand.COLLECTIVE, Stand.LOCK})  # of ranks that do nothing
_WORLD_CALLS = frozenset({"read", "pread64", "recvfrom", "recvmsg", "poll", "ppoll", "select", "pselect6"}) | frozenset(
    {"epoll_wait", "epoll_pwait", "connect", "accept", "accept4", "wait4", "waitid", "nanosleep", "clock_nanosleep"}
)

# System calls in which a rank waits for others: locks and condition variables (gloo, NCCL's host side), sockets.
_WAITS = frozenset({"futex", "poll", "ppoll", "epoll_wait", "epoll_pwait", "select", "pselect6", "recvfrom", "recvmsg"})

NOWHERE: Mapping[int, RankStand] = {}


class Stance(StrEnum):
    """What a job's ranks do together. The first ones are the surest faults, with the shortest deadlines."""

    FROZEN = "frozen"  # some processes are stopped by a signal, and others are not
    DEAD = "dead"  # nothing can end the wait of some
    STANDS = "stands"  # some are idle, and the others wait for them
    STUCK = "stuck"  # all are idle, and none waits for anything outside of the job
    TOGETHER = "together"  # all are idle
    WORLD = "world"  # all are idle, and some wait for something outside of the job: a host, a file, a child, a timer
    BLOCKED = "blocked"  # none works, and some wait for a disk or a driver
    WORKING = "working"  # some work, or cannot be seen
    SUSPENDED = "suspended"  # all are stopped by a signal
    ATTENDED = "attended"  # in a debugger, or at a prompt


def stance_of(
    ranks: Set[int],
    doing: Mapping[Activity, Set[int]],
    places: Mapping[str, Set[int]],
    stands: Mapping[int, RankStand] = NOWHERE,
    *,
    sees_all: bool = True,
) -> tuple[Stance, Set[int]]:
    """The stance of these ranks, and those among them that can be overdue. `doing`: the ranks by activity, without the
    unknown ones; `places`: the idle ranks by system call; `stands`: where those stand of which it is known.
    `sees_all`: false if other ranks of the job may work."""
    if doing.get(Activity.TRACED) or doing.get(Activity.READS_INPUT):
        return Stance.ATTENDED, ranks
    if stopped := doing.get(Activity.STOPPED):
        return (Stance.FROZEN, stopped) if len(stopped) < len(ranks) else (Stance.SUSPENDED, ranks)
    if proved := {rank for rank in ranks if rank in stands and stands[rank].proof}:
        return Stance.DEAD, proved
    stance, standing = _by_activity(ranks, doing, places, sees_all=sees_all)
    return (
        _by_stands(stance, standing, places, stands)
        if stance in (Stance.STANDS, Stance.TOGETHER)
        else (stance, standing)
    )


def _by_stands(
    stance: Stance, standing: Set[int], places: Mapping[str, Set[int]], stands: Mapping[int, RankStand]
) -> tuple[Stance, Set[int]]:
    """The stance of idle ranks, once it is known where they stand."""
    is_sure = stance is Stance.STANDS  # then the call alone shows it; of ranks that may wait for each other it does not
    if waits := {
        rank
        for place, idle in places.items()
        for rank in idle & standing
        if (is_sure or rank in stands) and _waits_for_world(stands.get(rank), place)
    }:
        return Stance.WORLD, waits
    explained = {rank for rank in standing if rank in stands and stands[rank].kind in _EXPLAINED}
    is_explained = stance is Stance.TOGETHER and standing <= explained and DUE_SLEEP not in places
    return (Stance.STUCK if is_explained else stance), standing


def _waits_for_world(stand: RankStand | None, place: str) -> bool:
    """A stack is of the moment in which it was read; the call is of now."""
    if stand is None or stand.kind not in (Stand.COLLECTIVE, Stand.LOCK):
        return place in _WORLD_CALLS or (stand is not None and stand.kind in _WORLD)
    return stand.kind == Stand.LOCK and (bool(stand.awaits) or place in _WORLD_CALLS)


def _by_activity(
    ranks: Set[int], doing: Mapping[Activity, Set[int]], places: Mapping[str, Set[int]], *, sees_all: bool
) -> tuple[Stance, Set[int]]:
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
    Stance.STUCK: "all ranks are idle, and none waits for anything outside of the job",
    Stance.TOGETHER: "all ranks are idle: none uses a processor, a GPU or a disk",
    Stance.BLOCKED: "no rank works, and some wait in the kernel for a disk, a network file system or a driver",
    Stance.WORKING: "some ranks work, or cannot be seen, and no step completes",
    Stance.SUSPENDED: "the processes of all ranks are stopped by a signal",
}


def seen_in(stance: Stance, place: str, places: Mapping[str, Set[int]], stand: RankStand | None = None) -> str:
    """Describe in words what the processes do; `place` and `stand`: the system call of a rank to blame, and where it
    stands."""
    if stance is Stance.DEAD and stand is not None:
        return f"nothing can end its wait: {stand.proof}"
    if stance is Stance.WORLD:
        return f"all ranks are idle, and some wait for something outside of the job, in {place or 'an unknown call'}"
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
