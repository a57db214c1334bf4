"""In whatever order messages arrive, nothing acts twice, goes backwards, or is counted twice."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flyball.contracts.decisions import CommandResult, RankPosition, UpdateState
from flyball.contracts.events import EventKind
from services.actuator.executor import Executor
from services.bus.embedded import EmbeddedBus
from services.rules.stream import Cursor
from services.runtime.wakeup import LocalWakeup
from services.store.read.read_models import SqlReadModels

# Every example creates its own database; the fixtures are stateless.
PROPERTY = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

FINAL = (UpdateState.SUCCEEDED, UpdateState.FAILED, UpdateState.REFUSED)
ANSWERS = st.tuples(
    st.just("answer"), st.integers(0, 9), st.sampled_from(["acknowledged", "succeeded", "failed", "refused"])
)
MOVES = st.tuples(st.just("execute"), st.integers(0, 1), st.just(""))


@PROPERTY
@given(st.lists(st.one_of(ANSWERS, MOVES), max_size=30))
def test_answers_in_any_order_start_a_generation_at_most_once(new_stores, make, turns) -> None:
    stores = new_stores()
    stores.run_job()
    stores.begin_restart()
    executors = [Executor(store=stores.actions, wakeup=LocalWakeup(), clock=stores.clock) for _ in range(2)]
    final: dict[str, UpdateState] = {}
    for turn, number, state in turns:
        progress = next(iter(stores.actions.open_actions()), None)
        if progress is None:
            break
        if turn == "execute":
            executors[number].run_once()
            continue
        record = progress.commands[number % len(progress.commands)]
        result = CommandResult(positions=(RankPosition(0, number),))
        stores.actions.record(make.update(record.command.command_id, state, result=result))
        progress = stores.actions.open_actions()[0]
        for now in progress.commands:
            command_id = now.command.command_id
            if command_id in final:
                assert now.state is final[command_id]
            elif now.state in FINAL:
                final[command_id] = now.state
    commands = SqlReadModels(stores.db).decision("dec-2")["action"]["commands"]
    assert {c["command_id"]: c["state"] for c in commands if c["command_id"] in final} == final
    started = [event for _, event in stores.log.read(None, 0, 1000, {EventKind.GENERATION_STARTED})]
    assert [event.generation for event in started] in ([1], [1, 2])
    hosts = [command["host_id"] for command in commands if command["kind"] == "start_workers" and not command["code"]]
    refused = sum(c["kind"] == "start_workers" and c["state"] == "refused" for c in commands)
    assert len(hosts) <= 2 + refused  # a host gets the command again only if it did nothing


@PROPERTY
@given(
    st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(1, 8)), max_size=40),
    st.lists(st.integers(1, 7), min_size=1, max_size=10),
)
def test_signals_in_any_order_and_number_are_stored_once_and_confirmed_without_gaps(
    new_stores, make, arrivals, batches
) -> None:
    stores = new_stores()
    bus = EmbeddedBus(stores.db)
    stored: set[tuple[str, int]] = set()
    for source, seq in arrivals:
        bus.publish([make.signal(seq, source=f"host-{source}", incarnation=f"inc-{source}")])
    cursor: Cursor | None = None
    rounds = 0
    while delivered := bus.read(cursor, limit=batches[rounds % len(batches)]):
        rounds += 1
        fresh = stores.decisions.unseen([d.signal for d in delivered])
        keys = [(signal.source[-1], signal.seq) for signal in fresh]
        assert len(set(keys)) == len(keys)
        assert not set(keys) & stored
        cursor = delivered[-1].cursor
        stores.commit(signals=fresh, cursor=cursor)
        if rounds % 2:
            bus.trim(cursor)
        stored |= set(keys)
        for source in "ab":
            mine = {seq for name, seq in stored if name == source}
            contiguous = next(n for n in range(10) if n + 1 not in mine)
            sender = (f"host-{source}", f"inc-{source}")
            assert stores.status.committed([sender]).get(sender, 0) == contiguous
    assert stored == set(arrivals)
    assert stores.decisions.cursor() == cursor
