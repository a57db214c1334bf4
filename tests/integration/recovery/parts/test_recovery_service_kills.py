"""kill -9 of one part of the control plane in the middle of an incident, at every point where that could hurt: started
again, it finishes the incident, nothing is lost, and nothing is done twice."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.clocks.waits import DEADLINE_S, until

from flyball.contracts.clock import SystemClock
from simulator.inject import faults

CLOCK = SystemClock()
ATTEMPTS = 5


def newest_commands(ledger) -> list[tuple[float, int]]:
    """(dispatched at, progress) of the commands of the newest action."""
    return ledger.rows(
        "SELECT dispatched_at, progress FROM commands WHERE action = (SELECT max(number) FROM actions)"
        " AND command_id NOT LIKE '%.warm.%'"
    )


def signal_taken_and_nothing_stored(ledger, decisions: int, signals: int) -> bool:
    return ledger.decisions == decisions and ledger.signals == signals and ledger.waiting > 0


def signal_not_published(ledger, decisions: int, signals: int) -> bool:
    return ledger.decisions == decisions and ledger.signals == signals


def signal_stored(ledger, decisions: int, signals: int) -> bool:
    """And decided about, if it was the kill: another rank's lost connection may be told before it, and waits for it."""
    return decisions <= ledger.decisions <= decisions + 1 and ledger.signals > signals


def decided(ledger, decisions: int, signals: int) -> bool:
    return ledger.decisions == decisions + 1 and ledger.signals > signals


def handed_out_and_not_answered(ledger, decisions: int, signals: int) -> bool:
    commands = newest_commands(ledger)
    return decided(ledger, decisions, signals) and any(at > 0.0 and not done for at, done in commands)


def answered_and_not_stored(ledger, decisions: int, signals: int) -> bool:
    commands = newest_commands(ledger)
    return decided(ledger, decisions, signals) and all(done == 0 for _, done in commands)


def arm(job, ledger, part, point: str) -> tuple[int, int]:  # type: ignore[no-untyped-def]
    """Have a part die at `point`, from now on; returns how many decisions and signals were stored by then. What a busy
    machine has to tell (a save that was late) leads there too: then it is let through, and the part armed anew."""
    for _ in range(ATTEMPTS):
        part.kill()
        part.start(fault_point=point)
        job.train_on()
        until(lambda: part.process.poll() is not None or not ledger.waiting, "no signal on its way")
        before = (ledger.decisions, ledger.signals)
        if part.process.poll() is None:
            return before
        part.start()
        job.train_on()
    raise AssertionError(f"something led to {point} {ATTEMPTS} times, without a fault")


@pytest.mark.parametrize(
    ("point", "died_there"),
    [
        ("sensor.before_publish", signal_not_published),
        ("controller.after_consume", signal_taken_and_nothing_stored),
        ("controller.after_commit", signal_stored),
        ("actuator.after_dispatch", handed_out_and_not_answered),
        ("actuator.before_ack", answered_and_not_stored),
    ],
)
def test_a_part_killed_in_the_middle_of_an_incident(
    job, ledger, reference, point: str, died_there: Callable[..., bool]
) -> None:
    stack = job.stack
    part = stack.parts[point.partition(".")[0]]
    before = arm(job, ledger, part, point)

    with job.next_incident() as incident:
        faults.kill(stack.api, job=job.name, rank=1, clock=CLOCK)
        assert part.process.wait(DEADLINE_S) == -signal.SIGKILL
        assert died_there(ledger, *before)
        part.start()

    assert (incident["state"], incident["cause"]) == ("resolved", "worker_killed")
    assert [d["kind"] for d in job.decisions(incident)] == ["restart_in_place"]
    assert {r["tier"] for r in incident["restored_from"]} == {"memory"}
    assert incident["lost_steps"] <= 1
    job.train_on()
    job.check_losses(reference)
    job.check_goodput()
    ledger.check_nothing_was_lost_or_done_twice()


def test_a_leader_that_slept_through_its_lease_changes_nothing(job, ledger, reference) -> None:
    stack = job.stack
    first = stack.parts["controller"]
    first.kill()
    first.start(fault_point="controller.before_commit:1:SIGSTOP")  # its lease was checked, its commit not begun
    second = stack.add_part("controller", "second", folder="second")
    job.train_on()

    with job.next_incident() as incident:
        faults.kill(stack.api, job=job.name, rank=0, clock=CLOCK)
        until(lambda: state_of(first.process.pid) == "T", "the first leader's sleep")
        slept = ledger.epoch
        second.start()
    stored = ledger.decisions
    first.process.send_signal(signal.SIGCONT)
    refused = until(
        lambda: [line for line in first.logged("not_leading_any_more") if f"epoch is {slept}, but" in line["why"]],
        "the refusal of what it wanted to store",
    )

    # The second one was elected, more than once if the machine was busy.
    begun = re.search(r"but (\d+) has begun", refused[0]["why"])
    assert begun is not None and int(begun[1]) > slept, refused
    assert ledger.count("SELECT count(*) FROM decisions WHERE epoch > ?", slept) > 0
    assert ledger.count("SELECT count(*) FROM decisions WHERE epoch = ?", slept) == 0
    assert (incident["state"], incident["cause"]) == ("resolved", "worker_killed")
    assert incident["lost_steps"] <= 1
    job.train_on()
    assert ledger.decisions == stored
    job.check_losses(reference)
    ledger.check_nothing_was_lost_or_done_twice()
    second.kill()
    del stack.parts["second"]
    until(lambda: first.logged("leading")[-1]["epoch"] == ledger.epoch, "the first controller leads again")


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
