"""One generation's restore on one host: what the trainers read in the control words, and what the daemon reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.host.context import Services
from ckpt_engine.peers.fetch import Fetched, Fetcher
from ckpt_engine.slots.control_segment import ControlSegment
from ckpt_engine.slots.control_views import RestoreAnswer, RestoreState, RestoreWords
from ckpt_engine.tiers.memory import MemoryTier, OpenSegments
from ckpt_engine.tiers.peer import PeerTier
from ckpt_engine.tiers.shard_store import ShardStore
from flyball.contracts.checkpoints import RestorePlan, RestoreReport, Tier
from flyball.contracts.errors import FlyballError, StaleCommand

log = structlog.get_logger()

_OFFER_S = 0.05  # a trainer that waits is there within milliseconds; one that has yet to be started takes seconds
_ANSWER_POLL_S = 0.002
_MAX_FETCHES = 4  # as often is brought what the trainer refuses


class Restoring:
    """`announce` each local rank when the generation begins, then `run` it, in any thread."""

    def __init__(
        self,
        generation: HostGeneration,
        plan: RestorePlan,
        *,
        memory: MemoryTier,
        replicas: PeerTier,
        disks: Mapping[Tier, ShardStore],
        services: Services,
        on_report: Callable[[RestoreReport], None],
    ) -> None:
        self._generation = generation
        self._plan = plan
        self._memory = memory
        self._services = services
        self._on_report = on_report
        self._fetches = 0
        self._fetcher = Fetcher(
            generation,
            plan,
            memory=memory,
            replicas=replicas,
            disks=disks,
            dial=services.dial,
            settings=services.settings,
            counters=services.counters,
        )

    def announce(self, rank: int) -> None:
        """Say in the control words that the rank's bytes are on their way, unless they were already brought."""
        with self._memory.using(rank, create=True) as entry:
            if entry is not None and entry.segments.control.read_restore().generation != self._generation.number:
                entry.segments.control.write_restore(self._words(RestoreState.PENDING))

    def run(self, entry: OpenSegments) -> bool:
        """Bring the rank's bytes into a local slot, or have the trainer read them, or say why they cannot be had. Call
        it again until it returns True: the trainer may refuse what it got."""
        control = entry.segments.control
        words, answer = control.read_restore(), control.restore_answer(self._generation.number)
        is_settled = words.generation == self._generation.number and words.state is not RestoreState.PENDING
        if answer is RestoreAnswer.DONE or (is_settled and words.state is RestoreState.FAILED):
            return True
        if is_settled and words.state is RestoreState.READY and answer is not RestoreAnswer.REFUSED:
            return False  # brought, by this engine or its predecessor
        if self._fetches == _MAX_FETCHES:
            error = f"The trainer refused what was brought {self._fetches} times: the memory of this host is not sound."
            control.write_restore(self._words(RestoreState.FAILED, error=error))
            return True
        self._fetches += 1
        return self._bring_and_tell(entry)

    def _bring_and_tell(self, entry: OpenSegments) -> bool:
        control, began_s = entry.segments.control, self._services.clock.monotonic_s()
        try:
            fetched = self._bring(entry)
        except StaleCommand as error:
            log.info("restore_superseded", job=self._generation.job, rank=entry.rank, reason=error.message)
            return True
        except (FlyballError, OSError) as error:
            self._services.counters.add("restores_failed")
            log.error("restore_failed", job=self._generation.job, rank=entry.rank, reason=str(error))
            control.write_restore(self._words(RestoreState.FAILED, error=str(error)))
            return True
        control.write_restore(self._words(RestoreState.READY, fetched=fetched))
        self._report(entry.rank, fetched, self._services.clock.monotonic_s() - began_s)
        return not fetched.in_slot

    def _bring(self, entry: OpenSegments) -> Fetched:
        reasons: list[str] = []
        fetched = self._fetcher.local_slot(entry, reasons)
        if fetched is None and (file := self._fetcher.local_file(entry.rank)) is not None:
            fetched = self._let_trainer_read(entry.segments.control, file)
        return fetched or self._fetcher.fetch(entry, reasons)

    def _let_trainer_read(self, control: ControlSegment, file: Fetched) -> Fetched | None:
        """Offer the file to a trainer that is waiting: it need not wait for a slot to be made and filled. None if there
        is none yet, or it could not read the file: then the slot is filled, in time for when it comes."""
        control.write_restore(self._words(RestoreState.FILE, fetched=file))
        asked = self._await_answer(control, _OFFER_S, until=RestoreAnswer.READING_FILE)
        if asked is RestoreAnswer.NONE and control.withdraw_file(self._words(RestoreState.PENDING)):
            return None
        timeout_s = self._generation.configure.spec.restore_timeout_s
        answer = self._await_answer(control, timeout_s, until=RestoreAnswer.DONE)
        control.write_restore(self._words(RestoreState.PENDING))
        return file if answer is RestoreAnswer.DONE else None

    def _await_answer(self, control: ControlSegment, timeout_s: float, *, until: RestoreAnswer) -> RestoreAnswer:
        """What the trainer says, as soon as it is `until` or REFUSED, or it has gone back, or the time is over. Raises
        StaleCommand."""
        deadline_s = self._services.clock.monotonic_s() + timeout_s
        while True:
            answer = control.restore_answer(self._generation.number)
            waiting = RestoreAnswer.NONE if until is RestoreAnswer.READING_FILE else RestoreAnswer.READING_FILE
            if answer is not waiting or self._services.clock.monotonic_s() >= deadline_s:
                return answer
            if self._generation.ended.wait(_ANSWER_POLL_S):
                raise StaleCommand("The restore was given up: a newer generation began.")

    def _report(self, rank: int, fetched: Fetched, seconds: float) -> None:
        self._services.counters.add("restores")
        report = RestoreReport(
            job=self._generation.job,
            generation=self._generation.number,
            rank=rank,
            step=self._plan.step,
            source_tier=fetched.tier,
            source_host=fetched.host_id,
            size_bytes=fetched.size_bytes,
            socket_bytes=fetched.socket_bytes,
            seconds=seconds,
            at=self._services.clock.wall_s(),
        )
        self._on_report(report)
        log.info(
            "restore_ready",
            job=report.job,
            rank=report.rank,
            step=report.step,
            tier=str(report.source_tier),
            source_host=report.source_host,
            by_trainer=not fetched.in_slot,
            socket_bytes=report.socket_bytes,
            seconds=round(report.seconds, 6),
        )

    def _words(self, state: RestoreState, *, fetched: Fetched | None = None, error: str = "") -> RestoreWords:
        return RestoreWords(
            generation=self._generation.number,
            state=state,
            step=self._plan.step,
            slot=fetched.slot if fetched else -1,
            tier=fetched.tier if fetched else Tier.MEMORY,
            socket_bytes=fetched.socket_bytes if fetched else 0,
            error=error,
            path=fetched.path if fetched else "",
        )
