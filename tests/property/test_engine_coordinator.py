"""The coordinator under any order of reports: it never names a step that some rank lacks, and never gets stuck."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.contracts.peer_wire import TierNaming, TierReport, WorldStep
from ckpt_engine.rules.coordinator import MAX_ABANDONED, Coordinator
from ckpt_engine.rules.save_pace import SavePace
from ckpt_engine.rules.save_schedule import SaveSchedule
from ckpt_engine.rules.tier_schedule import TierSchedule
from flyball.contracts.checkpoints import Tier, TierPolicy

RANKS = 3


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, int, bool]]:
    """(rank, step, saved): a rank settles its steps in order, the ranks interleave at will, some reports are lost."""
    todo = {rank: [(rank, step, draw(st.integers(0, 4)) > 0) for step in range(8)] for rank in range(RANKS)}
    history: list[tuple[int, int, bool]] = []
    while any(todo.values()):
        rank = draw(st.sampled_from([rank for rank, steps in todo.items() if steps]))
        event = todo[rank].pop(0)
        if draw(st.integers(0, 9)) > 0:
            history.append(event)
    return history


@settings(max_examples=300, deadline=None)
@given(histories())
def test_a_world_step_is_had_by_all_and_an_abandoned_step_never_becomes_one(
    history: list[tuple[int, int, bool]],
) -> None:
    coordinator = Coordinator(WorldStep("job", 1, -1), world_size=RANKS)
    reported: dict[int, set[int]] = {rank: set() for rank in range(RANKS)}
    ever_abandoned: set[int] = set()
    world_step = -1
    for rank, step, saved in history:
        if saved:
            reported[rank].add(step)
            changed = coordinator.saved(rank, [step])
        else:
            changed = coordinator.failed([step])
        moved = coordinator.world_step != world_step
        assert coordinator.world_step >= world_step
        assert changed or not moved
        world_step = coordinator.world_step
        ever_abandoned.update(coordinator.abandoned)
        assert world_step == -1 or all(world_step in steps for steps in reported.values())
        assert world_step not in ever_abandoned
        assert all(step > world_step for step in coordinator.abandoned)
        assert len(coordinator.abandoned) <= MAX_ABANDONED


@settings(max_examples=200, deadline=None)
@given(histories())
def test_a_step_that_all_ranks_have_in_the_end_becomes_the_world_step(history: list[tuple[int, int, bool]]) -> None:
    coordinator = Coordinator(WorldStep("job", 1, -1), world_size=RANKS)
    for rank, step, saved in history:
        coordinator.saved(rank, [step]) if saved else coordinator.failed([step])
    for rank in range(RANKS):
        coordinator.saved(rank, [100])
    assert coordinator.world_step == 100
    assert coordinator.abandoned == ()


@settings(max_examples=200, deadline=None)
@given(histories())
def test_repeated_reports_change_nothing(history: list[tuple[int, int, bool]]) -> None:
    once = Coordinator(WorldStep("job", 1, -1), world_size=RANKS)
    twice = Coordinator(WorldStep("job", 1, -1), world_size=RANKS)
    for rank, step, saved in history:
        for coordinator, times in ((once, 1), (twice, 2)):
            for _ in range(times):
                coordinator.saved(rank, [step]) if saved else coordinator.failed([step])
    assert (once.world_step, once.abandoned) == (twice.world_step, twice.abandoned)


def test_a_rank_that_went_past_a_step_dooms_it_for_all() -> None:
    coordinator = Coordinator(WorldStep("job", 1, 0), world_size=2)
    coordinator.saved(0, [1])
    assert coordinator.abandoned == ()
    assert coordinator.saved(1, [2])
    assert coordinator.abandoned == (1,)
    coordinator.saved(1, [1])  # too late: ranks may have overwritten it
    assert coordinator.world_step == 0


def test_a_restarted_coordinator_goes_on_from_the_control_words() -> None:
    coordinator = Coordinator(WorldStep("job", 1, 5, (6,)), world_size=2)
    coordinator.saved(0, [5, 6])
    assert not coordinator.saved(1, [5, 6])
    assert coordinator.world_step == 5
    coordinator.saved(0, [7])
    assert coordinator.saved(1, [7])
    assert coordinator.world_step == 7


def test_skipped_steps_do_not_give_up_an_older_one_that_is_on_its_way() -> None:
    """With `when_full=skip` a slow peer makes many newer steps fail before the older one arrives."""
    coordinator = Coordinator(WorldStep("job", 1, -1), world_size=2)
    for step in range(2, 50):
        coordinator.failed([step])
    coordinator.saved(0, [1])
    assert coordinator.saved(1, [1])
    assert coordinator.world_step == 1
    coordinator.saved(0, [50])
    coordinator.saved(1, [50])
    assert (coordinator.world_step, coordinator.abandoned) == (50, ())


def test_all_given_up_steps_are_announced_even_without_room_for_their_names() -> None:
    """One rank has a step for whose name there is no room: it is abandoned by number once older ones are settled."""
    coordinator = Coordinator(WorldStep("job", 1, 0), world_size=2)
    for step in range(2, 50):
        coordinator.failed([step])
    coordinator.saved(0, [1, 40])
    assert coordinator.abandoned_upto < 1  # rank 1 may yet have it
    coordinator.saved(1, [2, 60])  # passed 1 and 40
    assert coordinator.world_step == 0
    assert coordinator.abandoned_upto >= 40
    coordinator.saved(0, [60])
    assert coordinator.world_step == 60


def test_what_a_rank_went_past_it_cannot_say_it_has_later() -> None:
    """There is no room for its name, and yet a delayed report must not revive it."""
    coordinator = Coordinator(WorldStep("job", 1, 0), world_size=3)
    coordinator.failed(range(10, 30))
    coordinator.saved(0, [1, 45, 60])
    coordinator.saved(1, [1, 60])
    assert 45 not in coordinator.abandoned and coordinator.abandoned_upto < 1  # rank 2 may yet have 1
    coordinator.saved(1, [45])
    coordinator.saved(2, [45])
    coordinator.saved(0, [45])
    assert coordinator.world_step == 0
    coordinator.saved(2, [60])
    assert coordinator.world_step == 60


def test_a_step_that_all_had_and_one_lost_counts_no_more() -> None:
    coordinator = Coordinator(WorldStep("job", 1, 0), world_size=2)
    coordinator.failed(range(10, 30))
    coordinator.saved(0, [1, 2])
    coordinator.saved(0, [40])
    coordinator.failed([40])  # its slot is bad
    coordinator.saved(0, [40])  # from before
    coordinator.saved(1, [40])
    assert coordinator.world_step == 0


def test_every_step_that_the_world_skips_is_reported_once() -> None:
    coordinator = Coordinator(WorldStep("job", 1, 0), world_size=2)
    skipped = []
    for step in range(1, 100, 2):
        coordinator.saved(0, [step])
        coordinator.failed([step, step + 1])
        coordinator.failed([step])
        skipped += coordinator.take_skipped()
    assert skipped == list(range(1, 101))


def test_another_step_is_named_for_one_that_was_given_up_but_not_announced_yet() -> None:
    saves = SaveSchedule(1.0, named=0, world_step=0, now_s=0.0)
    coordinator = Coordinator(WorldStep("job", 1, 0), world_size=2, saves=saves)
    coordinator.failed(range(100, 120))
    coordinator.now_s = 5.0
    coordinator.tick(1)
    first = coordinator.next_save
    coordinator.failed([first])
    assert first not in coordinator.abandoned
    coordinator.now_s = 10.0
    coordinator.tick(first + 1)
    assert coordinator.next_save > first


def test_the_disk_tiers_are_named_steps_once_all_ranks_have_reported_and_sealed_ones_once_all_have_written() -> None:
    policy = TierPolicy(every_steps=2, keep_latest=1)
    disk = TierSchedule(Tier.DISK, policy=policy, world_size=2, restore_step=-1)
    store = TierSchedule(Tier.PERSISTENT, policy=policy, world_size=2, restore_step=-1, sealed=True)
    coordinator = Coordinator(WorldStep("job", 1, -1), world_size=2, schedules=[disk, store])
    nothing = TierReport(Tier.DISK, -1, -1)
    assert coordinator.namings == ()
    assert not coordinator.tiers_reported(0, [nothing])
    assert coordinator.tiers_reported(1, [nothing]), "from now on it is known what must stay"
    assert not coordinator.tiers_reported(1, [nothing])
    assert coordinator.namings == (TierNaming(Tier.DISK, -1),)
    assert not coordinator.saved(0, [2])
    assert coordinator.saved(1, [2])
    assert coordinator.world.tiers == coordinator.namings == (TierNaming(Tier.DISK, 2),)

    for rank in (0, 1):
        assert not coordinator.tiers_reported(rank, [TierReport(Tier.PERSISTENT, -1, -1)])
    assert coordinator.seals_reported(TierReport(Tier.PERSISTENT, -1, -1))
    assert coordinator.namings == (TierNaming(Tier.DISK, 2), TierNaming(Tier.PERSISTENT, 2))
    assert coordinator.to_seal == {}
    written = TierReport(Tier.PERSISTENT, 2, 2, (2,))
    coordinator.tiers_reported(0, [written])
    assert coordinator.to_seal == {}
    coordinator.tiers_reported(1, [written, TierReport(Tier.DISK, 2, 2, (2,))])
    assert coordinator.to_seal == {Tier.PERSISTENT: 2}
    assert coordinator.seals_reported(written)
    assert coordinator.to_seal == {}
    assert not coordinator.seals_reported(written)
    assert coordinator.namings == (TierNaming(Tier.DISK, 2), TierNaming(Tier.PERSISTENT, 2, (2,)))
    assert coordinator.tiers_reported(0, [TierReport(Tier.DISK, 2, 2, (2,))])
    assert coordinator.namings[0] == TierNaming(Tier.DISK, 2, (2,))


def test_a_demanded_step_is_named_out_of_schedule() -> None:
    disk = TierSchedule(Tier.DISK, policy=TierPolicy(every_steps=100), world_size=1, restore_step=0)
    coordinator = Coordinator(WorldStep("job", 1, 0), world_size=1, schedules=[disk])
    coordinator.tiers_reported(0, [TierReport(Tier.DISK, -1, -1)])
    coordinator.saved(0, [7])
    assert coordinator.namings[0].step == -1
    assert coordinator.flush_wanted(7)
    assert coordinator.namings[0].step == 7
    assert not coordinator.flush_wanted(7)
    assert coordinator.tick(7) is False


def test_the_world_names_the_pace_and_the_next_save() -> None:
    saves = SaveSchedule(10.0, named=-1, world_step=-1, now_s=0.0)
    coordinator = Coordinator(
        WorldStep("job", 3, -1, (4,), abandoned_upto=2), world_size=1, saves=saves, pace=SavePace(2, 65)
    )
    assert (coordinator.world.job, coordinator.world.generation, coordinator.world.pace) == ("job", 3, 65)
    assert (coordinator.abandoned, coordinator.world.abandoned_upto, coordinator.next_save) == ((4,), 2, -1)
    coordinator.now_s = 11.0
    assert coordinator.tick(5)
    assert coordinator.next_save == coordinator.world.next_save > 5
    assert not coordinator.tick(5)
    assert Coordinator(WorldStep("job", 1, -1), world_size=1).world.pace == 0


def test_only_what_was_not_known_is_news() -> None:
    coordinator = Coordinator(WorldStep("job", 1, -1), world_size=2)
    assert coordinator.failed([3])
    assert not coordinator.failed([3])
    assert not coordinator.saving(0, 0)
    assert coordinator.take_skipped() == [3] and coordinator.take_skipped() == []
