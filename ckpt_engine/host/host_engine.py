"""The engine of one host: passes the daemon's orders, the peers' requests and the trainers' notices to the jobs."""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import time
from collections import deque

import structlog

from ckpt_engine.contracts import peer_plan
from ckpt_engine.contracts.notices import Notice
from ckpt_engine.counters import Counters
from ckpt_engine.host.daemon_contact import DaemonContact
from ckpt_engine.host.daemon_socket import ControlServer, NoticeListener
from ckpt_engine.host.durable_tiers import left_copies
from ckpt_engine.host.engine_host import EngineHost
from ckpt_engine.host.job import EngineJob
from ckpt_engine.host.peer_requests import PeerRequests
from ckpt_engine.host.restoring import RestoreLog
from ckpt_engine.host.save_reports import REMEMBERED_LATE
from ckpt_engine.host.state_dir import EngineStateDir, FenceFile, JobFiles, LateSavesFile, TransportsFile
from ckpt_engine.path_saves.finish import sweep
from ckpt_engine.path_saves.path_memory import memory_root
from ckpt_engine.peers.broadcast.bandwidths import MeasuredBandwidths
from ckpt_engine.peers.peer_access import PeerAccess
from ckpt_engine.peers.peer_server import PeerServer
from ckpt_engine.peers.shard_transports import ShardTransports
from ckpt_engine.peers.transport.peer_keys import PeerKeys
from ckpt_engine.peers.transport.port import ByteCounters, Identity
from ckpt_engine.peers.transport.rdma.nics import Nics
from ckpt_engine.peers.transport.tcp import TcpListener
from ckpt_engine.rules.rate_limit import RateLimit
from ckpt_engine.settings import EngineSettings
from ckpt_engine.slots.reclaim import Reclaimer
from ckpt_engine.worker_thread import WorkerThread
from flyball.contracts.checkpoints import STATE_DIR_DISK, Tier
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import ConfigurationError, FlyballError
from flyball.contracts.on_host.engine_wire import (
    ENGINE_SOCKET,
    NOTIFY_SOCKET,
    Arm,
    AwaitSaved,
    Configure,
    Disarm,
    EngineReply,
    EngineRequest,
    Flush,
    GetStatus,
    LateSaves,
    Release,
)
from flyball.contracts.on_host.segments import DEFAULT_SHM_DIR, SHM_DIR_VARIABLE, shm_prefix

log = structlog.get_logger()

_PATH_SWEEP_S = 5.0


class Engine:
    """Builds the parts of an engine and connects them."""

    def __init__(
        self, state: EngineStateDir, *, host_id: str, address: str, port: int, token: bytes, settings: EngineSettings
    ) -> None:
        self._settings = settings
        self._host_id = host_id
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._jobs: dict[str, EngineJob] = {}
        self._restores = RestoreLog()
        self._late_saves_file = LateSavesFile(state.path / "engine-late-saves.json")
        # Of jobs that ended, and of the engine before this one.
        self._late_of_ended: deque[LateSaves] = deque(self._late_saves_file.load(), maxlen=REMEMBERED_LATE)
        self._late_reported: tuple[LateSaves, ...] | None = None  # in the newest answer; None: nobody has asked
        self._fences = FenceFile(state.path / "engine-fences.json")
        self._job_files = JobFiles(state.path / "engine-jobs")
        self._contact = DaemonContact()
        self._tcp_bytes, self._rdma_bytes = ByteCounters(), ByteCounters()
        self._counters = Counters()
        listener = TcpListener(
            address, port or state.previous_port, fallback=port == 0, settings=settings, total=self._tcp_bytes
        )
        shown = f"[{address}]" if ":" in address else address
        self.address = f"{shown}:{listener.port}"
        state.write_pid_file(listener.port)
        identity = Identity(host_id, self.address, secrets.token_hex(8))
        transports_file = TransportsFile(state.path)
        transports_file.store(())  # those of an engine before this one
        self._nics = Nics(settings, self._rdma_bytes, self._counters)
        self._transports = ShardTransports(
            host_id,
            settings=settings,
            queue_pairs=self._nics,
            on_change=transports_file.store,
        )
        self._keys = PeerKeys(token, *state.answer_keys())
        self._peers = PeerAccess(
            identity,
            keys=self._keys,
            settings=settings,
            counters=self._counters,
            total=self._tcp_bytes,
            transports=self._transports,
            on_up=self._peer_is_up,
        )
        self._host = EngineHost(
            host_id,
            state.path,
            shm_prefix(str(state.path.resolve()), os.environ.get(SHM_DIR_VARIABLE, DEFAULT_SHM_DIR)),
            settings,
            MeasuredBandwidths(state.path / "engine-bandwidths.json", self._clock),
            rate_limits={
                Tier.DISK: RateLimit(settings.disk_bytes_per_s, monotonic_s=time.monotonic),
                Tier.PERSISTENT: RateLimit(settings.persistent_bytes_per_s, monotonic_s=time.monotonic),
            },
            give_memory_back=self._nics.sweep_now,
        )
        self._reclaimer = Reclaimer(
            self._host.shm_prefix,
            known_jobs=lambda: {*self._jobs, *self._job_files.names()},
            ttl_s=settings.segment_ttl_s,
            counters=self._counters,
        )
        self._path_states: dict[str, str] = {}  # as logged
        self._path_saves = WorkerThread("path-saves", self._sweep_path_saves, counters=self._counters)
        self._peer_server = PeerServer(
            listener,
            identity=identity,
            keys_of=self._keys.to_answer,
            settings=settings,
            counters=self._counters,
            handle=PeerRequests(
                self._jobs.get,
                host=self._host,
                contact=self._contact,
                counters=self._counters,
                may_share=self._keys.may_share,
            ).answer,
            on_hello=self._peers.learn_caller,
            answer_offer=self._transports.answer,
        )
        self._notices = NoticeListener(
            state.socket_path(NOTIFY_SOCKET), counters=self._counters, handle=self._receive_notice
        )
        self._control = ControlServer(
            state.socket_path(ENGINE_SOCKET), settings=settings, counters=self._counters, handle=self.answer
        )

    def start(self) -> None:
        """Resume the jobs of a killed predecessor, then accept connections."""
        for configure in self._job_files.load():
            try:
                self._keys.learn(configure.placement.job, configure.keys, resumed=True)
                self._begin(configure, resumed=True)
            except (FlyballError, OSError) as error:  # the other jobs are served all the same
                log.error("job_not_resumed", job=configure.placement.job, reason=str(error))
        self._peer_server.start()
        self._notices.start()
        self._control.start()
        self._reclaimer.start()
        self._path_saves.start()
        log.info("engine_started", host_id=self._host_id, address=self.address, pid=os.getpid(), jobs=len(self._jobs))

    def stop(self) -> None:
        """Finish commits in progress within the drain timeout, then end. Segments stay."""
        deadline_s = time.monotonic() + self._settings.drain_timeout_s
        self._reclaimer.close()
        self._path_saves.stop()
        self._control.close()
        for job in list(self._jobs.values()):
            job.drain(max(deadline_s - time.monotonic(), 0.0))
        now = self._clock.wall_s()
        for job in list(self._jobs.values()):
            job.late_saves.report_rest(now)
        reported = set(self._late_reported or ())
        self._late_saves_file.store([late for late in self._late() if late not in reported][-REMEMBERED_LATE:])
        for job in list(self._jobs.values()):
            job.end(join_timeout_s=max(deadline_s - time.monotonic(), 0.0))
        self._notices.close()
        self._peer_server.close()
        self._peers.close()
        self._transports.close()
        log.info("engine_stopped", host_id=self._host_id)

    def _sweep_path_saves(self) -> float:
        """Write what killed workers left with `flyball.save`, and free what nobody has used for long."""
        found = sweep(memory_root(os.environ), ttl_s=self._settings.segment_ttl_s)
        for left in found:
            if left.state not in ("on disk", "saving", self._path_states.get(left.path)):
                log.info("path_save", path=left.path, state=left.state, reason=left.reason)
        self._path_states = {left.path: left.state for left in found}
        return _PATH_SWEEP_S

    # --- asked by the daemon ---

    def answer(self, request: EngineRequest) -> EngineReply:
        """Carry out one request. Raises FlyballError if it is refused."""
        match request:
            case Configure():
                return self._configure(request)
            case Flush():
                return self._flush(request)
            case Arm() | Disarm():
                return self._arm(request)
            case AwaitSaved():
                return self._await_saved(request)
            case Release():
                return self._release(request)
            case GetStatus():
                return self._status(request)

    def _configure(self, request: Configure) -> EngineReply:
        if request.host_id != self._host_id:
            raise ConfigurationError(
                f"A generation was configured for host {request.host_id}; this is the engine of {self._host_id}.",
                hint="give daemon and engine the same state folder and host id",
            )
        with self._lock:
            self._fences.obey(request.placement.job, request.fence)
            job = self._jobs.get(request.placement.job)
            is_again = job is not None and job.check(request)
            self._keys.learn(request.placement.job, request.keys, resumed=is_again)
            self._job_files.store(request)
        self._begin(request)
        return self._reply()

    def _begin(self, configure: Configure, *, resumed: bool = False) -> None:
        name = configure.placement.job
        with self._lock:
            job = self._jobs.get(name)
            if job is None:
                job = self._make_job(name)
                job.slots.replicas.drop_torn()
                self._jobs[name] = job
        self._peers.learn_addresses(peer_plan.engine_addresses(configure.placement))
        job.begin(configure, resumed=resumed)
        self._set_links()
        log.info(
            "generation_began",
            job=name,
            generation=configure.placement.generation,
            ranks=list(peer_plan.local_ranks(configure.placement, self._host_id)),
        )

    def _make_job(self, name: str) -> EngineJob:
        return EngineJob(
            name,
            host=self._host,
            peers=self._peers,
            contact=self._contact,
            clock=self._clock,
            counters=self._counters,
            on_restored=self._restores.add,
        )

    def _flush(self, request: Flush) -> EngineReply:
        job = self._jobs.get(request.job)
        if job is None:
            copies = left_copies(request.job, request.history, self._host) if request.history is not None else ()
            return self._reply(copies=tuple(copies))
        flushed: dict[str, int] = {}
        if request.durable:
            flushed = job.flush_durably(request.timeout_s)
        else:
            job.flush(request.timeout_s)
        lineage = request.history.lineage if request.history is not None else None
        return self._reply(copies=tuple(job.copies(lineage)), flushed=flushed)

    def _arm(self, request: Arm | Disarm) -> EngineReply:
        job = self._job(request.job)
        with self._lock:
            self._fences.obey(request.job, request.fence)
        if isinstance(request, Disarm):
            job.disarm(request.fence.generation)
            return self._reply()
        armed, positions = job.arm(request.step)
        if armed:
            return self._reply(positions=positions)
        return self._reply(
            ok=False,
            code="too_late",
            message=f"A rank is at or past step {request.step}: {positions}. Next step: choose a newer one.",
            positions=positions,
        )

    def _await_saved(self, request: AwaitSaved) -> EngineReply:
        job = self._job(request.job)
        missing = job.await_saved(request.generation, request.step, request.timeout_s)
        copies = tuple(job.copies())
        if not missing:
            return self._reply(copies=copies)
        return self._reply(
            ok=False,
            code="not_saved",
            message=f"Step {request.step} is not committed and replicated for ranks {missing}.",
            copies=copies,
            failures=tuple(job.save_failures.newest()),
        )

    def _release(self, request: Release) -> EngineReply:
        with self._lock:
            self._fences.obey(request.job, request.fence)
            job = self._jobs.pop(request.job, None) or self._make_job(request.job)
            self._job_files.remove(request.job)
        if request.keep_memory or request.drop_disk:  # so that nothing is written to what is about to be removed
            job.end(join_timeout_s=self._settings.drain_timeout_s)
        if request.keep_memory:
            job.slots.close()
        else:
            job.release()
        if request.drop_disk:
            shutil.rmtree(self._host.state_dir / STATE_DIR_DISK / self._host_id / request.job, ignore_errors=True)
        self._late_of_ended.extend(job.late_saves.newest())
        self._peers.links.forget(request.job)
        self._keys.forget(request.job)
        self._set_links()
        log.info("job_released", job=request.job, memory_kept=request.keep_memory)
        return self._reply()

    def _status(self, request: GetStatus) -> EngineReply:
        self._contact.receive(request)
        self._peers.learn_addresses(request.addresses)
        self._keys.learn_answer(request.keys.answer)
        if self._late_reported is not None:  # the daemon has received that answer, or it would not ask again
            self._late_saves_file.remove()
        self._late_reported = self._late()
        jobs, now = list(self._jobs.values()), self._clock.wall_s()
        return self._reply(
            copies=tuple(copy for job in jobs for copy in job.report_copies()),
            restores=self._restores.since(request.restores_since),
            failures=tuple(failure for job in jobs for failure in job.save_failures.newest()),
            late=self._late_reported,
            differing=tuple(
                found for job in jobs for log in (job.differing, job.differing_across) for found in log.newest()
            ),
            replays=tuple(found for job in jobs for found in job.replays.newest()),
            failing=tuple(failing for job in jobs if (failing := job.save_failures.failing(now)) is not None),
            intervals=tuple(
                interval
                for job in jobs
                if job.coordination is not None and (interval := job.coordination.save_interval) is not None
            ),
            testimonies=self._peers.links.testimonies(request.about),
            transports=self._peers.transports(),
            generations={job.name: job.generation.number for job in jobs if job.generation is not None},
        )

    def _late(self) -> tuple[LateSaves, ...]:
        jobs = list(self._jobs.values())
        return (*self._late_of_ended, *(late for job in jobs for late in job.late_saves.newest()))

    def _reply(self, *, ok: bool = True, code: str = "", message: str = "", **fields: object) -> EngineReply:
        counters = {
            **self._counters.snapshot(),
            "peer_bytes_sent": self._tcp_bytes.sent + self._rdma_bytes.sent,
            "peer_bytes_received": self._tcp_bytes.received + self._rdma_bytes.received,
            "peer_bytes_sent_rdma": self._rdma_bytes.sent,  # of the above
            "peer_bytes_received_rdma": self._rdma_bytes.received,
            "rdma_registered_bytes": self._nics.registered_bytes,  # now; all others only grow
        }
        return EngineReply(
            ok=ok,
            code=code,
            message=message,
            pid=os.getpid(),
            address=self.address,
            unreachable_peers=self._peers.links.unreachable(),
            counters=counters,
            **fields,  # type: ignore[arg-type]  # fields of EngineReply
        )

    def _job(self, name: str) -> EngineJob:
        job = self._jobs.get(name)
        if job is None:
            raise ConfigurationError(
                f"No generation of {name} is configured on this host.", hint="start the job on this host first"
            )
        return job

    # --- peers and trainers ---

    def _receive_notice(self, notice: Notice) -> None:
        job = self._jobs.get(notice.job)
        if job is not None:
            job.receive_notice(notice)

    def _peer_is_up(self, host_id: str) -> None:
        for job in list(self._jobs.values()):
            job.peer_is_up(host_id)

    def _set_links(self) -> None:
        with self._lock:
            generations = [job.generation for job in self._jobs.values() if job.generation is not None]
            linked = frozenset[str]().union(*(each.linked_hosts for each in generations))
            self._peer_server.expect(len(linked), len(generations))
            self._peers.links.set_targets(linked)
