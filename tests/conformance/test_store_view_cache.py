"""A controller's store caches hosts and plans. Every view equals one that is read from scratch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, event, select

from flyball.contracts.checkpoints import ShardCopy, Tier
from flyball.contracts.cluster import HostState, JobState, Phase, RankStatus
from flyball.contracts.decisions import ActionState, CommandResult, RankPosition
from flyball.contracts.errors import FlyballError
from flyball.contracts.reports.drains import DrainRequest
from flyball.contracts.reports.signals import HostReturned, RankStalled, Signal
from services.actuator.ports import PlaybookStep
from services.controller.round.focus import Focus, focused
from services.controller.round.view import HostChange, JobChange, Outcome, View
from services.store.actions import action_cache
from services.store.decisions import host_cache
from services.store.decisions.drain_store import SqlDrainStore
from services.store.reports import persistent_steps
from services.store.sql import tables

Check = Callable[[], View]


@pytest.fixture
def check(sql_stores) -> Check:
    """Loads the view with a warm cache, and compares it with that of a fresh controller."""

    def loaded() -> View:
        view = sql_stores.decisions.load_view()
        assert view == sql_stores.other_decisions().load_view()
        return view

    return loaded


def test_after_a_failed_action_its_hosts_are_read_again(sql_stores, make, monkeypatch) -> None:
    """With very many hosts, it may have used a step that existed when the hosts were last read, and is gone."""
    stores = sql_stores
    stores.run_job()
    copies = [ShardCopy("job", 1, 9, rank, Tier.MEMORY, "host-b", 10, "ab") for rank in (2, 3)]
    stores.status.record_reports([(make.report("host-b", sent_at=1010.0, copies=tuple(copies)), 1010.0)])
    stores.begin_restart()

    def copies_seen() -> int:
        return len(stores.decisions.load_view().copies)

    monkeypatch.setattr(host_cache, "PAGE", 1)
    monkeypatch.setattr(host_cache, "PAGES_BUDGET_S", -1.0)
    assert copies_seen() == 2
    stores.status.record_reports([(make.report("host-b", sent_at=1011.0), 1011.0)])
    assert copies_seen() == 2, "the page of host-a was read"
    (progress,) = stores.actions.open_actions()
    assert stores.actions.apply(progress, PlaybookStep("stop", ActionState.FAILED, message="step 9 is gone"), make.T)
    monkeypatch.setattr(host_cache, "PAGE", 1000)  # of those read by name
    monkeypatch.setattr(host_cache.HostCache, "_read_page", lambda *_: False)
    assert copies_seen() == 0


def test_every_change_is_seen(sql_stores, make, check) -> None:
    stores = sql_stores
    assert check().hosts == ()
    stores.run_job()
    running = check()
    assert len(running.hosts) == 2
    assert check() == running

    rank = RankStatus("job", 1, 0, 100, Phase.STEP, 9, 0.0)
    stores.status.record_reports([(make.report("host-a", sent_at=1010.0, ranks=(rank,)), 1010.0)])
    stepped = check()
    assert stepped.jobs[0].generation.ranks[0].step == 9

    copy = ShardCopy("job", 1, 9, 0, Tier.MEMORY, "host-a", 10, "ab")
    stores.status.record_reports([(make.report("host-a", sent_at=1011.0, ranks=(rank,), copies=(copy,)), 1011.0)])
    assert check().copies == (copy,)

    stores.commit(hosts=(HostChange("host-b", HostState.SILENT, "no report"),))
    assert [host.state for host in check().hosts] == [HostState.HEALTHY, HostState.SILENT]
    stores.commit(hosts=(HostChange("host-b", HostState.SILENT, "no report, and no neighbour hears it"),))
    assert check().hosts[1].reason == "no report, and no neighbour hears it"

    stores.status.record_reports([(make.report("host-c", sent_at=1012.0), 1012.0)])
    assert len(check().hosts) == 3


def test_an_action_and_its_new_generation_are_seen(sql_stores, make, check) -> None:
    sql_stores.run_job()
    before = check()
    restart = sql_stores.begin_restart()
    after = check()
    assert [action.plan for action in after.actions] == [restart.action]
    assert after.jobs != before.jobs or after.incidents != before.incidents


def test_hosts_answers_to_an_action_are_seen_and_read_once(sql_stores, make, check, monkeypatch) -> None:
    sql_stores.run_job()
    sql_stores.begin_restart()

    def answer(host: str, state: str, *steps: int) -> None:
        first = 0 if host == "host-a" else 2
        positions = tuple(RankPosition(rank, step) for rank, step in enumerate(steps, first))
        update = make.update(f"act-2.stop.{host}.1", state, result=CommandResult(positions=positions))
        sql_stores.actions.record(update)

    assert check().actions[0].positions == {}
    answer("host-a", "acknowledged", 9)
    assert check().actions[0].positions == {"0": 9}
    before = check()
    answer("host-a", "succeeded", 7, 8)  # the newest of a command's answers counts
    assert check().actions[0].positions == {"0": 7, "1": 8}
    assert before.actions[0].positions == {"0": 9}  # a view that was returned does not change
    answer("host-b", "succeeded", 11)
    last = check()
    assert last.actions[0].positions == {"0": 7, "1": 8, "2": 11}
    monkeypatch.setattr(action_cache, "load", None)  # nothing is decoded again
    assert sql_stores.decisions.load_view() == last


def test_persistent_copies_are_written_when_new_and_read_again_step_by_step(
    sql_stores, make, check, monkeypatch: pytest.MonkeyPatch
) -> None:
    sql_stores.run_job()
    written, read = [], []
    really_written, really_read = persistent_steps.upsert, persistent_steps._of_step

    def upsert(connection, table, rows, **more) -> None:
        written.extend(rows if table is tables.persistent_copies else ())
        really_written(connection, table, rows, **more)

    def of_step(connection, *key):
        read.append(key)
        return really_read(connection, *key)

    monkeypatch.setattr(persistent_steps, "upsert", upsert)
    now_s = 1010.0

    def tell(host: str, *copies: tuple[int, int, str]) -> None:
        nonlocal now_s
        now_s += 1.0
        listed = tuple(ShardCopy("job", 1, s, rank, Tier.PERSISTENT, "", 10, digest) for s, rank, digest in copies)
        foreign = ShardCopy("job", 7, 9, 0, Tier.PERSISTENT, "", 10, "of a generation that was never granted")
        sql_stores.status.record_reports([(make.report(host, sent_at=now_s, copies=(*listed, foreign)), now_s)])

    tell("host-a", (10, 0, "a"), (10, 1, "b"))
    assert [(c.step, c.rank, c.digest) for c in check().copies] == [(10, 0, "a"), (10, 1, "b")]
    assert len(written) == 2
    tell("host-a", (10, 0, "a"), (10, 1, "b"))
    tell("host-b", (10, 0, "a"))  # it sees the same folder
    assert len(written) == 2
    sql_stores.decisions.load_view()
    monkeypatch.setattr(persistent_steps, "_of_step", of_step)
    sql_stores.decisions.load_view()
    assert read == []
    tell("host-b", (10, 0, "a"), (20, 0, "c"))
    sql_stores.decisions.load_view()
    assert (len(written), read) == (3, [("job", 1, 20)])
    tell("host-b", (20, 0, "d"), (20, 1, "e"))
    assert [(c.step, c.rank, c.digest) for c in check().copies] == [
        (10, 0, "a"),
        (10, 1, "b"),
        (20, 0, "d"),
        (20, 1, "e"),
    ]


def test_a_host_that_was_removed_and_reports_again_is_a_new_one(sql_stores, make, check) -> None:
    sql_stores.status.record_reports([(make.report("host-a"), 1001.0)])
    sql_stores.commit(hosts=(HostChange("host-a", HostState.CORDONED, "for repair"),))
    assert check().hosts[0].state is HostState.CORDONED
    with sql_stores.db.write() as connection:
        connection.execute(delete(tables.host_reports))
        connection.execute(delete(tables.hosts))
    assert check().hosts == ()
    sql_stores.status.record_reports([(make.report("host-a", sent_at=1020.0), 1020.0)])
    assert check().hosts[0].state is HostState.HEALTHY


def test_with_many_hosts_a_view_reads_a_page_and_knows_the_controllers_own_changes(
    sql_stores, make, clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"host-{letter}" for letter in "abcde"]

    def report(at: float, *hosts: str) -> None:
        sql_stores.status.record_reports([(make.report(host, sent_at=at), at) for host in hosts])

    def seen() -> dict[str, float]:
        return {host.host_id: host.stored_report_at for host in sql_stores.decisions.load_view().hosts}

    report(1001.0, *names)
    monkeypatch.setattr(host_cache, "PAGE", 2)
    monkeypatch.setattr(host_cache, "PAGES_BUDGET_S", -1.0)
    assert seen() == dict.fromkeys(names, 1001), "the first view has all"
    report(1002.0, *names, "host-f")
    assert [sorted(seen().values()) for _ in range(3)] == [
        [1001, 1001, 1001, 1002, 1002],
        [1001, 1002, 1002, 1002, 1002],
        [1002] * 6,
    ]
    sql_stores.commit(hosts=(HostChange("host-e", HostState.CORDONED, "for repair"),))
    states = {host.host_id: host.state for host in sql_stores.decisions.load_view().hosts}
    assert states["host-e"] is HostState.CORDONED, "it knows its own changes"

    sql_stores.decisions.release_lease("controller#1")
    other = sql_stores.other_decisions()
    grant = other.acquire_lease("other#1", 1000.0)
    change = Outcome(hosts=(HostChange("host-d", HostState.CORDONED, "by another"),))
    other.commit(epoch=grant.epoch, now=1_002.0, signals=(), cursor=None, outcome=change, first_steps={})
    other.release_lease("other#1")
    sql_stores.lead()
    states = {host.host_id: host.state for host in sql_stores.decisions.load_view().hosts}
    assert states["host-d"] is HostState.CORDONED, "a new leader knows what another did"

    with sql_stores.db.write() as connection:
        connection.execute(delete(tables.host_reports).where(tables.host_reports.c.host_id == "host-b"))
    report(1003.0, *(name for name in names if name != "host-b"))
    clock.now_s += host_cache.MAX_AGE_S + 1.0
    fresh = seen()
    assert list(fresh.items()) == [*((n, 1003) for n in names if n != "host-b"), ("host-f", 1002)]
    assert sql_stores.other_decisions().load_view().hosts == sql_stores.decisions.load_view().hosts


def test_with_very_many_hosts_each_turn_reads_its_share(
    sql_stores, make, clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"host-{number:02}" for number in range(24)]
    looks = 0
    really = host_cache.HostCache._read_page

    def read_page(*arguments) -> bool:
        nonlocal looks
        looks += 1
        return really(*arguments)

    monkeypatch.setattr(host_cache, "PAGE", 2)  # 13 reads until there are no more
    monkeypatch.setattr(host_cache.HostCache, "_read_page", read_page)
    often_s = host_cache.MAX_AGE_S / 6.0
    for number in range(20):
        looks, now = 0, clock.now_s
        sql_stores.status.record_reports([(make.report(host, sent_at=now), now) for host in names])
        seen = [host.stored_report_at for host in sql_stores.decisions.load_view(Focus(frozenset({"job"}))).hosts]
        assert len(seen) == len(names) and min(seen) >= now - host_cache.MAX_AGE_S - often_s
        assert looks == 13 if number == 0 else 0 < looks <= 3
        clock.now_s += often_s / 2.0
        sql_stores.decisions.load_view(Focus())
        assert looks <= (13 if number == 0 else 3), "what is urgent does not wait for it"
        clock.now_s += often_s / 2.0
    clock.now_s += host_cache.MAX_AGE_S
    looks = 0
    sql_stores.decisions.load_view(Focus(frozenset({"job"})))
    assert looks == 13, "none was read for a long time"


def test_a_host_that_joined_since_is_known_when_something_names_it(
    sql_stores, make, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"host-{letter}" for letter in "abcde"]
    sql_stores.status.record_reports([(make.report(host), 1001.0) for host in names])
    monkeypatch.setattr(host_cache, "PAGE", 2)
    monkeypatch.setattr(host_cache, "PAGES_BUDGET_S", -1.0)

    def seen(focus: Focus | None = None) -> list[str]:
        return [host.host_id for host in sql_stores.decisions.load_view(focus).hosts]

    assert seen() == seen() == names, "its page was read before it joined"
    sql_stores.status.record_reports([(make.report("host-aa", sent_at=1002.0), 1002.0)])
    notice = make.signal(1, HostReturned("host-aa", 3.0), source="sensor.1")
    all_names = sorted([*names, "host-aa"])
    assert seen(Focus(signals=(notice,))) == all_names
    assert [seen() for _ in range(6)] == [all_names] * 6
    assert not sql_stores.decisions._views._hosts._expired, "a name that is no host is not read again"


def test_a_report_that_was_under_way_for_long_tells_what_was_when_it_was_sent(sql_stores, make, check) -> None:
    sql_stores.status.record_reports([(make.report("host-a", sent_at=1001.0), 1020.0)])
    sql_stores.status.record_reports([(make.report("host-b", sent_at=1025.0), 1020.0)])  # its clock is ahead
    assert {host.host_id: host.known_at for host in check().hosts} == {"host-a": 1001.0, "host-b": 1020.0}


def test_what_no_transaction_changed_is_not_read_again(sql_stores, make, check) -> None:
    sql_stores.run_job()
    sql_stores.begin_restart()
    statements: list[str] = []
    event.listen(sql_stores.db._reader, "before_cursor_execute", lambda *args: statements.append(args[2]))

    def looked(*, anew: bool) -> int:
        statements.clear()
        focus = Focus(signals=(make.signal(),))
        assert sql_stores.decisions.load_view(focus, anew=anew).jobs
        return len([statement for statement in statements if statement != "BEGIN"])

    whole = looked(anew=True)
    looked(anew=False)
    assert looked(anew=False) <= 5 < 17 <= whole
    rank = RankStatus("job", 1, 0, 100, Phase.STEP, 9, 0.0)
    sql_stores.status.record_reports([(make.report("host-a", sent_at=1010.0, ranks=(rank,)), 1010.0)])
    assert looked(anew=False) <= 6, "reports change the newest step of their job, and nothing else here"
    sql_stores.commit(jobs=(JobChange("job", JobState.RUNNING, "other words"),))
    assert sql_stores.decisions.load_view(anew=False) == check()


def test_hosts_that_could_not_be_read_do_not_count_as_known(
    sql_stores, make, check, monkeypatch: pytest.MonkeyPatch
) -> None:
    sql_stores.status.record_reports([(make.report("host-a", sent_at=1001.0), 1005.0)])

    def cut_off(connection, query, host_ids):
        raise ConnectionError("cut off")

    with monkeypatch.context() as broken:
        broken.setattr(host_cache, "_rows", cut_off)
        with pytest.raises(ConnectionError):
            sql_stores.decisions.load_view()
    assert [(host.host_id, host.stored_report_at) for host in check().hosts] == [("host-a", 1001.0)]


def test_what_no_restore_will_want_is_forgotten_with_later_steps(sql_stores, make, check) -> None:
    stores = sql_stores
    stores.run_job()
    now_s = 1010.0

    def tell(*steps: int, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        nonlocal now_s
        now_s += 1.0
        copies = tuple(
            ShardCopy("job", 1, step, rank, Tier.PERSISTENT, "", 10, "d") for step in steps for rank in ranks
        )
        stores.status.record_reports([(make.report("host-a", sent_at=now_s, copies=copies), now_s)])

    def kept() -> list[int]:
        with stores.db.read() as connection:
            copies = persistent_steps.read(connection, ["job"])
            marked = sorted(connection.scalars(select(tables.persistent_steps.c.step)))
        assert sorted({copy.step for copy in copies}) == marked
        return marked

    def seen() -> list[int]:
        return sorted({copy.step for copy in check().copies})

    tell(10, ranks=(0, 1))
    tell(*range(20, 60, 10))
    assert seen() == [40, 50], "the newest that the job's retention leaves in the store"
    tell(60, ranks=(0, 1, 2))
    assert seen() == [40, 50, 60], "an incomplete step does not count"
    for step in range(70, 200, 10):
        tell(step)
    assert kept() == [30, 40, 50, *range(60, 200, 10)], "sixteen complete ones, and newer ones"
    assert seen() == [180, 190]
    before = kept()
    tell(20, 30)
    assert kept() == before, "an engine that still reports them changes nothing"
    tell(60, ranks=(3,))
    assert seen() == [180, 190]
    tell(200)
    assert kept() == [*range(50, 210, 10)]


def test_very_many_steps_are_forgotten_a_few_at_a_time(sql_stores, make, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = sql_stores
    stores.run_job()
    monkeypatch.setattr(persistent_steps, "KEPT_STEPS", 1000)
    copies = tuple(ShardCopy("job", 1, s, r, Tier.PERSISTENT, "", 10, "d") for s in range(40) for r in range(4))
    stores.status.record_reports([(make.report("host-a", sent_at=1010.0, copies=copies), 1010.0)])
    monkeypatch.undo()
    left = []
    for step in (40, 41, 42, 43):  # as an older release left them
        copies = tuple(ShardCopy("job", 1, step, rank, Tier.PERSISTENT, "", 10, "d") for rank in range(4))
        stores.status.record_reports([(make.report("host-a", sent_at=1011.0 + step, copies=copies), 1011.0)])
        with stores.db.read() as connection:
            left.append(len(connection.scalars(select(tables.persistent_steps.c.step)).all()))
    assert left == [33, 26, 19, 16]


def test_a_focused_view_equals_that_part_of_a_whole_view(sql_stores, make, check) -> None:
    stores = sql_stores
    stores.run_job()
    stores.status.record_reports([(make.report(host), make.T) for host in ("host-c", "host-d")])
    stores.place("other", 1, "host-a", "host-b")
    stores.place("other", 2, "host-c", "host-d")
    stores.status.record_reports([(make.report("host-e", sent_at=1005.0), 1005.0)])
    exit_of_other = make.signal(1, make.exited(job="other"), source="host-c")

    def compare(*expected: str, jobs: tuple[str, ...] = (), signals: tuple[Signal, ...] = ()) -> None:
        view, focus = check(), Focus(frozenset(jobs), signals)
        part = stores.decisions.load_view(focus)
        assert part == focused(view, focus)
        assert [job.spec.job for job in part.jobs] + [host.host_id for host in part.hosts] == list(expected)
        assert check() == view, "the rest is still known"

    compare("host-e")
    compare("job", "host-a", "host-b", "host-e", jobs=("job",))
    compare("other", "host-c", "host-d", "host-e", signals=(exit_of_other,))
    compare("other", "host-c", "host-d", "host-e", signals=(make.signal(2, HostReturned("host-d", 3.0), source="s"),))

    memory = ShardCopy("other", 1, 9, 0, Tier.PEER, "host-a", 10, "ab")
    durable = ShardCopy("other", 1, 9, 0, Tier.PERSISTENT, "", 10, "ab")
    report = make.report("host-a", sent_at=1010.0, copies=(memory, durable))
    stores.status.record_reports([(report, 1010.0)])
    compare("other", "host-a", "host-c", "host-d", "host-e", jobs=("other",))

    SqlDrainStore(stores.db).drain("host-d", DrainRequest(within_s=60.0, reason="fans"), 1011.0)
    compare("other", "host-a", "host-c", "host-d", "host-e")
    SqlDrainStore(stores.db).undrain("host-d", 1012.0)
    with stores.db.write() as connection:
        connection.execute(delete(tables.drains))
    compare("host-e")

    stores.begin_restart()
    compare("job", "host-a", "host-b", "host-e")
    stale = RankStatus("job", 1, 0, 100, Phase.STEP, 9, 0.0)
    stores.commit(decisions=(make.restart(3, generation=2),))
    stores.status.record_reports([(make.report("host-c", sent_at=1013.0, ranks=(stale,)), 1013.0)])
    compare("job", "host-a", "host-b", "host-c", "host-e")
    stores.jobs.request_stop("other", 1014.0)
    compare("job", "other", "host-a", "host-b", "host-c", "host-d", "host-e")


HOSTS = tuple(f"host-{letter}" for letter in "abcdef")
JOBS = ("job", "other")
hosts = st.sampled_from(HOSTS)
jobs = st.sampled_from(JOBS)
focuses = st.builds(
    Focus,
    st.frozensets(jobs),
    st.lists(
        st.builds(
            Signal,
            st.sampled_from([*HOSTS, "sensor.1"]),
            st.just("i"),
            st.just(1),
            st.just(1_000.0),
            st.one_of(
                st.builds(HostReturned, hosts, st.just(3.0)),
                st.builds(RankStalled, jobs, st.just(1), st.just((0,)), st.just(Phase.STEP), *[st.just(1)] * 3),
            ),
        ),
        max_size=1,
    ).map(tuple),
)
changes = st.one_of(
    st.tuples(
        st.just("report"), hosts, jobs, st.integers(1, 3), st.lists(st.tuples(jobs, st.integers(1, 40)), max_size=3)
    ),
    st.tuples(st.just("steady"), hosts),
    st.tuples(st.just("place"), jobs, st.permutations(HOSTS)),
    st.tuples(st.just("state"), hosts, st.sampled_from(list(HostState))),
    st.tuples(st.just("end"), jobs),
    st.tuples(st.just("stop"), jobs),
    st.tuples(st.just("gone"), hosts),
    st.tuples(st.just("drain"), hosts),
    st.tuples(st.just("vouch"), st.sets(hosts)),
    st.tuples(st.just("exit"), hosts, jobs, st.integers(0, 3)),
    st.tuples(st.just("restart")),
    st.tuples(st.just("look"), focuses),
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.lists(changes, max_size=15), st.lists(focuses, min_size=1, max_size=3))
def test_after_any_changes_the_cache_equals_a_fresh_read(new_stores, make, turns, last) -> None:
    stores = new_stores()
    stores.run_job()
    stores.status.record_reports([(make.report(host), make.T) for host in HOSTS])
    stores.place("other", 1, "host-c", "host-d")
    newest = dict.fromkeys(JOBS, 1)
    restarts = 0
    last_reports = {}
    for number, (kind, *values) in enumerate(turns, 1):
        now = make.T + number
        match kind, *values:
            case "report", host, job, generation, held:
                rank = RankStatus(job, generation, HOSTS.index(host), 100, Phase.STEP, number, 0.0)
                tiers = (Tier.MEMORY, Tier.PERSISTENT)
                copies = tuple(
                    ShardCopy(of, 1, step, 0, tier, "" if tier is Tier.PERSISTENT else host, 1, "d")
                    for of, step in held
                    for tier in tiers
                )
                last_reports[host] = make.report(host, sent_at=now, ranks=(rank,), copies=copies)
                stores.status.record_reports([(last_reports[host], now)])
            case "steady", host:
                before = last_reports.get(host) or make.report(host)
                steps = tuple(msgspec.structs.replace(one, steps=(number,)) for one in before.progress)
                report = msgspec.structs.replace(before, sent_at=now, progress=steps)
                stores.status.record_steady([(report, now)])
            case "place", job, order:
                newest[job] += 1
                stores.place(job, newest[job], *order[:2])
            case "state", host, state:
                stores.commit(hosts=(HostChange(host, state, f"change {number}"),))
            case "end", job:
                stores.commit(jobs=(JobChange(job, JobState.SUCCEEDED, "done"),))
            case "stop", job:
                stores.jobs.request_stop(job, now)
            case "gone", host:
                with stores.db.write() as connection:
                    for table in (tables.host_reports, tables.hosts):
                        connection.execute(delete(table).where(table.c.host_id == host))
            case "drain", host:
                with suppress(FlyballError):  # on a host that is gone, or silent
                    SqlDrainStore(stores.db).drain(host, DrainRequest(within_s=60.0), now)
            case "vouch", hosts:
                stores.status.vouch(sensor="s", at=now, ages_ms=[number] * len(hosts), hosts=sorted(hosts))
            case "exit", host, job, rank:
                body = make.exited(rank, job=job, generation=newest[job])
                stores.commit(signals=(make.signal(number, body, source=host, incarnation=host),))
            case ("restart",):
                if not restarts and newest["job"] == 1:
                    stores.begin_restart()
                    newest["job"], restarts = 2, 1
            case "look", focus:
                stores.decisions.load_view(focus, anew=number % 3 == 0)
    anew = stores.other_decisions().load_view()
    assert stores.decisions.load_view(anew=False) == anew
    assert stores.decisions.load_view() == anew
    for focus in last:
        assert stores.decisions.load_view(focus) == focused(anew, focus)
        assert stores.other_decisions().load_view(focus) == focused(anew, focus)
    assert stores.decisions.load_view() == anew


def test_recent_losses_of_hosts_are_known_to_every_controller(stores, make, clock) -> None:
    stores.run_job()
    stores.commit(incidents=(make.incident(1, "resolved", host_id="host-b", cause="host_silent"),))
    stores.commit(incidents=(make.incident(2, "acting", host_id="host-b", cause="host_silent"),))

    def losses(decisions) -> dict[str, int]:
        return {host.host_id: host.recent_losses for host in decisions.load_view().hosts}

    assert losses(stores.decisions) == losses(stores.other_decisions()) == {"host-a": 0, "host-b": 2}
    clock.now_s += 3601.0
    assert losses(stores.decisions) == losses(stores.other_decisions()) == {"host-a": 0, "host-b": 0}
