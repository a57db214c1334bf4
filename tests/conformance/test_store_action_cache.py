"""An actuator's store caches open actions. Every read equals that of a fresh actuator, and costs only the changes
since the last one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import event

from flyball.contracts.decisions import ActionState, Command, CommandUpdate, UpdateState
from services.actuator.ports import ActionProgress, PlaybookStep
from services.store.actions import action_cache
from services.store.reports.persistent_steps import PersistentCopies

DEADLINE_S = 120.0
HOSTS = tuple(f"node-{number}" for number in range(60))

Look = Callable[[], list[ActionProgress]]


@pytest.fixture
def look(stores) -> Look:
    def compared() -> list[ActionProgress]:
        found = stores.actions.open_actions()
        assert found == stores.other_actions().open_actions()
        return found

    return compared


def begin(stores, make, *, hosts=HOSTS):
    """A restart that has sent stop commands to many hosts."""
    stores.run_job()
    restart = make.restart(stop_hosts=hosts)
    stores.commit(
        incidents=(make.incident(action_id="act-2"),), decisions=(restart,), steps={"act-2": make.stop_step(restart)}
    )
    return restart


def test_every_change_is_seen(stores, make, look: Look) -> None:
    assert look() == []
    restart = begin(stores, make, hosts=("host-a", "host-b"))
    assert len(look()[0].commands) == 2
    for state in ("acknowledged", "succeeded"):
        stores.actions.record(make.update("act-2.stop.host-a.1", state))
        assert look()[0].commands[0].state is UpdateState(state)
    assert look()[0].engine_addresses == {}
    stores.other_actions().record(make.update("act-2.stop.host-b.1"))
    (progress,) = look()
    assert progress.engine_addresses != {}
    assert stores.other_actions().apply(progress, make.start_step(restart, 7), 1001.0)
    (progress,) = look()
    assert (progress.phase, len(progress.commands), progress.engine_addresses) == ("start", 4, {})
    stores.actions.record(make.update("act-2.start.host-b.1", "acknowledged"))
    assert look()[0].commands[3].state is UpdateState.ACKNOWLEDGED

    better = make.restart(3, generation=2, next=make.grant(3))
    stores.commit(decisions=(better,), superseded_actions=("act-2",), steps={"act-3": make.stop_step(better)})
    assert [progress.action_id for progress in look()] == ["act-3"]
    stores.actions.record(make.update("act-2.start.host-a.1"))  # late
    (progress,) = look()
    assert [record.update for record in progress.commands] == [None, None]
    assert stores.actions.apply(progress, PlaybookStep("stop", ActionState.FAILED), 1002.0)
    assert look() == []


class Cost:
    statements = 0
    decoded: list[object]


@contextmanager
def counted(stores, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cost]:
    cost = Cost()
    cost.decoded = []
    really = action_cache.load

    def count(_connection, _cursor, statement: str, *_more) -> None:
        cost.statements += statement.startswith("SELECT")

    def load(document: str, kind: object) -> object:
        cost.decoded.append(kind)
        return really(document, kind)

    engine = stores.db._reader
    event.listen(engine, "before_cursor_execute", count)
    with monkeypatch.context() as context:
        context.setattr(action_cache, "load", load)
        try:
            yield cost
        finally:
            event.remove(engine, "before_cursor_execute", count)


def test_a_read_decodes_only_what_changed(stores, make, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(stores, make)
    copies = []
    monkeypatch.setattr(PersistentCopies, "read", lambda *_arguments: copies.append(1) or ())
    with counted(stores, monkeypatch) as first:
        stores.actions.open_actions()
    assert first.decoded.count(Command) == len(HOSTS)
    with counted(stores, monkeypatch) as idle:
        stores.actions.open_actions()
    assert (idle.decoded, idle.statements) == ([], 3)
    for host in HOSTS[:2]:
        stores.actions.record(make.update(f"act-2.stop.{host}.1"))
    with counted(stores, monkeypatch) as answered:
        stores.actions.open_actions()
    assert (answered.decoded, answered.statements) == ([CommandUpdate] * 2, 3)
    assert copies == []
    for host in HOSTS[2:]:
        stores.actions.record(make.update(f"act-2.stop.{host}.1"))
    stores.actions.open_actions()
    assert copies == [1]  # the last host has stopped: the next step starts the generation


def test_no_answer_is_missed_while_many_come_at_once(stores, make) -> None:
    begin(stores, make)
    done: list[str] = []

    def answer(hosts: tuple[str, ...]) -> None:
        for host in hosts:
            stores.actions.record(make.update(f"act-2.stop.{host}.1", "acknowledged"))
            stores.actions.record(make.update(f"act-2.stop.{host}.1"))
            done.append(host)

    threads = [threading.Thread(target=answer, args=(HOSTS[part::4],)) for part in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        stores.actions.open_actions()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sorted(done) == sorted(HOSTS)
    (progress,) = stores.actions.open_actions()
    assert {record.state for record in progress.commands} == {UpdateState.SUCCEEDED}
    assert [progress] == stores.other_actions().open_actions()
