"""How benchmarks/trust.py ends after Ctrl-C and SIGTERM, and what it leaves behind: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from trust_bench import stack
from trust_bench.interruption import STOP_SIGNALS, Interruption
from trust_bench.own import end_marked


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def interruption(said: list[str]) -> Iterator[Interruption]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    found = Interruption(said.append)
    found.listen()
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_server_that_is_missing_is_named_with_its_package(
    interruption: Interruption, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/no/such")
    with pytest.raises(
        stack.StackError, match=r"redis-server\. On Debian: apt-get install mariadb-server redis-server"
    ):
        stack.TrustStack(("host-a",), interruption)


def test_ctrl_c_ends_at_once_and_what_is_cleaned_up_then_is_left_alone(interruption: Interruption) -> None:
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()
    press_ctrl_c()
    assert interruption.is_asked


def test_within_a_campaign_the_first_ctrl_c_asks_and_the_second_ends_it(
    interruption: Interruption, said: list[str]
) -> None:
    with interruption.in_order():
        os.kill(os.getpid(), signal.SIGTERM)
        assert interruption.is_asked and "a second Ctrl-C" in said[0]
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()


def test_an_impatient_second_ctrl_c_does_not_interrupt_what_is_undone_after_a_campaign(
    interruption: Interruption, said: list[str]
) -> None:
    with interruption.shielded():
        with interruption.in_order():
            press_ctrl_c()
        press_ctrl_c()
        assert "ended first" in said[-1]
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()


def test_a_campaign_within_a_shield_can_be_ended(interruption: Interruption) -> None:
    with interruption.shielded(), pytest.raises(KeyboardInterrupt), interruption.in_order():
        press_ctrl_c()
        press_ctrl_c()


@pytest.mark.processes
def test_ctrl_c_while_the_stack_ends_leaves_nothing_of_it(
    interruption: Interruption, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_interrupted(name: str, value: str) -> None:
        press_ctrl_c()
        press_ctrl_c()
        end_marked(name, value)

    monkeypatch.setattr(stack, "SERVERS", {})  # none is started
    monkeypatch.setattr(stack, "end_marked", end_interrupted)
    found = stack.TrustStack(("host-a",), interruption)
    with subprocess.Popen(["sleep", "600"], env=found.environment) as process:
        found.end()
        assert process.wait(10.0) == -signal.SIGKILL
    assert interruption.is_asked and not found.root.exists() and not found.shm_dir.exists()
