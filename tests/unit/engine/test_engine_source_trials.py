"""A store that is away for a while is tried again, and a step that is gone from it is not.."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_engine.counters import Counters
from ckpt_engine.peers.source_trials import SourceTrials
from flyball.contracts.checkpoints import RestorePlan, Tier
from flyball.contracts.errors import RestoreFailed
from flyball.contracts.recovery import Origin

STEP: Any = SimpleNamespace(source=SimpleNamespace(tier=Tier.PERSISTENT, host_id=""), origin=Origin.PERSISTENT)


class Store:
    """`reads`: whether it has the step, one after the other. `looks`: whether it looks empty, just after each."""

    def __init__(self, reads: list[bool], looks: list[bool]) -> None:
        self.reads, self.looks = iter(reads), iter(looks)
        self.tries = 0

    def is_empty(self) -> bool:
        return next(self.looks)

    def read(self, _step: object) -> str:
        self.tries += 1
        if not next(self.reads):
            raise FileNotFoundError("step-2")
        return "the shard"


def restored(store: Store) -> str:
    ended = SimpleNamespace(is_set=lambda: False, wait=lambda _timeout_s: False)  # nobody waits here
    generation: Any = SimpleNamespace(
        ended=ended, configure=SimpleNamespace(spec=SimpleNamespace(restore_timeout_s=60.0))
    )
    disks: Any = {Tier.PERSISTENT: store}
    trials = SourceTrials(generation, RestorePlan(2, {}), disks=disks, counters=Counters())
    return trials.first(0, lambda: [STEP], store.read, [])


def test_a_store_that_comes_back_just_after_a_read_is_read_once_more() -> None:
    store = Store(reads=[False, False, True], looks=[True, False])
    assert restored(store) == "the shard"
    assert store.tries == 3


def test_a_step_that_is_gone_from_a_store_that_came_back_is_given_up() -> None:
    store = Store(reads=[False, False, False], looks=[True, False, False])
    with pytest.raises(RestoreFailed):
        restored(store)
    assert store.tries == 3


def test_a_step_that_is_gone_from_a_store_that_was_always_there_is_tried_once() -> None:
    store = Store(reads=[False], looks=[False])
    with pytest.raises(RestoreFailed):
        restored(store)
    assert store.tries == 1
