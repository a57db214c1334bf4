"""Sends reports: at once when something happened, otherwise at an interval."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
from collections import deque
from collections.abc import Iterable
from random import Random

import structlog

from flyball.backoff import Backoff
from flyball.contracts.checkpoints import RestoreReport
from flyball.contracts.cluster import HostFacts, JobSpec
from flyball.contracts.errors import (
    DaemonSuperseded,
    FlyballError,
    Forbidden,
    InvalidMessage,
    ReportReplayed,
    TooBusy,
    Unauthorized,
    WrongClock,
)
from flyball.contracts.on_host.engine_wire import (
    DifferingReplicas,
    EngineReply,
    LateSaves,
    SaveFailure,
)
from flyball.contracts.reports.rank_columns import in_columns, steps_together
from flyball.contracts.reports.signals import (
    MAX_SAVE_INTERVALS,
    EngineStatus,
    ReplicasDiffer,
    Report,
    ReportReply,
    SaveFailed,
    SaveLate,
    SignalBody,
)
from flyball.contracts.reports.training_health import ReplayDiffers
from flyball.contracts.wire import MAX_MESSAGE_BYTES, WIRE_VERSION, encode
from host_daemon.engine.engine_process import EngineKeeper
from host_daemon.engine.save_watch import SaveWatch
from host_daemon.kernel.free_ports import FreePorts, is_free
from host_daemon.link.cluster_clock import ClusterClock, no_later
from host_daemon.link.http_client import SupervisorClient
from host_daemon.link.superseded import RefusedPolls
from host_daemon.probes.pressure import memory_bytes
from host_daemon.settings import DaemonSettings
from host_daemon.store.facts import Facts
from host_daemon.store.outbox import RESEND_AFTER_S, SignalOutbox
from host_daemon.workers.beacons import BeaconReadings, Beacons

MIN_INTERVAL_S = 0.005  # between two reports, however much happens
RETRY_S = 0.25  # after a report that failed, doubled up to the maximum
MAX_RETRY_S = 2.0
TOUCH_INTERVALS = 2.0  # after a report's reply; no sensor calls a host silent before three intervals have passed
MAX_RESTORES = 256
MAX_SAVE_FAILURES = 256
RESTORES_FACT = "restores_reported_at"

_log = structlog.get_logger(__name__)


class Reporter:
    """Composes and sends reports, one at a time. What happens meanwhile goes into the next one."""

    def __init__(
        self,
        settings: DaemonSettings,
        clock: ClusterClock,
        *,
        incarnation: str,
        client: SupervisorClient,
        outbox: SignalOutbox,
        beacons: Beacons,
        engine: EngineKeeper,
        ports: FreePorts,
        facts: Facts,
        refusals: RefusedPolls,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._incarnation = incarnation
        self._client = client
        self._outbox = outbox
        self._beacons = beacons
        self._engine = engine
        self._ports = ports
        self._facts = facts
        self._seq = 0  # of the newest report
        self._urgent = asyncio.Event()
        self._restores: deque[RestoreReport] = deque(maxlen=MAX_RESTORES)
        self._save_failures: deque[SaveFailure] = deque(maxlen=MAX_SAVE_FAILURES)
        self._late_saves: deque[LateSaves] = deque(maxlen=MAX_SAVE_FAILURES)
        self._differing: deque[DifferingReplicas] = deque(maxlen=MAX_SAVE_FAILURES)
        self._replays: deque[ReplayDiffers] = deque(maxlen=MAX_SAVE_FAILURES)
        self._saves = SaveWatch(self._raise, clock.wall_s())
        self._unreachable: tuple[str, ...] = ()
        self._answered: set[str] = set()  # peers that the sensor asked about and the engine knows about
        self._free_port = 0
        self._memory_bytes = memory_bytes(settings.probe_root)
        self._version = importlib.metadata.version("flyball")
        self._trouble = ""  # class of the last error logged
        self._leaves = False
        self._refusals = refusals
        self.predecessors: tuple[str, ...] = ()  # incarnations that this daemon succeeds
        self.lagged_s = 0.0  # the event loop's longest delay since the last report

    def wake(self) -> None:
        """Report at once: something happened."""
        self._urgent.set()

    async def note_engine(self, status: EngineReply) -> None:
        """Queue what is new in a reply of the engine."""
        self._restores.extend(status.restores)
        for failure in status.failures:
            if failure not in self._save_failures:
                self._save_failures.append(failure)
                await self._outbox.put(
                    SaveFailed(failure.job, failure.generation, failure.rank, failure.step, failure.message[:4_000])
                )
                self.wake()
        for late in status.late:
            if late not in self._late_saves:
                self._late_saves.append(late)
                await self._outbox.put(
                    SaveLate(late.job, late.generation, late.rank, late.step, late.waited_s, late.count)
                )
                self.wake()
        for found in status.differing:
            if found not in self._differing:
                self._differing.append(found)
                tensors = tuple(name[:4_000] for name in found.tensors)
                await self._outbox.put(
                    ReplicasDiffer(
                        job=found.job,
                        generation=found.generation,
                        step=found.step,
                        tensors=tensors,
                        count=found.count,
                        agree=found.agree,
                        differ=found.differ,
                        equal_step=found.equal_step,
                    )
                )
                self.wake()
        for replay in status.replays:
            if replay not in self._replays:
                self._replays.append(replay)
                await self._outbox.put(replay)
                self.wake()
        for failing in status.failing:
            await self._saves.note(failing)
        if status.unreachable_peers != self._unreachable:
            self._unreachable = status.unreachable_peers
            self.wake()
        answered = {testimony.peer for testimony in status.testimonies}
        if answered - self._answered:
            self.wake()
        self._answered = answered
        if status.restores:
            self.wake()

    async def look_at_saves(self, specs: Iterable[JobSpec]) -> None:
        """Queue that nothing of a job is saved, or something at last."""
        trained = self._beacons.trained()
        for spec in specs:
            if ranks := [rank for rank in trained if rank.job == spec.job]:
                copies, now = self._engine.status.copies, self._clock.wall_s()
                await self._saves.look(spec, ranks, copies, has_engine=self._engine.alive, now=now)

    async def _raise(self, body: SignalBody) -> None:
        await self._outbox.put(body)
        self.wake()

    async def run(self) -> None:
        """Report until cancelled. Raises DaemonSuperseded once another daemon has acted for the host for a while."""
        retry = Backoff(RETRY_S, MAX_RETRY_S, jitter=Random(self._settings.host_id))
        while True:
            self._urgent.clear()
            try:
                await self.send_once()
            except TooBusy as error:
                await asyncio.sleep(error.retry_after_s)
            except DaemonSuperseded as error:
                self._log_change(error)
                self._refusals.note(error)
                await asyncio.sleep(RETRY_S)
            except FlyballError as error:
                self._log_change(error)
                await asyncio.sleep(retry.failed())
            else:
                self._log_change(None)
                retry.succeeded()
                self._refusals.ended()
                if not self._outbox.has_unsent:
                    await asyncio.sleep(MIN_INTERVAL_S)
                    interval_s = self._settings.report_interval_s
                    if self._outbox.has_uncommitted:
                        interval_s = min(interval_s, RESEND_AFTER_S)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(interval_s - MIN_INTERVAL_S):
                            await self._urgent.wait()

    async def send_farewell(self) -> None:
        """Send the last report: the supervisor then expects no others, and does not call the host silent. Raises
        FlyballError."""
        self._leaves = True
        await self.send_once()

    async def send_once(self) -> None:
        """Send one report, and once more if only its dates were wrong. If it fails, its content is due again. Raises
        FlyballError."""
        try:
            await self._send()
        except WrongClock as error:
            self._clock.follow(error.server_time)
            await self._send()

    async def _send(self) -> None:
        readings = self._beacons.take()
        workers, progress = in_columns(self._beacons.statuses())
        signals = self._outbox.due()
        restores = tuple(self._restores)
        lagged_s, self.lagged_s = self.lagged_s, 0.0
        now, now_s = self._clock.wall_s(), self._clock.monotonic_s()
        self._seq += 1
        report = Report(
            version=WIRE_VERSION,
            incarnation=self._incarnation,
            seq=self._seq,
            sent_at=now,
            interval_s=self._settings.report_interval_s,
            facts=self._host_facts(),
            engine=self._engine_status(),
            signals=signals,
            workers=workers,
            progress=progress,
            completed=steps_together(readings.steps),
            marks=readings.marks,
            restores=restores,
            losses=readings.losses,
            computes=readings.computes,
            copies=self._engine.status.copies if self._engine.alive else (),
            succeeds=self.predecessors,
            lagged_s=lagged_s,
            leaves=self._leaves,
        )
        try:
            reply = await self._client.report(no_later(report, now))
        except ReportReplayed:  # something in between sent it twice and lost the first reply
            reply = ReportReply({})
        except BaseException as error:
            self._outbox.not_sent(signals)
            if isinstance(error, InvalidMessage):
                # It would be refused forever. Its signals stay in the spool; its state will soon be outdated.
                _log.error("report_refused", error=str(error), size_bytes=len(encode(report)), limit=MAX_MESSAGE_BYTES)
            else:
                self._beacons.put_back(readings)
            raise
        self._engine.ask_about(reply.ask)
        until_s = now_s + TOUCH_INTERVALS * self._settings.report_interval_s
        self._engine.in_touch(until_s, reply)
        await self._after(readings, restores)
        await self._outbox.committed(reply.committed)

    async def _after(self, readings: BeaconReadings, restores: tuple[RestoreReport, ...]) -> None:
        self._beacons.arrived(readings)
        for restore in restores:
            if restore in self._restores:  # else newer ones displaced it meanwhile
                self._restores.remove(restore)
        if restores:
            await self._facts.set(RESTORES_FACT, repr(max(r.at for r in restores)))

    def _host_facts(self) -> HostFacts:
        if not self._free_port or not is_free(self._free_port):
            self._free_port = self._ports.find()
        settings = self._settings
        return HostFacts(
            host_id=settings.host_id,
            address=settings.address,
            failure_domain=settings.failure_domain,
            engine_address=self._engine.status.address if self._engine.alive else "",
            free_port=self._free_port,
            daemon_version=self._version,
            pid=os.getpid(),
            fabric=settings.fabric,
            memory_bytes=self._memory_bytes,
        )

    def _engine_status(self) -> EngineStatus:
        status = self._engine.status
        return EngineStatus(
            self._engine.alive,
            status.unreachable_peers,
            status.counters,
            self._engine.testimonies(),
            status.intervals[:MAX_SAVE_INTERVALS],
            status.transports,
        )

    def _log_change(self, error: FlyballError | None) -> None:
        """Log when the kind of error changes, not every repetition."""
        trouble = type(error).__name__ if error else ""
        if trouble == self._trouble:
            return
        self._trouble = trouble
        if error is None:
            _log.info("supervisor_answers")
        elif isinstance(error, Unauthorized | Forbidden | DaemonSuperseded):
            _log.error("supervisor_refuses", error=str(error))
        else:
            _log.warning("supervisor_away", error=str(error), note="workers keep running, signals are kept")
