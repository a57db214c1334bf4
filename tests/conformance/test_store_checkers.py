"""The checkers over a real database: what the real loop and executor store breaks no invariant, and violations are
found."""

from __future__ import annotations

import msgspec
import pytest
from sqlalchemy import delete, select, update

from flyball.contracts.cluster import Phase, RankStatus
from flyball.contracts.decisions import CommandResult, Incident, RankPosition
from services.actuator.executor import Executor
from services.bus.embedded import EmbeddedBus
from services.controller.loop import ControllerLoop
from services.controller.round.view import PolicySettings
from services.record.codec import dump, load
from services.runtime.wakeup import LocalWakeup
from services.store.sql.tables import action_changes, generations, incidents
from simulator.database_check import check_database

BOUND_S = 60.0


@pytest.fixture
def recovered(stores, make, clock):
    """A job whose rank 0 was killed, and that trains again in generation 2."""
    bus, wakeup = EmbeddedBus(stores.db), LocalWakeup()
    loop = ControllerLoop(
        store=stores.decisions, bus=bus, wakeup=wakeup, clock=clock, settings=PolicySettings(), holder="c#1"
    )
    executor = Executor(store=stores.actions, wakeup=wakeup, clock=clock)

    def turn(generation: int = 0, step: int = -1) -> None:
        clock.now_s += 0.1
        for host, ranks in (("host-a", (0, 1)), ("host-b", (2, 3))):
            statuses = tuple(
                RankStatus("job", generation, rank, 100 + rank, Phase.STEP, step, 0.0) for rank in ranks if generation
            )
            report = make.report(host, sent_at=clock.now_s, ranks=statuses)
            stores.status.record_reports([(report, clock.now_s)])
        loop.run_once()
        for host in ("host-a", "host-b"):
            for command in stores.actions.commands_for(host, clock.now_s):
                result = CommandResult(positions=(RankPosition(0, 7),))
                stores.actions.record(make.update(command.command_id, result=result))
        executor.run_once()

    stores.jobs.submit(make.spec(), clock.now_s)
    for _ in range(3):
        turn()
    bus.publish([make.signal(1, make.exited(0), at=clock.now_s)])
    for _ in range(4):
        turn()
    for _ in range(2):
        turn(generation=2, step=8)
    return stores


def found(stores, clock) -> set[str]:
    return {violation.invariant for violation in check_database(stores.db, now=clock.now_s + 100.0, bound_s=BOUND_S)}


def test_a_recovery_breaks_no_invariant(recovered, clock) -> None:
    (incident,) = recovered.decisions.load_view().incidents or (None,)
    assert incident is None
    assert found(recovered, clock) == set()


def test_a_violation_in_the_database_is_found(recovered, clock) -> None:
    with recovered.db.write() as connection:
        stored = load(connection.scalar(select(incidents.c.document)), Incident)
        reopened = msgspec.structs.replace(stored, state="verifying")
        connection.execute(update(incidents).values(document=dump(reopened)))
        connection.execute(update(generations).where(generations.c.generation == 2).values(decision=1))
        moves = delete(action_changes).where(action_changes.c.action == 1, action_changes.c.state == "succeeded")
        connection.execute(moves)
    assert found(recovered, clock) >= {
        "incident_left_open",
        "generation_went_back",
        "decision_lost",
        "two_open_actions",
        "replay_differs",
    }
