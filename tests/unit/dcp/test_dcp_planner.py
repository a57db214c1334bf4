"""Plans of several ranks, made in this process: what is replicated is written once and in balance, and a token that
the coordinator does not know is refused."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from ckpt_engine.dcp import FlyballSavePlanner
from ckpt_engine.dcp.planner import stored_bytes
from ckpt_engine.rules.balance import spread
from flyball.contracts.errors import Conflict


def local_plan(state: dict[str, object]) -> SavePlan:
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=False)
    return planner.create_local_plan()


def planned(state: dict[str, object], ranks: int) -> list[SavePlan]:
    """The plans of ranks that all hold the same state."""
    planner = FlyballSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    plans, _ = planner.create_global_plan([copy.deepcopy(local_plan(state)) for _ in range(ranks)])
    return plans


def test_what_all_hold_is_written_once_and_in_balance() -> None:
    state: dict[str, object] = {f"w{n}": torch.empty(n % 7 * 100 + 10, 30, device="meta") for n in range(60)}
    state |= {f"v{n}": n for n in range(10)}
    plans = planned(state, 4)
    written = [item.index for plan in plans for item in plan.items]
    assert sorted(index.fqn for index in written) == sorted(state)
    assert spread([sum(stored_bytes(item) for item in plan.items) for plan in plans]) <= 1.05


def test_few_large_tensors_are_cut_so_that_many_ranks_have_as_much() -> None:
    large = torch.arange(3000 * 1000).view(3000, 1000).float()
    state: dict[str, object] = {"large": large, "other": torch.ones(40, 1000), "one": torch.ones(()), "n": 1}
    planner = FlyballSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    plans, metadata = planner.create_global_plan([copy.deepcopy(local_plan(state)) for _ in range(5)])
    assert spread([sum(stored_bytes(item) for item in plan.items) for plan in plans]) <= 1.3  # pieces of a MiB
    blocks = sorted(
        (item.tensor_data.chunk.offsets[0], planner.resolve_data(item))
        for plan in plans
        for item in plan.items
        if item.index.fqn == "large" and item.tensor_data is not None
    )
    assert len(blocks) > 1
    assert torch.equal(torch.cat([block for _, block in blocks]), large)  # type: ignore[misc]
    assert len(metadata.state_dict_metadata["large"].chunks) == len(blocks)  # type: ignore[union-attr]


def test_the_metadata_are_those_of_torchs_planner() -> None:
    state: dict[str, object] = {"a": {"w": torch.ones(3, 2), "n": 1}, "b": [torch.ones(2), "x"]}
    theirs, ours = DefaultSavePlanner(), FlyballSavePlanner()
    found = []
    for planner in (theirs, ours):
        planner.set_up_planner(state, is_coordinator=True)
        found.append(planner.create_global_plan([local_plan(state), local_plan(state)])[1])
    one, other = (dataclasses.asdict(metadata) for metadata in found)
    assert one == other


def test_bytes_count_as_those_of_the_chunk() -> None:
    (item,) = local_plan({"w": torch.empty(4, 6, dtype=torch.float64)}).items
    assert item.index == MetadataIndex("w", torch.Size((0, 0))) and stored_bytes(item) == 4 * 6 * 8


def test_a_token_of_another_coordinator_is_refused() -> None:
    planner = FlyballSavePlanner()
    planner.set_up_planner({"w": torch.ones(2)}, is_coordinator=True)
    full = planner.create_local_plan()
    with pytest.raises(Conflict, match="different groups"):
        planner.create_global_plan([full, SavePlan([], planner_data="0123", usable=False)])
