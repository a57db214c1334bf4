"""What a rank does when it finds an order to commit a fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flyball.contracts.on_host.injected import ORDER_SUFFIX, TAKEN_SUFFIX, FaultOrder, ScriptFault, injected_base
from flyball.sdk.injected_faults import LOOK_INTERVAL_S, InjectedFaultError, InjectedFaults, flip_bit


class Rank:
    """One rank's hook, and the files through which it gets orders."""

    def __init__(self, folder: Path) -> None:
        self.base = injected_base(str(folder), "gpt", 3)
        self.slept: list[float] = []
        self.on_sleep: Callable[[], object] = lambda: None
        self.hook = InjectedFaults(self.base, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.on_sleep()

    def order(self, fault: ScriptFault, **settings: float) -> None:
        order = FaultOrder("one", fault, **settings)  # type: ignore[arg-type]
        Path(self.base + ORDER_SUFFIX).write_bytes(msgspec.json.encode(order))

    @property
    def taken(self) -> Path:
        return Path(self.base + TAKEN_SUFFIX)


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path)


def test_an_order_is_carried_out_once_and_after_its_step(rank: Rank) -> None:
    rank.order(ScriptFault.EXCEPTION, step=7)
    rank.hook.after_step(6)
    assert not rank.taken.exists()
    with pytest.raises(InjectedFaultError, match="after step 7"):
        rank.hook.after_step(7)
    assert rank.taken.exists() and not Path(rank.base + ORDER_SUFFIX).exists()
    InjectedFaults(rank.base).after_step(8)  # of the process that is started next


def test_an_order_that_is_not_valid_is_dropped_and_named(rank: Rank, capsys: pytest.CaptureFixture[str]) -> None:
    Path(rank.base + ORDER_SUFFIX).write_text('{"fault": "melt"}')
    rank.hook.after_step(1)
    assert not Path(rank.base + ORDER_SUFFIX).exists() and not rank.taken.exists()
    assert rank.base in capsys.readouterr().err


def test_waiting_for_data_ends_when_the_fault_is_undone(rank: Rank) -> None:
    rank.order(ScriptFault.HANG_DATA)
    rank.on_sleep = lambda: rank.taken.unlink() if len(rank.slept) == 1_000 else None
    rank.hook.after_step(1)
    assert rank.slept == [LOOK_INTERVAL_S] * 1_000


def test_slow_steps_end_when_the_fault_is_undone(rank: Rank) -> None:
    rank.order(ScriptFault.SLOW_STEPS, seconds=0.5)
    for step in range(3):
        rank.hook.after_step(step)
    rank.taken.unlink()
    for step in range(3, 6):
        rank.hook.after_step(step)
    assert rank.slept == [0.5, 0.5, 0.0]


def test_nan_reaches_the_loss(rank: Rank) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    rank.order(ScriptFault.NAN)
    rank.hook.after_step(1)
    rank.hook.before_save({"model": model, "step": 1})
    assert model(torch.ones(2, 4)).sum().isnan()
    again = torch.nn.Linear(4, 4)
    rank.hook.before_save({"model": again})
    assert not again.weight.isnan().any(), "one order, one fault"


@given(
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    st.integers(0, 63),
    st.floats(-100, 100, allow_nan=False),
)
def test_one_bit_of_one_number_flips(dtype: torch.dtype, bit: int, value: float) -> None:
    parameter = torch.nn.Parameter(torch.full((3,), value, dtype=dtype))
    before = parameter.detach().clone()
    with torch.no_grad():
        flip_bit(parameter, bit)
    changed = before.view(torch.uint8) ^ parameter.detach().view(torch.uint8)
    assert sum(int(byte).bit_count() for byte in changed) == 1
    assert torch.equal(parameter[1:].detach(), before[1:])
    with torch.no_grad():
        flip_bit(parameter, bit)
    assert torch.equal(parameter.detach(), before)
