"""A small world in memory: hosts with workers in lock step and a store, around the real detector, policy and playbook.

Time is simulated; chance comes from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import msgspec
from support.hosts.reports import report
from support.policy.small_hosts import SmallHost, Worker
from support.policy.small_world_store import Store

from flyball.contracts.checkpoints import ShardCopy, Tier
from flyball.contracts.cluster import (
    HostFacts,
    JobSpec,
    JobState,
    Phase,
    Placement,
    WorkerError,
)
from flyball.contracts.decisions import (
    Command,
    CommandResult,
    CommandUpdate,
    EndJob,
    FlushState,
    Incident,
    RankPosition,
    SaveEmergency,
    StartWorkers,
    StopWorkers,
    UpdateState,
    WarmUp,
)
from flyball.contracts.reports.rank_columns import RankSteps
from flyball.contracts.reports.signals import (
    EngineStatus,
    PreemptionNotice,
    Signal,
    SignalBody,
    WorkerExited,
)
from services.controller.policy import decide
from services.controller.round.view import (
    JobView,
    PolicySettings,
)
from services.sensor.detector.fault_detector import DetectorSettings, FaultDetector

TICK_S = 0.05
STEP_S = 0.1
REPORT_S = 0.2
CONNECTION_LOST = "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:20631: Connection reset by peer."


class World:
    """`run` until a condition; faults are methods."""

    def __init__(self, seed: int = 0, hosts: Mapping[str, str] | None = None) -> None:
        self.random = random.Random(seed)
        self.now = 1_000.0
        self.store = Store()
        self.settings = PolicySettings(unwatched_verify_s=5.0)
        self.detector = FaultDetector(DetectorSettings(tick_interval_s=TICK_S))
        domains = hosts or {"host-a": "rack-1", "host-b": "rack-2", "host-c": "rack-3"}
        self.hosts = {name: SmallHost(name, domain) for name, domain in domains.items()}
        self.pids = 100
        self.sensor_seq = 0
        self.inbox: list[Signal] = []
        self.next_step_at: dict[tuple[str, int], float] = {}
        self.fails_at: dict[int, str] = {}  # step -> exception that every generation raises there
        self.last_step = 10_000
        self.restored: list[tuple[int, int | None]] = []

    # --- faults ---

    def worker(self, rank: int) -> tuple[SmallHost, Worker]:
        for host in self.hosts.values():
            if host.alive and rank in host.workers and host.workers[rank].alive and not host.cut_off:
                return host, host.workers[rank]
        raise LookupError(rank)

    def kill(self, rank: int) -> None:
        host, worker = self.worker(rank)
        self.end(host, worker, exit_code=None, signal_number=9)

    def hang(self, rank: int) -> None:
        self.worker(rank)[1].hung = True

    def host_down(self, name: str) -> None:
        host = self.hosts[name]
        host.alive = False
        host.workers.clear()
        host.copies.clear()

    def preempt(self, name: str, seconds: float) -> None:
        host = self.hosts[name]
        self.spool(host, PreemptionNotice(deadline_at=self.now + seconds, source="test"))

    def submit(self, spec: JobSpec) -> None:
        self.store.jobs[spec.job] = JobView(spec, JobState.SUBMITTED, self.now, False, None)

    # --- reading ---

    @property
    def job(self) -> JobView:
        return self.store.view().jobs[0]

    def step(self) -> int:
        steps = [w.step for h in self.hosts.values() if h.alive for w in h.workers.values() if w.alive]
        return min(steps, default=-1)

    def open_incidents(self) -> list[Incident]:
        return [i for i in self.store.incidents.values() if not i.state.closed]

    # --- time ---

    def run(self, until: Callable[[], bool], *, within_s: float) -> None:
        deadline = self.now + within_s
        while not until():
            assert self.now < deadline, (
                f"not within {within_s} s: {self.store.decisions[-3:]} {self.open_incidents()} {self.job.message}"
            )
            self.tick()

    def settle(self, *, within_s: float = 120.0, quiet_s: float = 5.0) -> None:
        """Run until no incident has been open for `quiet_s`, longer than any fault takes to be detected."""
        quiet_since = self.now

        def is_quiet() -> bool:
            nonlocal quiet_since
            if self.open_incidents():
                quiet_since = self.now
            return self.now - quiet_since >= quiet_s

        self.run(is_quiet, within_s=within_s)

    def tick(self) -> None:
        self.now = round(self.now + TICK_S, 6)
        self.train()
        for host in self.hosts.values():
            if host.alive:
                self.obey(host)
                self.finish_saves(host)
                if self.now >= host.next_report_at or host.signals:
                    self.report(host)
        self.raise_(self.detector.tick(self.now))
        self.control()
        for action_id, action in list(self.store.actions.items()):
            if not action.state.ended:
                self.store.carry_out(action_id, self.now)

    def control(self) -> None:
        signals, self.inbox = self.inbox, []
        view = self.store.view()
        outcome = decide(view, signals, self.settings, self.now)
        assert outcome == decide(view, signals, self.settings, self.now), "the policy is not deterministic"
        self.store.commit(outcome, signals, self.now)
        after = self.store.view()
        again, without = (decide(after, known, self.settings, self.now) for known in (signals, []))
        assert again == without, "known signals changed something"

    def raise_(self, bodies: list[SignalBody]) -> None:
        for body in bodies:
            self.sensor_seq += 1
            self.inbox.append(Signal("sensor.1", "s1", self.sensor_seq, self.now, body))

    def spool(self, host: SmallHost, body: SignalBody) -> None:
        host.seq += 1
        host.signals.append(Signal(host.name, host.incarnation, host.seq, self.now, body))

    def report(self, host: SmallHost) -> None:
        if host.cut_off:
            return
        host.next_report_at = self.now + REPORT_S
        live = [w for w in host.workers.values() if w.alive]
        peers = host.placement.peers.get(host.name, ()) if host.placement else ()
        unreachable = sorted(peer for peer in peers if not self.hosts[peer].alive or self.hosts[peer].cut_off)
        sent = report(
            host.name,
            self.now,
            incarnation=host.incarnation,
            interval_s=REPORT_S,
            facts=HostFacts(host.name, "127.0.0.1", host.domain, f"{host.name}:7000", 29_500, "1", 1),
            engine=EngineStatus(alive=True, unreachable_peers=tuple(unreachable)),
            signals=tuple(host.signals),
            ranks=[w.status(self.now) for w in live],
            steps=[
                RankSteps(w.placement.job, w.placement.generation, w.rank, w.done[0][0], tuple(t for _, t in w.done))
                for w in live
                if w.done
            ],
            copies=host.inventory(),
        )
        for worker in live:
            worker.done = []
        self.inbox += host.signals
        host.signals = []
        self.raise_(self.detector.observe(sent, self.now))
        self.store.report(sent, self.now)

    # --- training ---

    def train(self) -> None:
        groups: dict[tuple[str, int], list[tuple[SmallHost, Worker]]] = {}
        for host in self.hosts.values():
            for worker in host.workers.values() if host.alive else ():
                if worker.alive:
                    key = (worker.placement.job, worker.placement.generation)
                    groups.setdefault(key, []).append((host, worker))
        for key, members in sorted(groups.items()):
            self.train_group(key, members)

    def train_group(self, key: tuple[str, int], members: list[tuple[SmallHost, Worker]]) -> None:
        placement = members[0][1].placement
        started = {w.rank for _, w in members}
        if any(self.now < worker.ready_at for _, worker in members):
            return
        if len(started) < placement.world_size:
            if any(w.phase is not Phase.STARTING for _, w in members) or key in self.next_step_at:
                for host, worker in members:  # some rank is gone: the others notice at once
                    if not worker.hung and worker.phase is not Phase.PARKED:
                        self.end(host, worker, exit_code=1, signal_number=None, error=CONNECTION_LOST)
            return
        if any(worker.hung for _, worker in members):
            return
        if key not in self.next_step_at:
            for _, worker in members:
                worker.phase = Phase.STEP
                worker.moved_at = self.now
            self.next_step_at[key] = self.now + STEP_S
            return
        if self.now < self.next_step_at[key] - 1e-9:
            return
        if any(worker.phase is Phase.PARKED for _, worker in members):
            return
        self.next_step_at[key] = self.now + STEP_S
        base = placement.restore.step if placement.restore else -1
        step = max(base, *(w.step for _, w in members)) + 1
        if step in self.fails_at:
            host, worker = members[-1]
            self.end(host, worker, exit_code=1, signal_number=None, error=self.fails_at[step], kind="ValueError")
            return
        if step > self.last_step:
            for host, worker in members:
                self.end(host, worker, exit_code=0, signal_number=None)
            return
        for host, worker in members:
            worker.step = step
            worker.moved_at = self.now
            worker.done.append((step, self.now))
            self.save(host, worker, step)
            if worker.parks_at == step:
                worker.phase = Phase.PARKED

    def save(self, host: SmallHost, worker: Worker, step: int) -> None:
        placement = worker.placement
        for keeper, tier in [(host.name, Tier.MEMORY), *((p, Tier.PEER) for p in placement.peers.get(host.name, ()))]:
            if self.hosts[keeper].alive and not self.hosts[keeper].cut_off:
                self.hosts[keeper].keep(
                    ShardCopy(placement.job, placement.generation, step, worker.rank, tier, keeper, 10, "d")
                )

    def end(
        self,
        host: SmallHost,
        worker: Worker,
        *,
        exit_code: int | None,
        signal_number: int | None,
        error: str = "",
        kind: str = "RuntimeError",
        expected: bool = False,
    ) -> None:
        worker.alive = False
        body = WorkerExited(
            job=worker.placement.job,
            generation=worker.placement.generation,
            rank=worker.rank,
            pid=worker.pid,
            exit_code=exit_code,
            signal_number=signal_number,
            last_step=worker.step,
            error=WorkerError(kind, error) if error else None,
            expected=expected,
        )
        self.spool(host, body)

    # --- the daemon's side of commands ---

    def obey(self, host: SmallHost) -> None:
        if host.cut_off:
            return
        for action in list(self.store.actions.values()):
            for record in action.commands:
                command = record.command
                final = record.update is not None and record.update.state is not UpdateState.ACKNOWLEDGED
                if command.host_id != host.name or action.state.ended or final:
                    continue
                if self.random.random() < 0.3:
                    continue  # still being delivered
                if command.command_id not in host.obeyed:
                    host.obeyed[command.command_id] = self.carry(host, command)
                self.store.answer(host.obeyed[command.command_id])

    def update(self, host: SmallHost, command: Command, state: UpdateState, **more: object) -> CommandUpdate:
        return CommandUpdate(command.command_id, host.name, host.incarnation, state, self.now, **more)  # type: ignore[arg-type]  # test helper

    def carry(self, host: SmallHost, command: Command) -> CommandUpdate:
        body = command.body
        if isinstance(body, WarmUp):
            return self.update(host, command, UpdateState.SUCCEEDED)
        if command.fence < host.fence:
            return self.update(host, command, UpdateState.REFUSED, code="stale_command")
        host.fence = command.fence
        match body:
            case StopWorkers() | EndJob():
                positions = tuple(RankPosition(w.rank, w.step) for w in host.workers.values())
                for worker in host.workers.values():
                    if worker.alive and worker.placement.generation <= body.generation:
                        self.end(host, worker, exit_code=None, signal_number=9, expected=True)
                host.saving = []
                result = CommandResult(positions=positions, copies=host.inventory(), free_port=29_501)
                return self.update(host, command, UpdateState.SUCCEEDED, result=result)
            case StartWorkers(placement=placement):
                self.start(host, placement)
                return self.update(host, command, UpdateState.SUCCEEDED)
            case SaveEmergency():
                live = [w for w in host.workers.values() if w.alive]
                if any(w.step >= body.step for w in live):
                    positions = tuple(RankPosition(w.rank, w.step) for w in live)
                    return self.update(
                        host, command, UpdateState.FAILED, code="too_late", result=CommandResult(positions=positions)
                    )
                for worker in live:
                    worker.parks_at = body.step
                    if worker.phase is Phase.PARKED:
                        worker.phase = Phase.STEP
                host.saving.append(command)
                return self.update(host, command, UpdateState.ACKNOWLEDGED)
            case FlushState():
                if body.disarm:
                    host.saving = []
                    for worker in host.workers.values():
                        worker.parks_at = -1
                        if worker.alive and worker.phase is Phase.PARKED:
                            worker.phase = Phase.STEP
                return self.update(host, command, UpdateState.SUCCEEDED)
        raise AssertionError(body)

    def finish_saves(self, host: SmallHost) -> None:
        for command in list(host.saving):
            body = command.body
            assert isinstance(body, SaveEmergency)
            live = [w for w in host.workers.values() if w.alive]
            if live and all(w.phase is Phase.PARKED and w.step == body.step for w in live):
                host.saving.remove(command)
                host.obeyed[command.command_id] = self.update(host, command, UpdateState.SUCCEEDED)
            elif self.now - host.obeyed[command.command_id].at >= body.deadline_s:
                host.saving.remove(command)
                host.obeyed[command.command_id] = self.update(host, command, UpdateState.FAILED, code="not_saved")

    def start(self, host: SmallHost, placement: Placement) -> None:
        mine = placement.host(host.name)
        assert mine is not None
        for worker in host.workers.values():
            if worker.alive:
                self.end(host, worker, exit_code=None, signal_number=9, expected=True)
        host.workers = {}
        host.placement = placement
        if host.name == placement.hosts[0].host_id:
            self.restored.append((placement.generation, placement.restore.step if placement.restore else None))
        for rank in mine.ranks:
            if placement.restore is not None:
                self.fetch(host, placement, rank)
            self.pids += 1
            host.workers[rank] = Worker(rank, placement, self.pids, self.now)

    def fetch(self, host: SmallHost, placement: Placement, rank: int) -> None:
        restore = placement.restore
        assert restore is not None
        for source in restore.sources[str(rank)]:
            holder = self.hosts[source.host_id]
            found = [
                copy
                for copy in holder.inventory()
                if (copy.generation, copy.step, copy.rank, copy.tier)
                == (source.generation, restore.step, rank, source.tier)
            ]
            if holder.alive and found and (holder is host or source.engine_address == f"{holder.name}:7000"):
                host.keep(msgspec.structs.replace(found[0], tier=Tier.MEMORY, host_id=host.name))
                return
        raise AssertionError(f"rank {rank} cannot have step {restore.step} from any of {restore.sources[str(rank)]}")
