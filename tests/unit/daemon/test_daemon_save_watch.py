"""What ranks train is saved, or the host says that nothing is: whatever keeps it, and without a failed save."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec
import pytest

from flyball.contracts.checkpoints import CheckpointSpec, ShardCopy, Tier
from flyball.contracts.cluster import JobSpec
from flyball.contracts.on_host.engine_wire import FailingSaves
from flyball.contracts.reports.signals import SavesFailing, SavesRecovered, SignalBody
from host_daemon.engine.save_watch import (
    NO_ENGINE,
    NO_SAVE,
    UNSAVED_AFTER_S,
    UNSAVED_INTERVALS,
    SaveWatch,
    TrainedRank,
    unsaved,
)

BEGAN = 1000.0
SPEC = JobSpec("job", ("train.py",), "/work")
RANKS = tuple(TrainedRank("job", 2, rank, BEGAN - 9.0, BEGAN, 400, 441) for rank in (0, 1))
DUE = BEGAN + UNSAVED_AFTER_S


def copy(rank: int, generation: int = 2, tier: Tier = Tier.MEMORY) -> ShardCopy:
    return ShardCopy("job", generation, 440, rank, tier, "host-a", 8, "")


BOTH = (copy(0), copy(1))


def missing(
    copies: Iterable[ShardCopy] = (),
    *,
    now: float = DUE,
    ranks: Iterable[TrainedRank] = RANKS,
    has_engine: bool = True,
    **checkpoint: object,
) -> tuple[int, ...] | None:
    """The ranks that are not protected; None if it is too early to say."""
    spec = msgspec.structs.replace(SPEC, checkpoint=CheckpointSpec(**checkpoint))  # type: ignore[arg-type]  # as given
    found = unsaved(spec, ranks, copies, has_engine=has_engine, now=now)
    return None if found is None else found.ranks


def test_a_rank_without_a_copy_is_not_protected() -> None:
    assert missing() == (0, 1)
    assert missing((copy(0),)) == (1,)
    assert missing(BOTH) == ()
    assert missing((copy(0, generation=1), copy(1, tier=Tier.PEER))) == (0,), "of the generation before; any tier"
    assert missing(now=DUE - 0.1) is None, "an engine may still be on its way"
    assert missing(ranks=()) is None, "a script that never attaches"
    older = msgspec.structs.replace(RANKS[0], generation=1)
    assert missing((copy(1),), ranks=(older, RANKS[1])) == (), "what is left of an earlier generation"


def test_it_waits_for_three_intervals_and_says_nothing_where_nothing_is_to_be_saved() -> None:
    assert missing(every_steps=0) is None
    steps = RANKS[0].steps // UNSAVED_INTERVALS
    assert missing(every_steps=steps) == (0, 1)
    assert missing(every_steps=steps + 1) is None
    assert missing(every_steps=0, every_s=100.0) is None
    assert missing(every_steps=0, every_s=100.0, now=BEGAN + 300.0) == (0, 1)
    assert missing(every_steps=0, disk_dir="/disk", disk_every_steps=steps) == (0, 1)


def test_it_says_why() -> None:
    for has_engine, why in ((False, NO_ENGINE), (True, NO_SAVE)):
        assert unsaved(SPEC, RANKS, (), has_engine=has_engine, now=DUE) == FailingSaves(
            "job", 2, (0, 1), BEGAN, 0, 441, why
        )


class Watched:
    def __init__(self, began_at: float = BEGAN - 60.0) -> None:
        self.said: list[SignalBody] = []

        async def signal(body: SignalBody) -> None:
            self.said.append(body)

        self.watch = SaveWatch(signal, began_at)

    def look(self, *copies: ShardCopy, now: float = DUE, generation: int = 2) -> list[SignalBody]:
        """What is said because of it."""
        ranks = [msgspec.structs.replace(rank, generation=generation) for rank in RANKS]
        self.said.clear()
        asyncio.run(self.watch.look(SPEC, ranks, copies, has_engine=True, now=now))
        return list(self.said)

    def note(self, failing: FailingSaves) -> list[SignalBody]:
        self.said.clear()
        asyncio.run(self.watch.note(failing))
        return list(self.said)


def test_it_is_said_once_until_something_is_saved() -> None:
    host = Watched()
    failing = SavesFailing("job", 2, (0, 1), BEGAN, 0, 441, NO_SAVE)
    assert host.look(now=DUE - 1.0) == []
    assert host.look() == [failing]
    assert host.look(now=DUE + 60.0) == []
    assert host.look(copy(0)) == [msgspec.structs.replace(failing, ranks=(1,))]
    assert host.look(*BOTH) == [SavesRecovered("job", 2)]
    assert host.look(*BOTH) == []
    assert host.look(generation=3) == [msgspec.structs.replace(failing, generation=3)]


def test_a_daemon_that_took_workers_over_ends_what_the_one_before_said() -> None:
    assert Watched(began_at=BEGAN + 1.0).look(*BOTH) == [SavesRecovered("job", 2)]
    assert Watched().look(*BOTH) == []


@pytest.mark.parametrize("ranks", [(), (1,)])
def test_what_the_engine_says_and_what_is_missing_are_one_matter(ranks: tuple[int, ...]) -> None:
    host = Watched()
    by_engine = FailingSaves("job", 2, ranks, BEGAN + 10.0 if ranks else 0.0, 7 if ranks else 0, 430, "no room")
    said = host.note(by_engine)
    assert [type(body) for body in said] == ([SavesFailing] if ranks else [])
    if not ranks:
        assert [type(body) for body in host.look()] == [SavesFailing], "the engine keeps nothing of it"
    assert [type(body) for body in host.look(*BOTH)] == ([] if ranks else [SavesRecovered])
