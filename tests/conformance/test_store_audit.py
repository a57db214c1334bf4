"""Who did what, repeated keys, and requests that are only tried."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from sqlalchemy import func, select
from support.stores.job_stores import SEALS

from flyball.contracts.cluster import JobSpec
from flyball.contracts.errors import Conflict, NotFound, Unreachable
from flyball.contracts.reports.conditions import HostCondition, Severity
from flyball.contracts.reports.drains import DrainRequest
from flyball.contracts.reports.signals import ConditionBegan, ConditionEnded, PreemptionNotice
from services.controller.round.view import PolicySettings
from services.dashboard.ended_sessions import FOLLOW_S, OVERLAP_S, EndedSessions
from services.record.audit_records import IN_PROGRESS_S, KEY_KEPT_S, Answer, Attempt
from services.record.retention_rules import DAY_S, RetentionSettings
from services.rehearsing import Rehearsals
from services.runtime.http.auth import Authenticator, Principal, Role
from services.runtime.list_filters import AuditFilter
from services.runtime.paging import Page
from services.store.decisions.audit_store import SqlAuditLog
from services.store.retention.sweep import Sweeper
from services.store.sql import tables
from services.store.sql.database import Database

DRAIN = Attempt("operator", "3f9a01c2", "10.0.0.5", "drainHost", "host-a", '{"reason":"fans"}', "key-1", "digest")
ALL = (Page(), AuditFilter())


@pytest.fixture
def audit(db: Database, clock) -> SqlAuditLog:
    return SqlAuditLog(db, clock)


def test_a_request_is_on_record_before_and_after(audit: SqlAuditLog, clock) -> None:
    begun = audit.begin(msgspec.structs.replace(DRAIN, key=""))
    (entry,) = audit.entries(*ALL)
    assert (entry["status"], entry["ended_at"], entry["operation"]) == (0, None, "drainHost")
    assert entry["detail"] == {"reason": "fans"}
    clock.now_s += 1.0
    audit.end(begun.number, 404, "not_found", None)
    (entry,) = audit.entries(*ALL)
    assert (entry["status"], entry["code"], entry["ended_at"] - entry["at"]) == (404, "not_found", 1.0)
    assert audit.entries(Page(before=entry["audit_id"]), AuditFilter()) == []
    assert audit.entries(Page(), AuditFilter(operation="drainHost", target="host-a", since=entry["at"])) == [entry]
    for other in (AuditFilter(operation="stopJob"), AuditFilter(target="host-b"), AuditFilter(since=entry["at"] + 1)):
        assert audit.entries(Page(), other) == []


def test_a_repeated_key_gets_the_first_answer(audit: SqlAuditLog, clock) -> None:
    first = audit.begin(DRAIN)
    with pytest.raises(Conflict, match="in progress"):
        audit.begin(DRAIN)
    audit.end(first.number, 202, "", b'{"a":1}')
    assert audit.begin(DRAIN).answer == Answer(202, b'{"a":1}')
    with pytest.raises(Conflict, match="another request"):
        audit.begin(msgspec.structs.replace(DRAIN, digest="other"))
    assert len(audit.entries(*ALL)) == 1, "repetitions do nothing"
    clock.now_s += KEY_KEPT_S + 1.0
    assert audit.begin(DRAIN).answer is None


def test_a_key_can_be_used_again_after_an_error_or_a_crash(audit: SqlAuditLog, clock) -> None:
    audit.end(audit.begin(DRAIN).number, 409, "conflict", None)
    crashed = audit.begin(DRAIN)
    clock.now_s += IN_PROGRESS_S + 1.0
    second = audit.begin(DRAIN)
    assert second.answer is None
    audit.end(crashed.number, 202, "", b'"late"')
    with pytest.raises(Conflict, match="in progress"):
        audit.begin(DRAIN)
    audit.end(second.number, 202, "", b'"second"')
    assert audit.begin(DRAIN).answer == Answer(202, b'"second"')


def test_of_many_requests_at_once_with_one_key_one_is_carried_out(audit: SqlAuditLog) -> None:
    def attempt(_number: int) -> int:
        try:
            return audit.begin(DRAIN).number
        except Conflict:
            return 0

    with ThreadPoolExecutor(8) as pool:
        found = sorted(pool.map(attempt, range(8)))
    assert found[:-1] == [0] * 7 and found[-1] > 0


def test_records_go_by_age(audit: SqlAuditLog, db: Database, clock) -> None:
    audit.end(audit.begin(DRAIN).number, 202, "", b"{}")
    sweeper = Sweeper(db, RetentionSettings(), clock, "controller#1")

    def left(now: float) -> tuple[int, int]:
        assert sum(sweeper.sweep(now)) >= 0
        with db.read() as connection:
            counts = [select(func.count()).select_from(t) for t in (tables.audit_entries, tables.idempotency_keys)]
            return tuple(int(connection.scalar(one)) for one in counts)  # type: ignore[return-value]

    now = clock.wall_s()
    assert left(now + KEY_KEPT_S - 1.0) == (1, 1)
    assert left(now + KEY_KEPT_S + 1.0) == (1, 0)
    assert left(now + 365 * DAY_S + 1.0) == (0, 0)


def test_what_is_only_tried_changes_nothing(stores, clock) -> None:
    stores.run_job()
    rehearsals = Rehearsals(stores.db, PolicySettings(), clock, SEALS)

    def everything() -> dict[str, list[object]]:
        with stores.db.read() as connection:
            return {t.name: list(connection.execute(select(t)).all()) for t in tables.metadata.sorted_tables}

    before, now = everything(), clock.wall_s()

    def submit(on) -> bool:  # type: ignore[no-untyped-def]
        return on.jobs.submit(JobSpec("other", ("x",), "/"), now, ended_at=None, run="", adopted=())

    def drain(on) -> str:  # type: ignore[no-untyped-def]
        on.drains.drain("host-a", DrainRequest(60.0, "fans"), now)
        return on.reads.host("host-a")["drain"]["state"]

    def stop(on) -> bool:  # type: ignore[no-untyped-def]
        on.jobs.request_stop("job", now)
        return on.reads.job("job")["stop_requested"]

    assert rehearsals.run(submit)[0] is True
    state, decisions = rehearsals.run(drain)
    assert state == "requested"
    assert decisions and decisions[0]["reason"] and decisions[0]["job"] == "job"
    stopped, decisions = rehearsals.run(stop)
    assert stopped is True
    assert "stop_job" in [one["kind"] for one in decisions]
    with pytest.raises(NotFound):
        rehearsals.run(lambda on: on.drains.drain("none", DrainRequest(), now))
    assert everything() == before


def test_what_hosts_say_of_themselves_is_on_record_with_the_host(stores, make) -> None:
    hot = HostCondition("hot", Severity.CRITICAL, "It is hot.", "probe gpus", make.T)
    bodies = (PreemptionNotice(make.T + 60.0, "cloud"), ConditionBegan(hot), ConditionEnded("probe gpus", "hot"))
    signals = [make.signal(seq, body) for seq, body in enumerate((*bodies, make.exited()), 1)]
    stores.commit(signals=tuple(signals))
    entries = SqlAuditLog(stores.db, stores.clock).entries(*ALL)
    assert [(e["operation"], e["target"], e["role"], e["status"]) for e in entries] == [
        ("report_preemption_notice", "host-a", "daemon", 200),
        ("report_condition_began", "host-a", "daemon", 200),
        ("report_condition_ended", "host-a", "daemon", 200),
    ]
    assert entries[1]["detail"] == {"kind": "hot", "severity": "critical", "subject": ""}


class Counted(SqlAuditLog):
    """Notes how many records each look reads, and can be away."""

    def __init__(self, db: Database, clock) -> None:
        super().__init__(db, clock)
        self.read: list[int] = []
        self.is_away = False

    def entries(self, page: Page, wanted: AuditFilter) -> list[dict[str, Any]]:
        if self.is_away:
            raise Unreachable("It is away.")
        found = super().entries(page, wanted)
        self.read.append(len(found))
        return found


def test_each_look_for_logouts_reads_what_is_new(db: Database, clock) -> None:
    """Every server looks each five seconds, and a login lasts half a day."""
    clock.sleep(1e6)
    mine, other = Authenticator("the secret of a cluster", clock=clock), Authenticator("another", clock=clock)
    log = Counted(db, clock)
    elsewhere, here = EndedSessions(log, other, clock), EndedSessions(log, mine, clock)
    cookies = {number: mine.new_session().cookie for number in range(4)}

    def log_out(number: int) -> None:
        elsewhere.end(Principal(Role.OPERATOR, session=cookies[number].rpartition(".")[0]), "::1")

    def known() -> list[int]:
        headers = {n: [(b"cookie", f"{mine.cookie_name}={cookie}".encode())] for n, cookie in cookies.items()}
        return [number for number, sent in headers.items() if mine.principal(sent) is None]

    log_out(0)
    clock.sleep(3600.0)
    here.recall()
    assert (log.read, known()) == ([1], [0])
    log_out(1)
    clock.sleep(FOLLOW_S)
    here.recall()
    assert (log.read[1:], known()) == ([1], [0, 1]), "what is known is not read again"
    clock.sleep(OVERLAP_S)
    log_out(2)
    log.is_away = True
    for _ in range(3):
        clock.sleep(OVERLAP_S)
        with pytest.raises(Unreachable):
            here.recall()
    log.is_away = False
    here.recall()
    assert known() == [0, 1, 2], "nothing is missed after an outage"
    clock.sleep(2 * OVERLAP_S)
    here.recall()
    assert log.read[-1] == 0 and known() == [0, 1, 2], "and what was learned is kept"
