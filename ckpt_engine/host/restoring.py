"""One generation's restore on one host: what trainers read in the control words, and what the daemon reports."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from math import inf, nextafter

import msgspec
import structlog

from ckpt_engine.contracts.control_views import RestoreAnswer, RestoreState, RestoreWords
from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.counters import Counters
from ckpt_engine.peers.fetch import Fetched, Fetcher
from ckpt_engine.slots.control_segment import ControlSegment
from ckpt_engine.tiers.memory import MemoryTier, OpenSegments
from flyball.contracts.checkpoints import RestorePlan, RestoreReport, Tier
from flyball.contracts.clock import Clock
from flyball.contracts.errors import FlyballError, StaleCommand

log = structlog.get_logger()

_OFFER_S = 0.05  # a waiting trainer answers within milliseconds; one that is still starting takes seconds
_ANSWER_POLL_S = 0.002
_MAX_FETCHES = 4  # per rank, if the trainer refuses what it gets
_MAX_REPORTS = 256


class RestoreLog:
    """The newest restores of this engine. Thread-safe.

    Each report has a later time than the one before, even if ranks finish at once or the clock is set back. So a reader
    that asks for everything since its last report misses none.
    """

    def __init__(self) -> None:
        self._reports: deque[RestoreReport] = deque(maxlen=_MAX_REPORTS)
        self._lock = threading.Lock()

    def add(self, report: RestoreReport) -> None:
        with self._lock:
            if self._reports and report.at <= self._reports[-1].at:
                report = msgspec.structs.replace(report, at=nextafter(self._reports[-1].at, inf))
            self._reports.append(report)

    def since(self, at: float) -> tuple[RestoreReport, ...]:
        """Restores whose bytes were verified after this wall time."""
        with self._lock:
            return tuple(report for report in self._reports if report.at > at)


class Restoring:
    """Call `announce` for each local rank when the generation begins, then `run`, in any thread."""

    def __init__(
        self,
        generation: HostGeneration,
        plan: RestorePlan,
        *,
        memory: MemoryTier,
        fetcher: Fetcher,
        clock: Clock,
        counters: Counters,
        on_report: Callable[[RestoreReport], None],
        reshard: Callable[[OpenSegments], bool],
    ) -> None:
        """`reshard` does it instead of `run` for a rank that needs the shards of all ranks: because another number of
        them saved the step, or because its state has another layout."""
        self._generation = generation
        self._plan = plan
        self._memory = memory
        self._fetcher = fetcher
        self._clock = clock
        self._counters = counters
        self._on_report = on_report
        self._reshard = reshard
        self._saved_by_others = generation.restored_world_size != generation.placement.world_size
        self._fetches = 0

    def announce(self, rank: int) -> None:
        """Write to the control words that the rank's bytes are on their way, unless an engine has brought them."""
        with self._memory.using(rank, create=True) as entry:
            if entry is not None and entry.segments.control.read_restore().generation != self._generation.number:
                entry.segments.control.write_restore(self._words(RestoreState.PENDING))

    def run(self, entry: OpenSegments) -> bool:
        """Bring the rank's bytes into a local slot, or let the trainer read a file, or write why neither is possible.
        Call again until it returns True: the trainer may refuse what it got, or restore once more in another layout."""
        control = entry.segments.control
        if self._needs_all_shards(control):
            return self._reshard(entry)
        words, answer = control.read_restore(), control.restore_answer(self._generation.number)
        is_settled = words.generation == self._generation.number and words.state is not RestoreState.PENDING
        if is_settled and words.state is RestoreState.FAILED:
            return True
        is_ready = is_settled and words.state is RestoreState.READY  # by this engine or its predecessor
        if answer is RestoreAnswer.DONE or (is_ready and answer is not RestoreAnswer.REFUSED):
            return False
        if self._fetches == _MAX_FETCHES:
            error = f"The trainer refused the restored bytes {self._fetches} times: this host's memory is faulty."
            control.write_restore(self._words(RestoreState.FAILED, error=error))
            return True
        self._fetches += 1
        return self._bring_and_announce(entry)

    def _needs_all_shards(self, control: ControlSegment) -> bool:
        return self._saved_by_others or control.asks_for_layout(self._generation.number)

    def _bring_and_announce(self, entry: OpenSegments) -> bool:
        control, began_s = entry.segments.control, self._clock.monotonic_s()
        try:
            fetched = self._bring(entry)
        except StaleCommand as error:
            log.info("restore_superseded", job=self._generation.job, rank=entry.rank, reason=error.message)
            return True
        except (FlyballError, OSError) as error:
            self._counters.add("restores_failed")
            log.error("restore_failed", job=self._generation.job, rank=entry.rank, reason=str(error))
            control.write_restore(self._words(RestoreState.FAILED, error=str(error)))
            return True
        if fetched is None:
            return False
        control.write_restore(self._words(RestoreState.READY, fetched=fetched))
        self._report(entry.rank, fetched, self._clock.monotonic_s() - began_s)
        return False

    def _bring(self, entry: OpenSegments) -> Fetched | None:
        """None if the trainer has found that it needs other shards."""
        reasons: list[str] = []
        fetched = self._fetcher.local_slot(entry, reasons)
        if fetched is None and (file := self._fetcher.local_file(entry.rank)) is not None:
            fetched = self._let_trainer_read(entry.segments.control, file)
        if fetched is None and self._needs_all_shards(entry.segments.control):
            return None
        return fetched or self._fetcher.fetch(entry, reasons)

    def _let_trainer_read(self, control: ControlSegment, file: Fetched) -> Fetched | None:
        """Offer the file to a waiting trainer, which then need not wait for a slot to be filled. None if no trainer is
        there yet, or it could not read the file: then a slot is filled for it."""
        control.write_restore(self._words(RestoreState.FILE, fetched=file))
        asked = self._await_answer(control, _OFFER_S, until=RestoreAnswer.READING_FILE)
        if asked is RestoreAnswer.NONE and control.withdraw_file(self._words(RestoreState.PENDING)):
            return None
        timeout_s = self._generation.configure.spec.restore_timeout_s
        answer = self._await_answer(control, timeout_s, until=RestoreAnswer.DONE)
        control.write_restore(self._words(RestoreState.PENDING))
        return file if answer is RestoreAnswer.DONE else None

    def _await_answer(self, control: ControlSegment, timeout_s: float, *, until: RestoreAnswer) -> RestoreAnswer:
        """The trainer's answer: as soon as it is `until` or REFUSED, or was taken back, or at the timeout. Raises
        StaleCommand."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        while True:
            answer = control.restore_answer(self._generation.number)
            waiting = RestoreAnswer.NONE if until is RestoreAnswer.READING_FILE else RestoreAnswer.READING_FILE
            if answer is not waiting or self._clock.monotonic_s() >= deadline_s:
                return answer
            if self._generation.ended.wait(_ANSWER_POLL_S):
                raise StaleCommand("The restore was given up: a newer generation began.")

    def _report(self, rank: int, fetched: Fetched, seconds: float) -> None:
        self._counters.add("restores")
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
            at=self._clock.wall_s(),
            transport=fetched.transport,
            tier_bytes=fetched.tier_bytes,
        )
        self._on_report(report)
        log.info(
            "restore_ready",
            job=report.job,
            rank=report.rank,
            step=report.step,
            tier=str(report.source_tier),
            source_host=report.source_host,
            transport=report.transport,
            tier_bytes={str(tier): size_bytes for tier, size_bytes in report.tier_bytes.items()},
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
