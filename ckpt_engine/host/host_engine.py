"""The engine of one host: the daemon's orders, the peers' requests and the trainers' notices, brought to the jobs."""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import time
from collections import deque
from importlib import metadata

import structlog

from ckpt_engine.contracts import peer_plan as peers
from ckpt_engine.contracts.notices import Notice
from ckpt_engine.counters import Counters
from ckpt_engine.host.context import Services
from ckpt_engine.host.daemon_socket import ControlServer, NoticeListener
from ckpt_engine.host.job import EngineJob
from ckpt_engine.host.late_saves import REMEMBERED_LATE
from ckpt_engine.host.left_copies import left_copies
from ckpt_engine.host.peer_requests import PeerRequests
from ckpt_engine.host.state_dir import EngineStateDir, FenceFile, JobFiles, LateSavesFile
from ckpt_engine.peers.links import PeerLinks
from ckpt_engine.peers.peer_server import PeerServer
from ckpt_engine.peers.transport.handshake import introduce
from ckpt_engine.peers.transport.pool import ConnectionPool
from ckpt_engine.peers.transport.port import ByteCounters, Connection, Identity
from ckpt_engine.peers.transport.tcp import TcpListener, connect_tcp, split_address
from ckpt_engine.settings import EngineSettings
from ckpt_engine.slots.reclaim import Reclaimer
from ckpt_engine.tiers.rate_limit import RateLimit
from flyball.contracts.checkpoints import STATE_DIR_DISK, StoredPoints, Tier
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import ConfigurationError, FlyballError, Unreachable
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


class Engine:
    """The composition: sockets outside, jobs inside."""

    def __init__(
        self, state: EngineStateDir, *, host_id: str, address: str, port: int, token: bytes, settings: EngineSettings
    ) -> None:
        self._settings = settings
        self._host_id = host_id
        self._token = token
        self._lock = threading.Lock()
        self._jobs: dict[str, EngineJob] = {}
        self._addresses: dict[str, str] = {}  # host -> "ip:port"
        self._late_saves_file = LateSavesFile(state.path / "engine-late-saves.json")
        # Of jobs that ended, and of the engine before this one: told in the answers after that.
        self._late_of_ended: deque[LateSaves] = deque(self._late_saves_file.load(), maxlen=REMEMBERED_LATE)
        self._late_told: tuple[LateSaves, ...] | None = None  # in the newest answer; None: nobody has asked
        self._fences = FenceFile(state.path / "engine-fences.json")
        self._job_files = JobFiles(state.path / "engine-jobs")
        self._daemon_spoke_s: float | None = None
        self._in_touch_until_s = 0.0
        self._stored_points: StoredPoints | None = None
        self._bytes = ByteCounters()
        self._counters = Counters()
        listener = TcpListener(
            address, port or state.previous_port, fallback=port == 0, settings=settings, total=self._bytes
        )
        shown = f"[{address}]" if ":" in address else address
        self.address = f"{shown}:{listener.port}"
        state.write_pid_file(listener.port)
        self._identity = Identity(host_id, self.address, secrets.token_hex(8))
        self._pool = ConnectionPool(self._dial, connections_per_peer=settings.pool_connections_per_peer)
        self._links = PeerLinks(
            dial=self._dial,
            on_up=self._peer_is_up,
            on_lost=self._pool.abort,
            settings=settings,
            counters=self._counters,
        )
        self._services = Services(
            host_id=host_id,
            state_dir=state.path,
            shm_prefix=shm_prefix(str(state.path.resolve()), os.environ.get(SHM_DIR_VARIABLE, DEFAULT_SHM_DIR)),
            settings=settings,
            clock=SystemClock(),
            counters=self._counters,
            pool=self._pool,
            links=self._links,
            peer_limit=RateLimit(settings.peer_bytes_per_s, monotonic_s=time.monotonic),
            dial=self._dial,
            code_version=metadata.version("flyball"),
            in_touch=lambda: time.monotonic() < self._in_touch_until_s,
            stored_points=lambda: self._stored_points,
            rate_limits={
                Tier.DISK: RateLimit(settings.disk_bytes_per_s, monotonic_s=time.monotonic),
                Tier.PERSISTENT: RateLimit(settings.persistent_bytes_per_s, monotonic_s=time.monotonic),
            },
        )
        self._reclaimer = Reclaimer(
            self._services.shm_prefix,
            known_jobs=lambda: {*self._jobs, *self._job_files.names()},
            ttl_s=settings.segment_ttl_s,
            counters=self._counters,
        )
        self._peer_server = PeerServer(
            listener,
            identity=self._identity,
            token=token,
            settings=settings,
            counters=self._counters,
            handle=PeerRequests(self._jobs.get, self._services, daemon_s=self._daemon_s).answer,
            on_hello=self._met,
        )
        self._notices = NoticeListener(state.socket_path(NOTIFY_SOCKET), counters=self._counters, handle=self._notice)
        self._control = ControlServer(
            state.socket_path(ENGINE_SOCKET), settings=settings, counters=self._counters, handle=self.answer
        )

    def start(self) -> None:
        """Go on with the jobs that a killed predecessor had, then open the doors."""
        for configure in self._job_files.load():
            try:
                self._begin(configure, resumed=True)
            except (FlyballError, OSError) as error:  # one job's segments must not keep the others from being served
                log.error("job_not_resumed", job=configure.placement.job, reason=str(error))
        self._peer_server.start()
        self._notices.start()
        self._control.start()
        self._reclaimer.start()
        log.info("engine_started", host_id=self._host_id, address=self.address, pid=os.getpid(), jobs=len(self._jobs))

    def stop(self) -> None:
        """Finish commits in flight within the drain deadline, then end. Segments stay."""
        deadline_s = time.monotonic() + self._settings.drain_timeout_s
        self._reclaimer.close()
        self._control.close()
        for job in list(self._jobs.values()):
            job.drain(max(deadline_s - time.monotonic(), 0.0))
        now = self._services.clock.wall_s()
        for job in list(self._jobs.values()):
            job.late_saves.tell_rest(now)
        told = set(self._late_told or ())
        self._late_saves_file.store([late for late in self._late() if late not in told][-REMEMBERED_LATE:])
        for job in list(self._jobs.values()):
            job.end(join_timeout_s=max(deadline_s - time.monotonic(), 0.0))
        self._notices.close()
        self._links.close()
        self._peer_server.close()
        self._pool.close()
        log.info("engine_stopped", host_id=self._host_id)

    # --- the daemon's orders ---

    def answer(self, request: EngineRequest) -> EngineReply:
        """Carry out one request; raises FlyballError for what is refused."""
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
                f"A generation was configured for host {request.host_id}; this engine is {self._host_id}'s.",
                hint="give daemon and engine the same state folder and host id",
            )
        with self._lock:
            self._fences.obey(request.placement.job, request.fence)
            if request.placement.job in self._jobs:
                self._jobs[request.placement.job].check(request)
            self._job_files.store(request)
        self._begin(request)
        return self._reply()

    def _begin(self, configure: Configure, *, resumed: bool = False) -> None:
        name = configure.placement.job
        with self._lock:
            job = self._jobs.get(name)
            if job is None:
                job = EngineJob(name, self._services)
                job.replicas.drop_torn()
                self._jobs[name] = job
            addresses = peers.engine_addresses(configure.placement)
            addresses.pop(self._host_id, None)
            self._addresses.update(addresses)
        job.begin(configure, resumed=resumed)
        self._set_links()
        log.info(
            "generation_began",
            job=name,
            generation=configure.placement.generation,
            ranks=list(peers.local_ranks(configure.placement, self._host_id)),
        )

    def _flush(self, request: Flush) -> EngineReply:
        job = self._jobs.get(request.job)
        if job is None:
            return self._reply(copies=tuple(left_copies(request.job, request.history, self._services)))
        flushed: dict[str, int] = {}
        if request.durable:
            flushed = job.flush_durably(request.timeout_s)
        else:
            job.flush(request.timeout_s)
        return self._reply(copies=tuple(job.copies()), flushed=flushed)

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
            message=f"A rank is at or past step {request.step}: {positions}. Next step: name a newer one.",
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
            job = self._jobs.pop(request.job, None) or EngineJob(request.job, self._services)
            self._job_files.remove(request.job)
        if request.keep_memory or request.drop_disk:  # nothing is written any more into what is about to go
            job.end(join_timeout_s=self._settings.drain_timeout_s)
        if request.keep_memory:
            job.close()
        else:
            job.release()
        if request.drop_disk:
            shutil.rmtree(self._services.state_dir / STATE_DIR_DISK / self._host_id / request.job, ignore_errors=True)
        self._late_of_ended.extend(job.late_saves.newest())
        self._links.forget(request.job)
        self._set_links()
        log.info("job_released", job=request.job, memory_kept=request.keep_memory)
        return self._reply()

    def _daemon_s(self) -> float | None:
        spoke_s = self._daemon_spoke_s
        return None if spoke_s is None else time.monotonic() - spoke_s

    def _status(self, request: GetStatus) -> EngineReply:
        self._daemon_spoke_s = time.monotonic()  # it asks several times a second
        self._stored_points = request.stored_points  # first: once in touch, it is relied on
        self._in_touch_until_s = max(self._in_touch_until_s, request.in_touch_until_s)
        if self._late_told is not None:  # who asked before this has got that answer
            self._late_saves_file.remove()
        self._late_told = self._late()
        jobs, now = list(self._jobs.values()), self._services.clock.wall_s()
        return self._reply(
            copies=tuple(copy for job in jobs for copy in job.tell_copies()),
            restores=self._services.restores.since(request.restores_since),
            failures=tuple(failure for job in jobs for failure in job.save_failures.newest()),
            late=self._late_told,
            failing=tuple(failing for job in jobs if (failing := job.save_failures.failing(now)) is not None),
            intervals=tuple(
                interval
                for job in jobs
                if job.coordination is not None and (interval := job.coordination.save_interval) is not None
            ),
            testimonies=self._links.testimonies(request.about),
        )

    def _late(self) -> tuple[LateSaves, ...]:
        jobs = list(self._jobs.values())
        return (*self._late_of_ended, *(late for job in jobs for late in job.late_saves.newest()))

    def _reply(self, *, ok: bool = True, code: str = "", message: str = "", **fields: object) -> EngineReply:
        counters = {
            **self._counters.snapshot(),
            "peer_bytes_sent": self._bytes.sent,
            "peer_bytes_received": self._bytes.received,
        }
        return EngineReply(
            ok=ok,
            code=code,
            message=message,
            pid=os.getpid(),
            address=self.address,
            unreachable_peers=self._links.unreachable(),
            counters=counters,
            **fields,  # type: ignore[arg-type]  # the fields of EngineReply that a request has
        )

    def _job(self, name: str) -> EngineJob:
        job = self._jobs.get(name)
        if job is None:
            raise ConfigurationError(
                f"No generation of {name} is configured on this host.", hint="the job is to be started here first"
            )
        return job

    # --- peers and trainers ---

    def _notice(self, notice: Notice) -> None:
        job = self._jobs.get(notice.job)
        if job is not None:
            job.notice(notice)

    def _met(self, peer: Identity) -> None:
        # An engine that was restarted on another port says so by calling: the placement still has the old one.
        split_address(peer.address)  # one that nobody could call ends this connection, and is not remembered
        with self._lock:
            self._addresses[peer.host_id] = peer.address

    def _peer_is_up(self, host_id: str, incarnation: str) -> None:
        log.info("peer_connected", peer=host_id, incarnation=incarnation)
        for job in list(self._jobs.values()):
            job.peer_is_up(host_id)

    def _set_links(self) -> None:
        with self._lock:
            generations = [job.generation for job in self._jobs.values() if job.generation is not None]
            linked = frozenset[str]().union(*(generation.linked_hosts for generation in generations))
            self._peer_server.expect(len(linked))
            self._links.set_targets(linked)

    def _dial(self, host_id: str, address: str) -> Connection:
        with self._lock:
            known = address or self._addresses.get(host_id, "")
        if not known:
            raise Unreachable(f"The address of {host_id}'s engine is not known.", hint="see whether its engine runs")
        connection = connect_tcp(known, settings=self._settings, total=self._bytes)
        try:
            introduce(
                connection, identity=self._identity, token=self._token, timeout_s=self._settings.handshake_timeout_s
            )
        except FlyballError:
            connection.close()
            raise
        if connection.peer.host_id != host_id:
            connection.close()
            raise Unreachable(
                f"At {known} the engine of {connection.peer.host_id} answers, not that of {host_id}.",
                hint="it is found again when its host reports, or by the next placement",
            )
        return connection
