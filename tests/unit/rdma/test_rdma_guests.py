"""A kernel that panics inside rdma_rxe is not mistaken for anything else that ends a virtual machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

# Recorded in a guest of Debian's 6.1.0-56: a queue pair was freed while the NIC still had a packet of it.
PANICKED = (Path(__file__).parent / "panicked_console.txt").read_text().splitlines()


@pytest.fixture
def panic_in_rxe(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterable[str]], str]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "deploy"))
    machine = pytest.importorskip("rdma_guest.machine")
    try:
        return machine.panic_in_rxe
    finally:
        for name in ("rdma_guest.machine", "rdma_guest.image", "rdma_guest"):
            del sys.modules[name]


def test_a_panic_in_rdma_rxe_is_recognized(panic_in_rxe: Callable[[Iterable[str]], str]) -> None:
    assert panic_in_rxe(PANICKED) == "rxe_skb_tx_dtor"
    assert panic_in_rxe(PANICKED[-20:]) == "rxe_skb_tx_dtor", "no more is kept of a long console"


@pytest.mark.parametrize(
    "console",
    [
        pytest.param([], id="nothing"),
        pytest.param([line for line in PANICKED if "Kernel panic" not in line], id="an oops that the kernel survived"),
        pytest.param([line.replace("[rdma_rxe]", "[virtio_net]") for line in PANICKED], id="another module"),
        pytest.param([line.replace(" [rdma_rxe]", "") for line in PANICKED], id="the kernel itself"),
        pytest.param(
            [*PANICKED[:10], "RIP: 0010:0xffffffffc0000000", "Kernel panic - not syncing: x"], id="elsewhere later"
        ),
        pytest.param(["E   AssertionError: rdma_rxe", "1 failed"], id="a failed test"),
    ],
)
def test_nothing_else_is(panic_in_rxe: Callable[[Iterable[str]], str], console: list[str]) -> None:
    assert panic_in_rxe(console) == ""
