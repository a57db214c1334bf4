"""kill -9 of one part of the control plane in the middle of an incident, at every point where that could hurt: started
again, it finishes the incident, nothing is lost, and nothing is done twice."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from flyball.contracts.clock import SystemClock
from simulator.inject import faults

CLOCK = SystemClock()
DEADLINE_S = 90.0


def newest_commands(ledger) -> list[tuple[float, int]]:
    """(dispatched at, progress) of the commands of the newest action."""
    return ledger.rows(
        "SELECT dispatched_at, progress FROM commands WHERE action = (SELECT max(number) FROM actions)"
        " AND command_id NOT LIKE '%.warm.%'"
    )


def signal_taken_and_nothing_stored(ledger, decisions: int, signals: int) -> bool:
    waiting = "SELECT count(*) FROM bus_messages WHERE position > (SELECT position FROM cursors)"
    return ledger.decisions == decisions and ledger.signals == signals and ledger.count(waiting) > 0


def signal_not_published(ledger, decisions: int, signals: int) -> bool:
    return ledger.decisions == decisions and ledger.signals == signals


def decided(ledger, decisions: int, signals: int) -> bool:
    return ledger.decisions == decisions + 1 and ledger.signals > signals


def handed_out_and_not_answered(ledger, decisions: int, signals: int) -> bool:
    commands = newest_commands(ledger)
    return decided(ledger, decisions, signals) and any(at > 0.0 and not done for at, done in commands)


def answered_and_not_stored(ledger, decisions: int, signals: int) -> bool:
    commands = newest_commands(ledger)
    return decided(ledger, decisions, signals) and all(done == 0 for _, done in commands)


@pytest.mark.parametrize(
    ("point", "died_there"),
    [
        ("sensor.before_publish", signal_not_published),
        ("controller.after_consume", signal_taken_and_nothing_stored),
        ("controller.after_commit", decided),
        ("actuator.after_dispatch", handed_out_and_not_answered),
        ("actuator.before_ack", answered_and_not_stored),
    ],
)
def test_a_part_killed_in_the_middle_of_an_incident(
    job, ledger, reference, point: str, died_there: Callable[..., bool]
) -> None:
    stack = job.stack
    part = stack.parts[point.partition(".")[0]]
    part.kill()
    part.start(fault_point=point)
    job.train_on()
    assert part.process.poll() is None, "nothing has led there yet"
    before = (ledger.decisions, ledger.signals)

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


def test_a_leader_that_slept_through_its_lease_changes_nothing(job, ledger, reference, make_part) -> None:
    stack = job.stack
    first = stack.parts["controller"]
    first.kill()
    first.start(fault_point="controller.before_commit:1:SIGSTOP")  # its lease was checked, its commit not begun
    second = stack.parts["second"] = make_part(stack, "controller", folder="second")
    job.train_on()
    slept = ledger.epoch

    with job.next_incident() as incident:
        faults.kill(stack.api, job=job.name, rank=0, clock=CLOCK)
        stack.until("the first leader's sleep", lambda: state_of(first.process.pid) == "T")
        second.start()
    stored = (ledger.decisions, ledger.signals)
    first.process.send_signal(signal.SIGCONT)
    refused = stack.until(
        "the refusal of what it wanted to store",
        lambda: [line for line in first.logged("not_leading_any_more") if line["epoch"] == slept],
    )

    assert f"epoch is {slept}, but {slept + 1} has begun" in refused[0]["why"]
    assert ledger.rows("SELECT DISTINCT epoch FROM decisions WHERE epoch >= ?", slept) == [(slept + 1,)]
    assert (incident["state"], incident["cause"]) == ("resolved", "worker_killed")
    assert incident["lost_steps"] <= 1
    job.train_on()
    assert (ledger.decisions, ledger.signals) == stored
    job.check_losses(reference)
    ledger.check_nothing_was_lost_or_done_twice()
    second.kill()
    del stack.parts["second"]
    stack.until("the first controller leads again", lambda: first.logged("leading")[-1]["epoch"] == ledger.epoch)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
