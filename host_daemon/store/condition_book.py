"""The conditions that stand on this host, as they were last reported. They survive kill -9, like their signals."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec
import structlog

from flyball.contracts.reports.conditions import ConditionKey, HostCondition
from flyball.contracts.reports.signals import ConditionBegan, ConditionEnded, ConditionsStand
from flyball.contracts.wire import MALFORMED, decoder_of
from host_daemon.store.database import Work
from host_daemon.store.facts import Facts
from host_daemon.store.outbox import SignalOutbox

_FACT = "conditions"  # JSON: all of them

_log = structlog.get_logger(__name__)


class ConditionBook:
    """Call `load` first."""

    def __init__(self, facts: Facts, outbox: SignalOutbox) -> None:
        self._facts = facts
        self._outbox = outbox
        self.standing: dict[ConditionKey, HostCondition] = {}
        self._had_any = False  # since there is this state folder
        self._looked: list[str] = []  # the sources of which it is known what stands
        self._is_asked = False

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

    async def forget(self, keys: Iterable[ConditionKey]) -> None:
        """Drop conditions that ended by themselves: the supervisor knows when."""
        for key in keys:
            self.standing.pop(key, None)
        await self._facts.set(_FACT, self._text())

    async def looked(self, sources: Iterable[str]) -> None:
        """A daemon has read these sources for the first time: now it is known what stands of them."""
        fresh = [source for source in sources if source not in self._looked]
        self._looked += fresh
        if self._is_asked:
            await self._say_what_stands(fresh)

    async def say_again(self, *, is_new_folder: bool) -> None:
        """Signal all that stand: another database may not know them. And that no others do: it may know some of which
        the end was lost with a newer copy of the database, or with an older state folder of this host."""
        for condition in list(self.standing.values()):
            await self._outbox.put(ConditionBegan(condition))
        self._is_asked = self._is_asked or is_new_folder or self._had_any
        if self._is_asked:
            await self._say_what_stands(self._looked)

    async def _say_what_stands(self, sources: Collection[str]) -> None:
        if sources:
            keys = sorted(key for key in self.standing if key[0] in sources)
            await self._outbox.put(ConditionsStand(tuple(sources), tuple(keys)))

    def _text(self) -> str:
        return msgspec.json.encode(tuple(self.standing.values())).decode()

    def _noted(self) -> Work:
        return self._facts.setting(_FACT, self._text())
