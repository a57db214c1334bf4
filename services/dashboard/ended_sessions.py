"""Logging out ends a session at every server: it goes on record in the audit log, which all of them follow."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import msgspec
import structlog

from flyball.contracts.clock import Clock
from services.record.audit_records import OPERATOR, Attempt, Begun
from services.runtime.http.auth import MAX_ENDED, SESSION_S, Authenticator, Principal, session_digest
from services.runtime.list_filters import AuditFilter
from services.runtime.outages import OUTAGES
from services.runtime.paging import Page
from services.runtime.wakeup import AsyncWakeup

LOG_OUT = "logOut"
FOLLOW_S = 5.0  # a session ends at the other servers within this time
OVERLAP_S = 60.0  # a record may be stored this long after its moment
_PAGE = 1_000

log = structlog.get_logger()


class LogoutRecords(Protocol):
    """See `services.record.audit_records`."""

    def begin(self, attempt: Attempt) -> Begun: ...

    def end(self, number: int, status: int, code: str, answer: bytes | None) -> None: ...

    def entries(self, page: Page, wanted: AuditFilter) -> list[dict[str, Any]]: ...


class EndedSessions:
    """Those that were logged out and are not too old anyway. The `Authenticator` keeps the newest of them."""

    def __init__(self, audit: LogoutRecords, authenticator: Authenticator, clock: Clock) -> None:
        self._audit = audit
        self._authenticator = authenticator
        self._clock = clock
        self._read_at = 0.0  # wall clock: everything before is known, but for what was stored late

    def end(self, principal: Principal, client: str) -> None:
        """Blocks. Without a database the session ends at this server alone, until it is started again."""
        digest = session_digest(principal.session)
        self._authenticator.end_session(digest)
        detail = msgspec.json.encode({OPERATOR: principal.name} if principal.name else {}).decode()
        attempt = Attempt(principal.role.value, digest, client[:64], LOG_OUT, "", detail, key="", digest="")
        try:
            self._audit.end(self._audit.begin(attempt).number, 303, "", None)
        except OUTAGES as error:
            log.warning("logout_not_recorded", error=str(error))

    def recall(self) -> None:
        """Learn from the audit log what was logged out anywhere since the last time. Blocks; raises what reading it
        does."""
        now = self._clock.wall_s()
        wanted, before = AuditFilter(LOG_OUT, since=max(now - SESSION_S, self._read_at - OVERLAP_S)), ""
        digests: list[str] = []
        while len(digests) < MAX_ENDED:
            page = self._audit.entries(Page(_PAGE, before), wanted)
            digests += [entry["token"] for entry in reversed(page)]
            if len(page) < _PAGE:
                break
            before = page[0]["audit_id"]
        for digest in reversed(digests):
            self._authenticator.end_session(digest)
        self._read_at = now

    async def follow(self, _new_events: AsyncWakeup) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            try:
                await asyncio.to_thread(self.recall)
            except OUTAGES as error:
                log.warning("logouts_not_read", error=str(error))
