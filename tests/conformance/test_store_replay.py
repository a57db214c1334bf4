"""The inputs of rounds are kept. Deciding again from them reproduces the decisions exactly; a change is found."""

from __future__ import annotations

import json
import threading

import msgspec
import pytest
from sqlalchemy import delete, insert, select, update
from support.clocks.waits import until

from flyball.cli.main import run_cli
from flyball.contracts.decisions import CommandResult, Decision, Incident, RankPosition
from flyball.contracts.errors import NotFound, StaleEpoch, Unreachable
from services.actuator.executor import Executor
from services.bus.embedded import EmbeddedBus
from services.controller import loop as loop_module
from services.controller import policy, round_keeper
from services.controller.loop import ControllerLoop
from services.controller.replay import RoundInputs
from services.controller.round.view import PolicySettings
from services.controller.round_keeper import RoundKeeper
from services.controller.rules import waiting_rules
from services.record.codec import dump, load
from services.runtime.wakeup import LocalWakeup
from services.store.decisions import rounds as round_store
from services.store.read.replaying import replay_database
from services.store.sql.tables import decisions, incidents, round_pieces, rounds

DEADLINE_S = 120.0


@pytest.fixture
def decided(stores, make, clock):
    """A job that the real loop started, and restarted after losing a worker; one of three decisions is a hold."""
    bus, wakeup = EmbeddedBus(stores.db), LocalWakeup()
    loop = ControllerLoop(
        store=stores.decisions, bus=bus, wakeup=wakeup, clock=clock, settings=PolicySettings(), holder="c#1"
    )
    executor = Executor(store=stores.actions, wakeup=wakeup, clock=clock)

    def turn(**result) -> None:
        clock.now_s += 0.1
        stores.status.record_reports(
            [(make.report(host, sent_at=clock.now_s), clock.now_s) for host in ("host-a", "host-b")]
        )
        loop.run_once()
        for host in ("host-a", "host-b"):
            for command in stores.actions.commands_for(host, clock.now_s):
                stores.actions.record(make.update(command.command_id, result=CommandResult(**result)))
        executor.run_once()

    stores.jobs.submit(make.spec(), clock.now_s)
    for _ in range(3):
        turn()
    lost = make.exited(1, exit_code=1, signal_number=None, error={"kind": "X", "message": "Connection reset by peer"})
    lost = msgspec.convert(msgspec.to_builtins(lost), type(lost))
    bus.publish([make.signal(1, lost, at=clock.now_s)])
    turn()
    bus.publish([make.signal(2, make.exited(0), at=clock.now_s), make.signal(1, lost, at=clock.now_s)])
    for _ in range(4):
        turn(positions=(RankPosition(0, 7),))
    with stores.db.read() as connection:
        kinds = connection.scalars(select(decisions.c.kind).order_by(decisions.c.number)).all()
    assert kinds == ["start_job", "hold", "restart_in_place"]
    return stores


def test_decisions_are_reproduced_exactly(decided, tmp_path) -> None:
    with decided.db.read() as connection:
        before = connection.execute(select(decisions)).all()
    told: list[int] = []
    result = replay_database(decided.db, tmp_path, advance=told.append)
    assert (result.reproduced, result.before, result.missing, result.differences) == (3, 0, (), ())
    assert len(told) == result.rounds and set(told) == {1}
    assert result.signals == 2
    with decided.db.read() as connection:
        assert connection.execute(select(decisions)).all() == before  # the database was only read


def test_a_decision_that_was_changed_afterwards_is_found_and_described(decided, tmp_path) -> None:
    with decided.db.write() as connection:
        stored = load(connection.scalar(select(decisions.c.document).where(decisions.c.number == 2)), Decision)
        forged = msgspec.structs.replace(stored, reason="somebody's taste")
        connection.execute(update(decisions).where(decisions.c.number == 2).values(document=dump(forged)))
    result = replay_database(decided.db, tmp_path)
    assert not result.is_exact
    assert result.reproduced == 2
    (difference,) = result.differences
    assert difference.startswith('dec-2: reason was "somebody\'s taste", and is ')


def test_a_policy_that_decides_otherwise_is_found_and_so_is_what_follows(decided, tmp_path, monkeypatch) -> None:
    """A later release may do so: it does not wait for the root cause."""
    hasty = tuple(rule for rule in policy.FAILURE_RULES if rule is not waiting_rules.wait_for_the_root_cause)
    monkeypatch.setattr(policy, "FAILURE_RULES", hasty)
    result = replay_database(decided.db, tmp_path)
    assert not result.is_exact
    assert "dec-2: kind was hold, and is restart_in_place here" in result.differences


def test_an_incident_that_ended_otherwise_is_found(decided, tmp_path) -> None:
    with decided.db.write() as connection:
        stored = load(connection.scalar(select(incidents.c.document)), Incident)
        forged = msgspec.structs.replace(stored, failed_step=3)
        connection.execute(update(incidents).values(document=dump(forged)))
    (difference,) = replay_database(decided.db, tmp_path).differences
    assert difference == "inc-1: failed_step was 3, and is 7 here"


def test_rounds_that_are_no_longer_kept_are_listed(decided, tmp_path) -> None:
    with decided.db.write() as connection:
        kept = connection.scalars(select(rounds.c.number).order_by(rounds.c.number)).all()
        connection.execute(delete(rounds).where(rounds.c.number == kept[0]))
    result = replay_database(decided.db, tmp_path)
    assert (result.is_exact, result.before, result.reproduced) == (True, 1, 2)
    with decided.db.write() as connection:
        connection.execute(delete(rounds))
    (tmp_path / "again").mkdir()
    with pytest.raises(NotFound):
        replay_database(decided.db, tmp_path / "again")


def test_a_round_that_is_missing_in_between_is_no_success(decided, tmp_path) -> None:
    with decided.db.write() as connection:
        holds = connection.scalars(select(rounds.c.number).where(rounds.c.signals != "[]")).all()
        connection.execute(delete(rounds).where(rounds.c.number == holds[0]))
    result = replay_database(decided.db, tmp_path)
    assert (result.is_exact, result.missing) == (False, ("dec-2",))


def test_the_newest_decisions_are_missing_if_their_rounds_are_not_kept_yet(decided, tmp_path) -> None:
    """As if the controller was killed, or is read, while it is still writing a large round."""
    with decided.db.write() as connection:
        restarted_at = connection.scalar(select(decisions.c.at).where(decisions.c.number == 3))
        connection.execute(delete(rounds).where(rounds.c.at >= restarted_at))
    result = replay_database(decided.db, tmp_path)
    assert (result.is_exact, result.missing, result.reproduced) == (False, ("dec-3",), 2)
    assert not any("dec-3" in difference for difference in result.differences)


def test_only_the_newest_rounds_are_kept(stores, make, monkeypatch) -> None:
    stores.run_job()
    inputs = RoundInputs(stores.decisions.load_view(), PolicySettings())
    size_bytes = len(round_store.pack(inputs))

    def numbers() -> list[int]:
        with stores.db.read() as connection:
            return list(connection.scalars(select(rounds.c.number).order_by(rounds.c.number)))

    def keep(count: int) -> list[int]:
        for _ in range(count):
            stores.decisions.keep_round(inputs, (), epoch=stores.epoch, now=1.0)
        return numbers()

    monkeypatch.setattr(round_store, "KEPT", 3)
    assert keep(5) == [3, 4, 5]
    monkeypatch.setattr(round_store, "KEPT", 100)
    monkeypatch.setattr(round_store, "KEPT_BYTES", 2 * size_bytes)
    assert keep(2) == [6, 7]
    monkeypatch.setattr(round_store, "KEPT_BYTES", size_bytes - 1)
    assert keep(1) == [6, 7], "one larger than the bound on all rounds is not kept: its decisions are missing"


def test_a_large_round_is_kept_in_pieces_which_go_with_it(stores, make, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(round_store, "PIECE_BYTES", 100)
    stores.run_job()
    inputs = RoundInputs(stores.decisions.load_view(), PolicySettings())
    size_bytes = len(round_store.pack(inputs))

    def pieces() -> list[tuple[int, int]]:
        with stores.db.read() as connection:
            rows = connection.execute(select(round_pieces).order_by(round_pieces.c.round, round_pieces.c.piece))
            return [(row.round, len(row.data)) for row in rows]

    for now in (1.0, 2.0):
        stores.decisions.keep_round(inputs, (), epoch=stores.epoch, now=now)
    assert sum(size for number, size in pieces() if number == 2) == size_bytes - 100
    with stores.db.read() as connection:
        assert [stored.inputs for stored in round_store.read(connection)] == [inputs, inputs]
    monkeypatch.setattr(round_store, "KEPT", 1)
    stores.decisions.keep_round(inputs, (), epoch=stores.epoch, now=3.0)
    assert {number for number, _ in pieces()} == {3}


def test_rounds_in_pieces_are_replayed_and_so_is_a_database_of_a_release_without_them(decided, tmp_path) -> None:
    with decided.db.write() as connection:
        for number, packed in connection.execute(select(rounds.c.number, rounds.c.inputs)).all():
            connection.execute(update(rounds).where(rounds.c.number == number).values(inputs=packed[:50]))
            connection.execute(insert(round_pieces).values(round=number, piece=1, data=packed[50:]))
    result = replay_database(decided.db, tmp_path)
    assert (result.is_exact, result.reproduced) == (True, 3)
    with decided.db.write() as connection:
        for number, data in connection.execute(select(round_pieces.c.round, round_pieces.c.data)).all():
            begins = connection.scalar(select(rounds.c.inputs).where(rounds.c.number == number))
            connection.execute(update(rounds).where(rounds.c.number == number).values(inputs=begins + data))
        round_pieces.drop(connection)
    (tmp_path / "again").mkdir()
    assert replay_database(decided.db, tmp_path / "again") == result


def test_the_exit_code_of_the_command_reports_the_result(decided, ready_url, capsys) -> None:
    assert run_cli(["replay", "--from-db", ready_url]) == 0
    assert "3 decisions reproduced" in capsys.readouterr().out
    with decided.db.write() as connection:
        connection.execute(update(decisions).where(decisions.c.number == 3).values(epoch=7))
    assert run_cli(["replay", "--from-db", ready_url, "--job", "job", "-o", "json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["exact"], result["differences"]) == (False, ["dec-3 was made in epoch 7, but in 1 here"])
    assert run_cli(["replay", "--from-db", ready_url, "--job", "another"]) == 0
    assert "0 decisions reproduced" in capsys.readouterr().out


def test_a_database_that_keeps_no_round_is_an_error(ready_url, stores, capsys) -> None:
    assert run_cli(["replay", "--from-db", ready_url]) == NotFound.exit_code
    assert "keeps no round" in capsys.readouterr().err


def test_the_loop_decides_on_while_a_large_round_is_being_kept(stores, make, clock, tmp_path, monkeypatch) -> None:
    """The rounds written later are the same, in the same order, small ones among the large ones."""
    may_keep, really = threading.Event(), stores.decisions.keep_round
    begun: list[float] = []

    def keep_round(*arguments, **more) -> None:
        begun.append(more["now"])
        assert may_keep.wait(DEADLINE_S)
        really(*arguments, **more)

    def is_large(inputs: RoundInputs) -> bool:
        return inputs.view.next_decision == 1

    monkeypatch.setattr(stores.decisions, "keep_round", keep_round)
    monkeypatch.setattr(RoundInputs, "is_large", property(is_large))
    bus, wakeup, stop = EmbeddedBus(stores.db), LocalWakeup(), threading.Event()
    loop = ControllerLoop(
        store=stores.decisions, bus=bus, wakeup=wakeup, clock=clock, settings=PolicySettings(), holder="c#1"
    )

    def kinds() -> list[str]:
        with stores.db.read() as connection:
            return list(connection.scalars(select(decisions.c.kind).order_by(decisions.c.number)))

    monkeypatch.setattr(loop_module, "LONGEST_END_S", DEADLINE_S)  # what it leaves out is missing in the replay
    thread = threading.Thread(target=loop.run, args=(stop,))
    thread.start()
    try:
        until(lambda: loop._rounds._is_running, "rounds are kept beside the loop")
        stores.status.record_reports([(make.report(host), make.T) for host in ("host-a", "host-b")])
        stores.jobs.submit(make.spec(), clock.now_s)
        until(lambda: begun, "a large round was decided")
        stores.jobs.request_stop("job", clock.now_s)
        until(lambda: "stop_job" in kinds(), "the next round was decided while the first is not kept yet")
        with stores.db.read() as connection:
            assert connection.scalars(select(rounds.c.number)).all() == []
    finally:
        may_keep.set()
        stop.set()
        thread.join(DEADLINE_S)
    result = replay_database(stores.db, tmp_path)
    assert (result.reproduced, result.before, result.missing, result.differences) == (len(kinds()), 0, (), ())


class Keeping:
    """Records the times of rounds, while it may."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.kept: list[float] = []
        self.errors: list[Exception] = []

    def keep_round(self, _inputs, _signals, *, epoch: int, now: float) -> None:
        assert self.may.wait(DEADLINE_S)
        if self.errors:
            raise self.errors.pop(0)
        self.kept.append(now)


def test_rounds_that_wait_to_be_kept_have_a_bound_and_survive_an_outage(clock, monkeypatch) -> None:
    store, stop = Keeping(), threading.Event()
    keeper = RoundKeeper(store, clock)
    thread = threading.Thread(target=keeper.run, args=(stop,))
    thread.start()
    until(lambda: keeper._is_running, "it runs")
    store.errors = [Unreachable("The database is away."), StaleEpoch("Another one leads.")]
    for now in range(round_keeper.BACKLOG):
        keeper.keep(None, (), epoch=1, now=float(now))
    monkeypatch.setattr(round_keeper, "LONGEST_WAIT_S", 0.05)
    keeper.keep(None, (), epoch=1, now=100.0)  # no room: it is logged, and not kept
    store.may.set()
    stop.set()
    keeper.wake()
    thread.join(DEADLINE_S)
    assert store.kept == [float(now) for now in range(1, round_keeper.BACKLOG)]  # the first was of an older epoch


def test_another_policy_is_shown_beside_the_stored_decisions(decided, ready_url, tmp_path, capsys) -> None:
    path = tmp_path / "hasty.toml"
    path.write_text("root_cause_window_s = 0\n")
    assert run_cli(["replay", "--from-db", ready_url, "--policy", str(path), "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["decisions"]
    assert [(d["then"] or {}).get("decision_id") for d in found][:2] == ["dec-1", "dec-2"]
    second = found[1]
    assert (second["then"]["kind"], second["now"]["kind"], second["same"]) == ("hold", "restart_in_place", False)
    assert found[0]["same"], "the start is the same"
    assert run_cli(["replay", "--from-db", ready_url, "--policy", str(path), "--job", "nobody", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["decisions"] == []
