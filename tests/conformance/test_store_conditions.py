"""Conditions of hosts in the database: what the API and the controller write, and what both read."""

from __future__ import annotations

import msgspec
import pytest
from sqlalchemy import delete, update

from flyball.contracts.errors import Conflict, NotFound
from flyball.contracts.events import EventKind
from flyball.contracts.reports.conditions import MAX_CONDITIONS, HostCondition, Severity
from services.controller.round.focus import Focus
from services.controller.round.view import ConditionChange, StandingCondition
from services.store.decisions.condition_store import SqlConditionStore
from services.store.read.read_models import SqlReadModels
from services.store.retention.host_removal import SqlHostRemoval
from services.store.sql.tables import host_conditions, log_head

T = 1000.0
HOT = HostCondition("thermal", Severity.WARNING, "GPU 1 is hot.", "api:dcgm", T, "gpu 1", {"celsius": 91}, T + 60)


@pytest.fixture
def conditions(stores, make) -> SqlConditionStore:
    stores.status.record_reports([(make.report("host-c"), T)])
    stores.lead()
    return SqlConditionStore(stores.db)


def standing(stores, focus: Focus | None = None) -> tuple[StandingCondition, ...]:
    return next(host.conditions for host in stores.decisions.load_view(focus).hosts if host.host_id == "host-c")


def test_a_condition_stands_until_the_controller_takes_it_away(stores, conditions) -> None:
    revision = stores.decisions.revision()
    conditions.begin("host-c", HOT)
    assert stores.decisions.revision() > revision, "the controller wakes up"
    assert standing(stores) == standing(stores, Focus()) == (StandingCondition(HOT),)
    shown = SqlReadModels(stores.db).host("host-c")["conditions"]
    assert [(one["kind"], one["severity"], one["until"], one["is_overruled"]) for one in shown] == [
        ("thermal", "warning", T + 60, False)
    ]
    assert stores.kinds().count(EventKind.SIGNAL) == 1

    conditions.begin("host-c", msgspec.structs.replace(HOT, since=T + 5, until=T + 65))
    longer = msgspec.structs.replace(HOT, until=T + 65)
    assert standing(stores) == (StandingCondition(longer),), "it has stood since it was first reported"
    assert stores.kinds().count(EventKind.SIGNAL) == 1, "a repetition is no news"
    stores.commit(conditions=(ConditionChange("host-c", HOT, has_ended=True),))
    assert standing(stores) == (StandingCondition(longer),), "it was reported anew meanwhile"

    conditions.end("host-c", HOT.key, T + 9)
    (ending,) = standing(stores)
    assert ending.condition.until == T + 9
    stores.commit(conditions=(ConditionChange("host-c", ending.condition, has_ended=True),))
    assert standing(stores) == () and SqlReadModels(stores.db).host("host-c")["conditions"] == []
    conditions.end("host-c", HOT.key, T + 10)


def test_a_condition_is_decoded_once_until_it_changes(stores, conditions) -> None:
    conditions.begin("host-c", HOT)
    (first,) = standing(stores)
    assert standing(stores)[0] is first
    stores.commit(conditions=(ConditionChange("host-c", HOT, is_overruled=True),))
    assert standing(stores) == (StandingCondition(HOT, is_overruled=True),)


def test_conditions_are_read_again_only_when_one_changed(stores, conditions, make, statements: list[str]) -> None:
    other = HostCondition("disk", Severity.INFO, "/ is full.", "probe disk", T)

    def reads() -> int:
        """How often a view reads conditions. It shows what a fresh reader finds."""
        statements.clear()
        shown = standing(stores)
        count = sum("FROM host_conditions" in statement for statement in statements)
        fresh = stores.other_decisions().load_view().hosts
        assert shown == next(host.conditions for host in fresh if host.host_id == "host-c")
        return count

    conditions.begin("host-c", HOT)
    assert (reads(), reads()) == (1, 0)
    stores.commit()
    assert reads() == 0, "something else changed"
    stores.commit(conditions=(ConditionChange("host-c", other),))
    assert (reads(), reads()) == (1, 0)
    conditions.end("host-c", HOT.key, T + 9)
    assert (reads(), reads()) == (1, 0)
    (ending,) = (one for one in standing(stores) if one.condition.key == HOT.key)
    stores.commit(conditions=(ConditionChange("host-c", ending.condition, has_ended=True),))
    assert (reads(), reads()) == (1, 0)
    with stores.db.write() as connection:  # an older copy takes the place of the database
        connection.execute(update(log_head).values(revision=log_head.c.revision - 1))
        connection.execute(delete(host_conditions))
    assert standing(stores) == ()
    stores.status.record_reports([(make.report("host-c"), T + 20.0)])
    conditions.begin("host-c", HOT)
    assert standing(stores) == (StandingCondition(HOT),)
    SqlHostRemoval(stores.db).remove("host-c", T + 99.0)
    assert stores.decisions.load_view().hosts == ()
    stores.status.record_reports([(make.report("host-c"), T + 100.0)])
    assert standing(stores) == (), "it is a new host"


def test_a_page_of_hosts_reads_their_conditions_only(stores, conditions, make, statements: list[str]) -> None:
    stores.status.record_reports([(make.report("host-b"), T)])
    conditions.begin("host-c", HOT)
    statements.clear()
    assert SqlReadModels(stores.db).host("host-b")["conditions"] == []
    (read,) = (statement for statement in statements if "FROM host_conditions" in statement)
    assert "WHERE host_conditions.host_id IN" in read


def test_what_an_operator_overruled_stays_so_until_it_gets_worse(stores, conditions) -> None:
    conditions.begin("host-c", HOT)
    stores.commit(conditions=(ConditionChange("host-c", HOT, is_overruled=True),))
    conditions.begin("host-c", HOT)
    assert standing(stores)[0].is_overruled
    conditions.begin("host-c", msgspec.structs.replace(HOT, severity=Severity.CRITICAL))
    assert not standing(stores)[0].is_overruled


def test_hosts_are_known_and_conditions_bounded(stores, conditions) -> None:
    for call in (lambda: conditions.begin("nobody", HOT), lambda: conditions.end("nobody", HOT.key, T)):
        with pytest.raises(NotFound, match="nobody"):
            call()
    for number in range(MAX_CONDITIONS):
        conditions.begin("host-c", msgspec.structs.replace(HOT, subject=f"gpu {number}"))
    conditions.begin("host-c", msgspec.structs.replace(HOT, subject="gpu 3"))
    with pytest.raises(Conflict, match="64 conditions stand on host host-c already"):
        conditions.begin("host-c", msgspec.structs.replace(HOT, subject="gpu 64"))
