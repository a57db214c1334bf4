"""Who writes what several ranks hold: every entry once, and about as many bytes for each rank."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.rules.balance import BALANCED, assign, cuts, spread


@st.composite
def replicated(draw: st.DrawFn) -> tuple[list[int], list[list[int]], int]:
    ranks = draw(st.integers(1, 8))
    sizes = draw(st.lists(st.integers(0, 1000), max_size=40))
    holders = st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks, unique=True)
    return sizes, draw(st.lists(holders, min_size=len(sizes), max_size=len(sizes))), ranks


def loads_of(sizes: Sequence[int], writers: Sequence[int], ranks: int) -> list[int]:
    return [sum(s for s, writer in zip(sizes, writers, strict=True) if writer == rank) for rank in range(ranks)]


@given(replicated())
def test_every_entry_is_written_by_one_of_its_holders(case: tuple[list[int], list[list[int]], int]) -> None:
    sizes, holders, ranks = case
    writers = assign(sizes, holders, ranks)
    assert len(writers) == len(sizes)
    assert all(writer in held for writer, held in zip(writers, holders, strict=True))
    assert writers == assign(sizes, holders, ranks)


@given(st.integers(1, 8), st.lists(st.integers(0, 1000), max_size=40))
def test_what_all_hold_is_spread_as_well_as_the_largest_entry_allows(ranks: int, sizes: list[int]) -> None:
    loads = loads_of(sizes, assign(sizes, [range(ranks)] * len(sizes), ranks), ranks)
    lower_bound = max(max(sizes, default=0), sum(sizes) / ranks)  # of any assignment
    assert max(loads) <= (4 / 3) * lower_bound + max(sizes, default=0) / 3  # Graham's bound for this order, and slack
    assert max(loads) - min(loads) <= max(sizes, default=0)


@given(replicated())
def test_nobody_with_more_work_takes_what_another_holder_with_less_could(
    case: tuple[list[int], list[list[int]], int],
) -> None:
    """No single entry can be moved to another of its holders such that the larger of the two loads shrinks by more than
    the entry that was placed last allows: the last entry of a rank never sits on the busier one."""
    sizes, holders, ranks = case
    writers = assign(sizes, holders, ranks)
    loads = loads_of(sizes, writers, ranks)
    shared = [entry for entry in range(len(sizes)) if len(holders[entry]) > 1]
    if not shared:
        return
    last = min(shared, key=lambda entry: (sizes[entry], -entry))  # the entry that was placed last
    without = loads[writers[last]] - sizes[last]
    assert all(without <= loads[other] for other in holders[last])


def llama_7b() -> list[int]:
    """Elements of the tensors of Llama 7B."""
    layer = [4096 * 4096] * 4 + [4096 * 11008] * 3 + [4096] * 2
    return [32000 * 4096, *(layer * 32), 4096, 32000 * 4096]


def with_adam(sizes: Sequence[int]) -> list[int]:
    """Bytes: parameters in bfloat16, both moments in float32."""
    return [size * itemsize for size in sizes for itemsize in (2, 4, 4)]


@pytest.mark.parametrize("ranks", [8, 16])
def test_llama_over_data_parallel_ranks_is_balanced(ranks: int) -> None:
    sizes = with_adam(llama_7b())
    assert spread(loads_of(sizes, assign(sizes, [range(ranks)] * len(sizes), ranks), ranks)) <= 1.05


def test_llama_over_replicated_shards_is_balanced() -> None:
    """FSDP over 8 ranks, replicated twice: rank r and rank r + 8 hold the same blocks."""
    sizes, holders = [], []
    for size in with_adam(llama_7b()):
        for shard in range(8):
            sizes.append(size // 8)
            holders.append([shard, shard + 8])
    assert spread(loads_of(sizes, assign(sizes, holders, 16), 16)) <= 1.05


def test_what_only_one_rank_holds_counts_before_the_rest_is_spread() -> None:
    assert assign([100, 60, 40], [[0], [0, 1], [0, 1]], 2) == [0, 1, 1]


@given(replicated())
def test_only_what_several_hold_is_cut_and_only_if_it_helps(case: tuple[list[int], list[list[int]], int]) -> None:
    units, holders, ranks = case
    sizes = [unit << 14 for unit in units]
    pieces = cuts(sizes, holders, ranks)
    assert all(number == 1 for number, held in zip(pieces, holders, strict=True) if len(held) == 1)
    if max(pieces, default=1) > 1:
        assert spread(loads_of(sizes, assign(sizes, holders, ranks), ranks)) > BALANCED
        largest = max(sum(sizes) // ranks // 16, 1 << 20)
        shared = [(s, number) for s, number, held in zip(sizes, pieces, holders, strict=True) if len(held) > 1]
        assert all(-(-size // number) <= largest for size, number in shared if size)


@pytest.mark.parametrize("ranks", [64, 512])
def test_llama_is_balanced_on_more_ranks_once_its_large_tensors_are_cut(ranks: int) -> None:
    sizes = [2 * size for size in llama_7b()]
    everyone = [range(ranks)] * len(sizes)
    assert spread(loads_of(sizes, assign(sizes, everyone, ranks), ranks)) > 1.2
    pieces = [-(-size // n) for size, n in zip(sizes, cuts(sizes, everyone, ranks), strict=True) for _ in range(n)]
    assert spread(loads_of(pieces, assign(pieces, [range(ranks)] * len(pieces), ranks), ranks)) <= BALANCED
