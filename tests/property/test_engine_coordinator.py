"""The coordinator under any order of reports: it never names a step that some rank lacks, and never gets stuck."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.coordinator import MAX_ABANDONED, Coordinator

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
    coordinator = Coordinator(generation=1, world_size=RANKS, world_step=-1)
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
    coordinator = Coordinator(generation=1, world_size=RANKS, world_step=-1)
    for rank, step, saved in history:
        coordinator.saved(rank, [step]) if saved else coordinator.failed([step])
    for rank in range(RANKS):
        coordinator.saved(rank, [100])
    assert coordinator.world_step == 100
    assert coordinator.abandoned == ()


@settings(max_examples=200, deadline=None)
@given(histories())
def test_repeated_reports_change_nothing(history: list[tuple[int, int, bool]]) -> None:
    once = Coordinator(generation=1, world_size=RANKS, world_step=-1)
    twice = Coordinator(generation=1, world_size=RANKS, world_step=-1)
    for rank, step, saved in history:
        for coordinator, times in ((once, 1), (twice, 2)):
            for _ in range(times):
                coordinator.saved(rank, [step]) if saved else coordinator.failed([step])
    assert (once.world_step, once.abandoned) == (twice.world_step, twice.abandoned)


def test_a_rank_that_went_past_a_step_dooms_it_for_all() -> None:
    coordinator = Coordinator(generation=1, world_size=2, world_step=0)
    coordinator.saved(0, [1])
    assert coordinator.abandoned == ()
    assert coordinator.saved(1, [2])
    assert coordinator.abandoned == (1,)
    coordinator.saved(1, [1])  # too late: others may have overwritten it
    assert coordinator.world_step == 0


def test_a_restarted_coordinator_goes_on_from_the_control_words() -> None:
    coordinator = Coordinator(generation=1, world_size=2, world_step=5, abandoned=[6])
    coordinator.saved(0, [5, 6])
    assert not coordinator.saved(1, [5, 6])
    assert coordinator.world_step == 5
    coordinator.saved(0, [7])
    assert coordinator.saved(1, [7])
    assert coordinator.world_step == 7
