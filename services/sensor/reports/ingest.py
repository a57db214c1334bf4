"""Takes in reports: feeds the fault detector, queues them for the database, replies with what is committed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Protocol

import msgspec
import structlog

from flyball.contracts.checkpoints import StoredPoints
from flyball.contracts.clock import Clock
from flyball.contracts.errors import FlyballError, TooBusy
from flyball.contracts.reports.rank_columns import CompletedSteps, Workers
from flyball.contracts.reports.signals import RankMarks, Report, ReportReply, Signal, SignalBody
from flyball.contracts.reports.training_health import RankLoss
from flyball.contracts.wire import encode
from services.runtime.outages import OUTAGES, Outage
from services.runtime.telemetry import Metrics
from services.sensor.detector.fault_detector import FaultDetector
from services.sensor.detector.loss_watch import LossWatch
from services.sensor.detector.shared_stands import JobStand
from services.sensor.detector.straggler_watch import StragglerWatch
from services.sensor.detector.suspect_replicas import SuspectReplicas
from services.sensor.detector.watched_job import LearnedJob
from services.sensor.reports.committed import CommittedPositions
from services.sensor.reports.peer_addresses import PeerAddresses
from services.sensor.reports.report_queue import ReportQueue
from services.sensor.reports.state_lanes import Received
from services.sensor.rules.admission import Admission, reason_of
from services.sensor.rules.early_steps import EarlySteps
from services.sensor.rules.own_signals import OwnSignals
from services.sensor.rules.placed import Placed
from services.sensor.rules.step_log import StepEventLog
from services.sensor.rules.vouches import Vouches

log = structlog.get_logger()

NOTHING_NEW = ReportReply(committed={})


class PlacementSource(Protocol):
    @property
    def neighbours(self) -> Mapping[str, tuple[str, ...]]: ...

    @property
    def placed(self) -> Placed: ...

    @property
    def hang_timeouts(self) -> Mapping[str, float]: ...

    @property
    def learned(self) -> Mapping[str, LearnedJob]: ...

    @property
    def stored_points(self) -> StoredPoints: ...

    @property
    def troubled(self) -> frozenset[str]: ...


class WriteVouches(Protocol):
    def __call__(self, *, sensor: str, at: float, ages_ms: Sequence[int], hosts: Sequence[str] | None) -> None: ...


RETRY_AFTER_S = 1.0
LARGE_REPORT_BYTES = 32 << 10
PLACEMENTS_EVERY_S = 1.0
PLACEMENTS_AT_MOST_EVERY_S = 0.1  # even if hosts report generations that are unknown here
OWN_AT_ONCE = 500  # far below what the bus accepts at once
MOVED_AFTER_S = 2.0  # a host whose report to another sensor is newer by this much reports there
MAX_ASKED_FOR = 1_000
VOUCH_EVERY_S = 1.0
LEARNED_EVERY_S = 5.0
STEPS_LEARNED_EVERY_S = 60.0  # for what changes with every step
BACKLOG_S = 3.0  # after a database outage, for other sensors to store which hosts reported meanwhile
EXPECTED_AT_ONCE = 500
EXPECT_EVERY_S = 1.0  # how often to read which hosts should report, and whether they do so elsewhere


class Ingest:
    """One sensor. Everything runs in one event loop, also the detector, so nothing needs a lock.

    A reply never acknowledges the signals of its own report. They may leave the daemon's spool only when `committed`
    covers them: after the controller stored them with its decisions.
    """

    def __init__(
        self,
        *,
        sensor_id: str,
        incarnation: str,
        detector: FaultDetector,
        queue: ReportQueue,
        committed: CommittedPositions,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self.vouches = Vouches()
        self.peer_addresses = PeerAddresses(clock)
        # Two sensors may share a name, for a while or by mistake. Their reports must not be mixed up.
        self._voucher = f"sensor.{sensor_id}.{incarnation}"
        self._steps = StepEventLog(sensor_id)
        self._early = EarlySteps()
        self._losses = LossWatch()
        self._replicas = SuspectReplicas()
        self._stragglers = StragglerWatch()
        self._own = OwnSignals(source=f"sensor.{sensor_id}", incarnation=incarnation)
        self._admission = Admission()
        self._stored_points: StoredPoints = {}
        self._placed: Placed | None = None  # None: not known yet, so every host is believed
        self._asked_for: set[tuple[str, int]] = set()  # unknown generations that hosts reported
        self._is_generation_new = asyncio.Event()
        self._with_loss: set[str] = set()  # jobs with a loss in the metrics
        self._detector = detector
        self._queue = queue
        self._committed = committed
        self._clock = clock
        self._metrics = metrics
        self._received = metrics.tally(metrics.reports_received)

    def expect_hosts(self, reported_at: Mapping[str, float]) -> None:
        """Hosts that should report -> when each last did to any sensor (wall clock). One that reports to none is
        silent, even if it never reported here."""
        now_s, now = self._clock.monotonic_s(), self._clock.wall_s()
        for host_id, at in reported_at.items():
            self._detector.expect(host_id, now_s, now - at, at)
            if now - at < self.vouches.age_s(host_id, now_s) - MOVED_AFTER_S:
                self._steps.forget(host_id)

    def know_stored(self, points: StoredPoints) -> None:
        """From now on tell the hosts of these jobs which of their persistent steps are stored."""
        self._stored_points = points

    def know(self, placed: Placed) -> None:
        """From now on accept from each host only reports of the ranks that it was given."""
        self._placed = placed
        self._detector.set_placed(placed.given)
        for job in self._with_loss - placed.jobs:  # ended jobs
            self._metrics.job_loss.remove(job)
        self._with_loss &= placed.jobs
        self._losses.keep(placed.jobs)
        self._replicas.keep(placed.jobs)
        self._stragglers.keep(placed.jobs)
        now_s = self._clock.monotonic_s()
        for host_id, completed in self._early.take(placed, now_s):
            self._steps.observe(host_id, completed, now_s)

    def accept(self, report: Report, *, host_id: str, size_bytes: int) -> ReportReply:
        """Take in a report that came with the token of `host_id`. Raises what `Admission.check` raises, or TooBusy if
        the queue is full or the host has sent too many signals: the daemon sends it again."""
        now_s, now = self._clock.monotonic_s(), self._clock.wall_s()
        try:
            self._admission.check(report, host_id=host_id, now=now, now_s=now_s)
        except FlyballError as error:
            self._metrics.reports_refused.labels(reason=reason_of(error)).inc()
            raise
        own = report
        if self._placed is not None and not self._placed.allows(report):  # which nearly never happens
            own, report = self._own_part(report, self._placed)
        # The host is alive even if there is no room for its report.
        if found := self._detector.observe(own, now_s):
            self._raise_signals(found, now_s)
        self.vouches.note_report(host_id, now_s)
        new = self._new_signals(report.signals, host_id, now_s) if report.signals else ()
        if report.marks:
            report = msgspec.structs.replace(report, marks=self._new_marks(report, now_s))
        if not self._queue.offer(Received(report, new, size_bytes, now, now_s)):
            self._steps.forget_marks(report.marks)
            self._metrics.reports_refused.labels(reason="queue_full").inc()
            raise TooBusy(
                "The sensor's queue is full.", retry_after_s=RETRY_AFTER_S, hint="send the report again a little later"
            )
        self._admission.accepted(report, now_s=now_s)
        if own.completed:
            self._steps.observe(host_id, own.completed, now_s)
        if report.losses:
            losses = self._own_losses(host_id, report.losses)
            self._steps.observe_losses(losses, report.sent_at, now_s)
            self._raise_signals(self._losses.observe(losses), now_s)
        if report.computes:
            computes = report.computes if self._placed is None else self._placed.own_computes(host_id, report.computes)
            self._raise_signals(self._stragglers.observe(computes, now_s), now_s)
        if report.completed is not own.completed:
            self._take_early(host_id, report.completed, now_s)
        if report.leaves:
            self._detector.leave(host_id)
            self.vouches.leave(host_id)
        self._received.count += 1
        if new:
            self._replicas.observe(new, own.workers)
            self._admission.spend(host_id, len(new), len(encode(new)), now_s=now_s)
        for signal in report.signals:
            self._committed.expect(host_id, signal.incarnation, signal.seq)
        incarnations = {report.incarnation, *(s.incarnation for s in report.signals)} if report.signals else None
        known = self._committed.known(host_id, incarnations or (report.incarnation,))
        ask = self._detector.questions(host_id)
        stored = self._stored_points and self._stored_of(own.workers)
        clean = self._replicas.clean_steps(own.workers, self._losses.clean_steps(of.job for of in own.workers))
        where = self.peer_addresses.of(report.engine.unreachable_peers) if report.engine.unreachable_peers else {}
        news = known or ask or stored or clean or where
        return ReportReply(known, ask, stored, clean, where) if news else NOTHING_NEW

    def admit_large(self, host_id: str, size_bytes: int) -> None:
        """Call this before decoding a report of more than LARGE_REPORT_BYTES. Raises TooBusy; the host is alive."""
        try:
            self._admission.check_large(host_id, size_bytes, now_s=self._clock.monotonic_s())
        except TooBusy:
            self._metrics.reports_refused.labels(reason="host_quota").inc()
            self.note_alive(host_id)
            raise

    def note_alive(self, host_id: str) -> None:
        """A report that cannot be read came with the token of `host_id`: of another wire version, or too large. It is
        refused, but it shows that the host is alive."""
        now_s = self._clock.monotonic_s()
        self._raise_signals(self._detector.note_alive(host_id, now_s), now_s)
        self.vouches.note_report(host_id, now_s)

    @property
    def has_ranks_elsewhere(self) -> bool:
        """Whether some job has hosts that report to other sensors."""
        return self._detector.has_ranks_elsewhere

    def stands(self) -> tuple[JobStand, ...]:
        """What to tell the other sensors of ranks that stand still."""
        return self._detector.stands()

    def hear(self, told: Mapping[str, Sequence[JobStand]]) -> None:
        """Take in what the other sensors tell now, by sensor."""
        now_s = self._clock.monotonic_s()
        self._raise_signals(self._detector.hear(told, now_s), now_s)

    async def run_expectations(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Keep expecting the hosts that `read` returns, see `expect_hosts`."""
        outage = Outage("expectations", self._clock)
        while True:
            wait_s = EXPECT_EVERY_S
            try:
                found = await asyncio.to_thread(read)
                reported_at = iter(found.items())
                while part := dict(islice(reported_at, EXPECTED_AT_ONCE)):
                    self.expect_hosts(part)
                    await asyncio.sleep(0)  # let waiting reports in
                self._detector.expect_no_others(found.keys())
                outage.ended()
            except OUTAGES as error:
                wait_s = outage.pause_s(error)
                self._detector.doubt(self._clock.monotonic_s(), wait_s + BACKLOG_S)
            await asyncio.sleep(wait_s)

    async def run_vouches(self, write: WriteVouches) -> None:
        """Keep storing which hosts report to this sensor."""
        outage = Outage("vouches", self._clock)
        while True:
            wait_s = VOUCH_EVERY_S
            vouch = self.vouches.take(self._clock.monotonic_s())
            try:
                if vouch.ages_ms or vouch.hosts is not None:
                    at = self._clock.wall_s()
                    ages_ms, hosts = vouch.ages_ms, vouch.hosts
                    await asyncio.to_thread(write, sensor=self._voucher, at=at, ages_ms=ages_ms, hosts=hosts)
                outage.ended()
            except OUTAGES as error:
                self.vouches.not_stored()
                wait_s = outage.pause_s(error)
            await asyncio.sleep(wait_s)

    async def run_learned(self, write: Callable[[Mapping[str, LearnedJob], float], None]) -> None:
        """Keep storing what the detector has learned about jobs, for the next sensor."""
        outage = Outage("learned", self._clock)
        stored: dict[str, LearnedJob] = {}
        stored_s: dict[str, float] = {}
        while True:
            wait_s = LEARNED_EVERY_S
            now_s = self._clock.monotonic_s()
            known = self._detector.learned()
            news = {
                job: learned
                for job, learned in known.items()
                if job not in stored
                or now_s - stored_s[job] >= STEPS_LEARNED_EVERY_S
                or learned.lasting != stored[job].lasting
            }
            try:
                if news:
                    await asyncio.to_thread(write, news, self._clock.wall_s())
                stored = {job: learned for job, learned in (stored | news).items() if job in known}
                stored_s = {job: now_s if job in news else stored_s[job] for job in stored}
                outage.ended()
            except OUTAGES as error:
                wait_s = outage.pause_s(error)
            await asyncio.sleep(wait_s)

    async def run_placements(self, read: Callable[[], PlacementSource]) -> None:
        """Keep reading which host has which ranks, which neighbours to ask about a silent one (see
        `witnesses.neighbours`), and which jobs set a hang timeout."""
        outage = Outage("placements", self._clock)
        recalled: Mapping[str, LearnedJob] = {}
        while True:
            wait_s = PLACEMENTS_EVERY_S
            self._is_generation_new.clear()
            try:
                found = await asyncio.to_thread(read)
                self._detector.set_neighbours(found.neighbours)
                self._detector.set_hang_timeouts(found.hang_timeouts)
                if found.learned is not recalled:
                    recalled = found.learned
                    self._detector.recall(recalled)
                self.know_stored(found.stored_points)
                self._queue.trouble(found.troubled)
                self.know(found.placed)
                outage.ended()
            except OUTAGES as error:
                wait_s = outage.pause_s(error)
            await asyncio.sleep(min(wait_s, PLACEMENTS_AT_MOST_EVERY_S))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s - PLACEMENTS_AT_MOST_EVERY_S):
                    await self._is_generation_new.wait()

    async def run_detector(self, tick_s: float) -> None:
        """Let time pass for the detector. The spacing of the ticks shows it how late this loop ran."""
        due_s = self._clock.monotonic_s()
        try:
            while True:
                due_s += tick_s
                await asyncio.sleep(max(0.0, due_s - self._clock.monotonic_s()))
                now_s = self._clock.monotonic_s()
                self._metrics.detector_lag_seconds.set(max(0.0, now_s - due_s))
                due_s = max(due_s, now_s - tick_s)
                self.tick(now_s)
        finally:
            self._queue.offer_steps(self._steps.take(self._clock.monotonic_s(), everything=True))

    def tick(self, now_s: float) -> None:
        """Let time pass for the detector, sum up steps, and publish again what the bus may have lost."""
        self._raise_signals(self._detector.tick(now_s), now_s)
        if self._queue.has_room_for_steps and (steps := self._steps.take(now_s)):
            self._queue.offer_steps(steps)
            for summary in steps:
                if summary.loss is not None:
                    self._metrics.job_loss.labels(training_job=summary.job).set(float(summary.loss))
                    self._with_loss.add(summary.job)
        incarnation = self._own.incarnation
        self._own.committed(self._committed.known(self._own.source, (incarnation,)).get(incarnation, 0))
        self._publish(self._own.due(now_s), now_s)

    def _new_signals(self, signals: Sequence[Signal], host_id: str, now_s: float) -> tuple[Signal, ...]:
        """The uncommitted signals. Raises TooBusy if the host has sent too many."""
        new = tuple(signal for signal in signals if not self._committed.is_committed(signal))
        if new:
            try:
                self._admission.check_quota(host_id, now_s=now_s)
            except TooBusy:
                self._metrics.reports_refused.labels(reason="host_quota").inc()
                raise
        return new

    def _own_part(self, report: Report, placed: Placed) -> tuple[Report, Report]:
        """As `Placed.split`. The first report of an unknown generation triggers a read of the placements."""
        own, stored = placed.split(report)
        if own is not report and (unknown := placed.unknown(report)) and unknown not in self._asked_for:
            if len(self._asked_for) >= MAX_ASKED_FOR:
                self._asked_for.clear()
            self._asked_for.add(unknown)
            self._is_generation_new.set()
        return own, stored

    def _stored_of(self, workers: Sequence[Workers]) -> StoredPoints:
        """The recovery points to send to a host with these workers."""
        return {of.job: self._stored_points[of.job] for of in workers if of.job in self._stored_points}

    def _own_losses(self, host_id: str, losses: tuple[RankLoss, ...]) -> tuple[RankLoss, ...]:
        return losses if self._placed is None else self._placed.own_losses(host_id, losses)

    def _take_early(self, host_id: str, completed: Sequence[CompletedSteps], now_s: float) -> None:
        """Take in steps of unknown generations: just granted, made up, or of a job that has just ended."""
        if self._placed is None:
            return
        for steps in self._placed.early_steps(completed):
            if self._steps.knows_ranks(host_id, steps):
                self._steps.observe(host_id, (steps,), now_s)
            else:
                self._early.wait(host_id, steps, now_s)

    def _new_marks(self, report: Report, now_s: float) -> tuple[RankMarks, ...]:
        """The marks to store. For an unknown generation the store decides what is new; otherwise
        `StepEventLog.new_marks` does."""
        host_id, placed = report.facts.host_id, self._placed
        early = tuple(
            mark
            for mark in report.marks
            if placed is not None
            and placed.is_early(mark)
            and not self._steps.knows(host_id, mark.job, mark.generation)
        )
        known = [mark for mark in report.marks if mark not in early] if early else report.marks
        return (*early, *self._steps.new_marks(known, report.sent_at, now_s))

    def _raise_signals(self, bodies: Sequence[SignalBody], now_s: float) -> None:
        for body in bodies:
            log.info("detected", signal=str(body.__struct_config__.tag), body=str(body))
        self._publish(self._own.raise_(bodies, at=self._clock.wall_s(), now_s=now_s), now_s)

    def _publish(self, signals: Sequence[Signal], now_s: float) -> None:
        if not signals:
            return
        at = self._clock.wall_s()
        for first in range(0, len(signals), OWN_AT_ONCE):
            part = tuple(signals[first : first + OWN_AT_ONCE])
            self._queue.offer(Received(report=None, signals=part, size_bytes=0, at=at, at_monotonic_s=now_s))
        self._committed.expect(self._own.source, self._own.incarnation, self._own.newest_seq())
