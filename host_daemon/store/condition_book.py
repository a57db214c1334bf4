"""The conditions that stand on this host, as they were last reported. They survive kill -9, like their signals."""

from __future__ import annotations

import json
from collections.abc import Iterable

import msgspec
import structlog

from flyball.contracts.reports.conditions import ConditionKey, HostCondition, Severity
from flyball.contracts.reports.signals import ConditionBegan, ConditionEnded, ConditionsStand
from flyball.contracts.wire import MALFORMED, decoder_of
from host_daemon.store.database import Work
from host_daemon.store.facts import Facts
from host_daemon.store.outbox import SignalOutbox

_FACT = "conditions"  # JSON: all of them
_TOLD_FACT = "conditions_told"  # JSON: the sources of which a database that asked was told what stands

_log = structlog.get_logger(__name__)


def what_stands(sources: Iterable[str], standing: Iterable[ConditionKey], boot: str = "") -> ConditionsStand:
    """What a host says of these sources. `boot`: of its kernel. Pure."""
    said = tuple(sources)
    return ConditionsStand(said, tuple(sorted(key for key in standing if key[0] in said)), boot)


class ConditionBook:
    """Call `load` first."""

    def __init__(self, facts: Facts, outbox: SignalOutbox) -> None:
        self._facts = facts
        self._outbox = outbox
        self.standing: dict[ConditionKey, HostCondition] = {}
        self._had_any = False  # since there is this state folder
        self._looked: set[str] = set()  # the sources of which it is known what stands
        self._told: set[str] | None = None  # those of which the database was told; None: it need not be told
        self.boot = ""  # of the kernel; '' if unknown

    async def load(self) -> None:
        """Continue where an earlier daemon of this folder stopped."""
        text = await self._facts.get(_FACT)
        try:
            found = decoder_of(tuple[HostCondition, ...]).decode(text or "[]")
        except MALFORMED as error:  # of a newer release
            _log.error("conditions_not_known", error=str(error))
            found = ()
        self.standing = {condition.key: condition for condition in found}
        self._had_any = text is not None
        told = await self._facts.get(_TOLD_FACT)
        self._told = set(json.loads(told)) if told is not None else None

    async def begin(self, condition: HostCondition) -> None:
        """Record a condition that begins or changes, with its signal."""
        self.standing[condition.key] = condition
        self._had_any = True
        _log.warning(
            "condition_began",
            kind=condition.kind,
            severity=condition.severity.value,
            source=condition.source,
            message=condition.message,
        )
        await self._outbox.put(ConditionBegan(condition), also=self._noted())

    async def end(self, condition: HostCondition) -> None:
        """Record the end of a condition, with its signal."""
        self.standing.pop(condition.key, None)
        _log.info("condition_ended", kind=condition.kind, source=condition.source, subject=condition.subject)
        source, kind, subject = condition.key
        await self._outbox.put(ConditionEnded(source, kind, subject), also=self._noted())
        self._outbox.repeat(lambda body: isinstance(body, ConditionBegan) and body.condition.key == condition.key)

    async def note(self, source: str, kind: str, message: str, now: float) -> bool:
        """Have it on record for as long as there is a message. Returns whether that changed anything. Raises
        FlyballError when the disk is full."""
        condition = HostCondition(kind, Severity.INFO, message[:2_000] or "It is over.", source, now)
        standing = self.standing.get(condition.key)
        if message and standing is None:
            await self.begin(condition)
        elif not message and standing is not None:
            await self.end(standing)
        else:
            return False
        return True

    async def forget(self, keys: Iterable[ConditionKey]) -> None:
        """Drop conditions that ended by themselves: the supervisor knows when."""
        for key in keys:
            self.standing.pop(key, None)
        await self._facts.set(_FACT, self._text())

    async def looked(self, sources: Iterable[str]) -> None:
        """A daemon has read these sources for the first time: now it is known what stands of them."""
        self._looked.update(sources)
        await self._say_what_stands()

    async def say_again(self, *, is_new_folder: bool) -> None:
        """Signal all that stand: another database may not know them. And that no others do: it may know some of which
        the end was lost with a newer copy of the database, or with an older state folder of this host. Raises
        FlyballError when the disk is full."""
        if is_new_folder or self._had_any:
            await self._facts.set(_TOLD_FACT, "[]")
            self._told = set()
        for condition in list(self.standing.values()):
            await self._outbox.put(ConditionBegan(condition))
        await self._say_what_stands()

    async def _say_what_stands(self) -> None:
        """Of the sources that were read, and of which the database was not told. The others are owed: to a later
        reading, if need be of a later daemon."""
        sources = sorted(self._looked - self._told) if self._told is not None else []
        if self._told is not None and sources:
            self._told.update(sources)
            noted = self._facts.setting(_TOLD_FACT, json.dumps(sorted(self._told)))
            await self._outbox.put(what_stands(sources, self.standing, self.boot), also=noted)

    def _text(self) -> str:
        return msgspec.json.encode(tuple(self.standing.values())).decode()

    def _noted(self) -> Work:
        return self._facts.setting(_FACT, self._text())
