"""A simulated host: a daemon with spool and journal on disk, the engine's slots, and the ranks that run on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from flyball.contracts.checkpoints import Lineage, ShardCopy
from flyball.contracts.cluster import HostFacts, RankStatus, WorkerError
from flyball.contracts.decisions import CommandUpdate
from flyball.contracts.reports.rank_columns import RankSteps, in_columns, steps_together
from flyball.contracts.reports.signals import (
    EngineRestarted,
    EngineStatus,
    PreemptionNotice,
    Report,
    ReportReply,
    Signal,
    SignalBody,
    WorkerExited,
)
from flyball.contracts.reports.standings import HostStanding
from flyball.contracts.reports.succession import MAX_PREDECESSORS
from flyball.contracts.reports.testimony import Testimony
from flyball.contracts.wire import WIRE_VERSION
from host_daemon.link.reporting import TOUCH_INTERVALS
from host_daemon.store.outbox import BATCH, MAX_KEPT, went_back
from services.actuator.ports import Judgement
from simulator.world.commands import Commands
from simulator.world.conditions import Conditions
from simulator.world.events import MachineClock
from simulator.world.store import STORE
from simulator.world.storing import StoreContact
from simulator.world.training import ProcessEnd, SimulatedGeneration, SimulatedWorker
from simulator.world.world import World

INTERVAL_S = 1.0
RESEND_AFTER_S = 1.0
FLOOD_AT_ONCE, FLOOD_EVERY_S = 150, 0.25  # three times a host's limit
POLL_S = 0.5
SENSOR, ACTUATOR = "sensor", "actuator"  # the control-plane ends of a host's links
LINK_LOST_AFTER_S = 1.0  # an engine's connection survives a shorter cut


class ControlPlane(Protocol):
    """The services that a daemon reaches over the network. Each call arrives later, or never."""

    def report(self, host: Host, report: Report) -> None: ...

    def poll(self, host: Host) -> None: ...

    def reply(self, host: Host, update: CommandUpdate) -> None: ...

    def send_standing(self, host: Host, standing: HostStanding) -> None: ...


class Host:
    def __init__(self, world: World, control: ControlPlane, host_id: str, domain: str, clock: MachineClock) -> None:
        self.world, self.control, self.host_id, self.domain, self.clock = world, control, host_id, domain, clock
        self.copies: list[ShardCopy] = []
        self.workers: dict[tuple[int, int], tuple[SimulatedGeneration, SimulatedWorker]] = {}  # by generation and rank
        self.is_up = True
        self.is_daemon_up = False
        self.is_engine_up = True
        self.is_paused = False
        self._put_off: list[Callable[[], None]] = []  # until the host is resumed
        self.has_files = True
        self.is_disk_full = False
        self.keeps_saves = True
        self.engine = StoreContact()
        self._up_since = world.now
        self.switched_at = 0.0  # when it last went down or came up
        # survives on disk:
        self._incarnations = 0
        self.incarnation = ""
        self.predecessors: tuple[str, ...] = ()
        self._spool: dict[tuple[str, int], Signal] = {}
        self._kept: dict[tuple[str, int], Signal] = {}  # committed, and kept
        self._has_gap = False
        self._unseen_exits: list[tuple[SimulatedGeneration, SimulatedWorker]] = []  # ended while no daemon ran
        self.conditions = Conditions(self)
        self._database = ""  # incarnation of the database that replied last
        self.commands = Commands(self)
        self.start_daemon()

    # --- the machine -------------------------------------------------------------------------------------------------

    def go_down(self) -> None:
        """Lose everything in memory."""
        self.is_up, self.switched_at = False, self.world.now
        self.kill_daemon()
        self.copies.clear()
        if self.engine.part is not None:
            self.engine.part.ended.set()
        self.engine = StoreContact()
        self._unseen_exits.clear()
        for group, worker in self.workers.values():
            self.commands.worker_ended(group.generation, worker)
        self.workers.clear()

    def come_up(self) -> None:
        """Boot."""
        self.is_up, self.is_paused = True, False
        self._up_since = self.switched_at = self.world.now
        self.is_engine_up = True
        self.start_daemon()

    def pause(self) -> None:
        """Stop every process where it is, as a snapshot of a virtual machine does."""
        self.is_paused = True

    def resume(self) -> None:
        """Continue as if nothing had happened."""
        if self.is_paused:
            self.is_paused, self._up_since = False, self.world.now
            put_off, self._put_off = self._put_off, []
            for happening in put_off:
                happening()

    def stop_engine(self) -> None:
        """End the engine's process; its slots stay in shared memory."""
        self.is_engine_up = False

    def start_engine(self) -> None:
        """Start another engine, which takes over the slots."""
        self.is_engine_up = True
        self._up_since = self.world.now

    def in_reach_for_s(self) -> float:
        """How long it has been up with every link to and from it open."""
        if not (self.is_up and self.is_daemon_up and self.is_engine_up) or self.is_paused:
            return 0.0
        others = [name for name in self.world.hosts if name != self.host_id]
        if any(not self.world.network.are_joined(self.host_id, other) for other in (*others, SENSOR, ACTUATOR)):
            return 0.0
        return self.world.now - max(self._up_since, self.world.network.healed_at)

    def in_touch_for_s(self, other: Host) -> float:
        """How long both machines and their daemons have been up, with an open link between them."""
        are_up = all(host.is_daemon_up and not host.is_paused for host in (self, other))
        if not are_up or not self.world.network.are_joined(self.host_id, other.host_id):
            return 0.0
        return self.world.now - max(self._up_since, other._up_since, self.world.network.healed_at)

    # --- the daemon --------------------------------------------------------------------------------------------------

    def start_daemon(self) -> None:
        """Start a daemon on the state left by the previous one."""
        if not self.is_up or self.is_daemon_up:
            return
        self.is_daemon_up = True
        self._up_since = self.world.now
        self.predecessors = (self.incarnation, *self.predecessors)[:MAX_PREDECESSORS] if self.incarnation else ()
        self._incarnations += 1
        self.incarnation = f"{self.host_id}-{self._incarnations}"
        self._seq = self._report_seq = self._replied_seq = 0
        self._report_at: dict[int, float] = {}  # reports without a reply
        self._sent_at: dict[tuple[str, int], float] = {}
        self._asked: tuple[str, ...] = ()
        self._committed: dict[str, int] = {}
        self._send_again()  # a new daemon resends everything in its spool
        self._answered_at = self.world.now
        self.commands.restart()
        for group, worker in self._unseen_exits:
            self._report_exit(group, worker, ProcessEnd())
        self._unseen_exits = []
        self.conditions.report()
        alive = self.while_alive
        self.world.after(self.world.rng.uniform(0.0, INTERVAL_S), alive(self._report_for_ever))
        self.world.after(self.world.rng.uniform(0.0, POLL_S), alive(self._poll_for_ever))

    def kill_daemon(self) -> None:
        """End the daemon; the ranks live on."""
        self.is_daemon_up = False

    def while_alive(self, happening: Callable[[], None]) -> Callable[[], None]:
        """Wrap an event: dropped once this daemon is gone, postponed while it is paused."""
        mine = self.incarnation

        def happen() -> None:
            if not self.is_daemon_up or self.incarnation != mine:
                return
            if self.is_paused:
                self._put_off.append(happen)
            else:
                happening()

        return happen

    def repeat(self, is_meant: Callable[[SignalBody], bool]) -> None:
        """As the daemon's outbox does."""
        for key, signal in self._spool.items():
            if is_meant(signal.body):
                self._sent_at.pop(key, None)

    def put(self, body: SignalBody) -> None:
        """Spool a signal, and report at once."""
        self._spool_signal(body)
        self.world.after(0.005, self.while_alive(self.send_report))

    def _spool_signal(self, body: SignalBody) -> None:
        self._seq += 1
        signal = Signal(self.host_id, self.incarnation, self._seq, self.clock.wall_s(), body)
        self._spool[signal.incarnation, signal.seq] = signal

    def flood(self, until: float) -> None:
        """Spool more signals than a host may send, and keep reporting, until then."""
        for _ in range(FLOOD_AT_ONCE):
            self._spool_signal(EngineRestarted("again"))
        self.send_report()
        if self.world.now < until:
            self.world.after(FLOOD_EVERY_S, self.while_alive(lambda: self.flood(until)))

    def notice(self, remaining_s: float) -> None:
        """Report that the host will be taken away."""
        if self.is_daemon_up:
            self.put(PreemptionNotice(self.clock.wall_s() + remaining_s, "a simulated cloud"))

    def worker_ended(self, group: SimulatedGeneration, worker: SimulatedWorker, ending: ProcessEnd) -> None:
        """A worker of this host ended."""
        self.workers.pop((group.generation, worker.rank), None)
        self.commands.worker_ended(group.generation, worker)
        if self.is_daemon_up:
            self._report_exit(group, worker, ending)
        elif self.is_up:
            self._unseen_exits.append((group, worker))

    def _report_exit(self, group: SimulatedGeneration, worker: SimulatedWorker, ending: ProcessEnd) -> None:
        self.put(
            WorkerExited(
                job=group.job,
                generation=group.generation,
                rank=worker.rank,
                pid=worker.pid,
                exit_code=ending.exit_code,
                signal_number=ending.signal_number,
                last_step=worker.step,
                error=WorkerError("RuntimeError", ending.message) if ending.message else None,
                expected=ending.is_expected,
                last_phase=worker.phase,
            )
        )

    @property
    def has_uncommitted(self) -> bool:
        """Whether the spool holds signals that no controller has committed."""
        return bool(self._spool)

    # --- reports -----------------------------------------------------------------------------------------------------

    def _report_for_ever(self) -> None:
        self.send_report()
        self.world.after(INTERVAL_S, self.while_alive(self._report_for_ever))

    def send_report(self) -> None:
        """Report everything known on this host."""
        now = self.world.now
        due = [key for key in self._spool if now - self._sent_at.get(key, 0.0) >= RESEND_AFTER_S][:BATCH]
        self._sent_at.update(dict.fromkeys(due, now))
        self._report_seq += 1
        self._report_at[self._report_seq] = now
        mine = list(self.workers.values())
        workers, progress = in_columns(self._status(group, worker) for group, worker in mine)
        self.control.report(
            self,
            Report(
                version=WIRE_VERSION,
                incarnation=self.incarnation,
                sent_at=self.clock.wall_s(),
                interval_s=INTERVAL_S,
                facts=self._facts(),
                engine=EngineStatus(
                    alive=self.is_engine_up, unreachable_peers=self._unreachable(mine), testimonies=self._testimonies()
                ),
                signals=tuple(self._spool[key] for key in due),
                workers=workers,
                progress=progress,
                completed=steps_together(self._steps(group, worker) for group, worker in mine),
                copies=self.reported_copies(),
                succeeds=self.predecessors,
                seq=self._report_seq,
            ),
        )

    def replied(self, reply: ReportReply, seq: int) -> None:
        """Drop committed signals and remember which peers were asked about. `seq`: of the report."""
        if seq > self._replied_seq:
            self._asked, self._replied_seq = reply.ask, seq
            self.engine.touched_until = self._report_at.pop(seq, 0.0) + TOUCH_INTERVALS * INTERVAL_S
            self._report_at = {later: at for later, at in self._report_at.items() if later > seq}
            self.engine.stored_points = reply.stored_points or self.engine.stored_points
        if went_back(self._committed, reply.committed):
            self._send_again()
        self._committed.update(reply.committed)
        for key in [key for key in self._spool if key[1] <= reply.committed.get(key[0], 0)]:
            self._kept[key] = self._spool.pop(key)
            self._sent_at.pop(key, None)
        for key in list(self._kept)[: max(0, len(self._kept) - MAX_KEPT)]:
            del self._kept[key]
        if reply.committed:
            forgotten = self._forgotten()
            self._has_gap = any(upto < forgotten.get(one, 0) for one, upto in reply.committed.items())

    def poll_answered(self, judged: Judgement) -> None:
        """Remember who answered a poll; send the host's standing if the database lacks it."""
        obeyed = self.commands.obeyed
        if judged.cluster == obeyed.cluster or not obeyed.cluster:
            self._answered_at = self.world.now
        if judged.incarnation != self._database:
            if self._database:
                self._send_again()
                self.conditions.say_what_stands()
            self._database = judged.incarnation
        if self.host_id in judged.ahead or self.host_id in judged.asked or self._has_gap:
            self.control.send_standing(self, self._standing())

    def _send_again(self) -> None:
        self._spool, self._kept = {**self._kept, **self._spool}, {}

    def _forgotten(self) -> dict[str, int]:
        """The newest seq per incarnation that cannot be sent again, as the daemon's outbox computes it."""
        first = {self.incarnation: self._seq + 1}
        for incarnation, seq in (*self._kept, *self._spool):
            first[incarnation] = min(seq, first.get(incarnation, seq))
        return {incarnation: seq - 1 for incarnation, seq in first.items() if seq > 1}

    def _standing(self) -> HostStanding:
        return HostStanding(
            host_id=self.host_id,
            incarnation=self.incarnation,
            at=self.clock.wall_s(),
            obeyed=self.commands.obeyed,
            unanswered_s=self.world.now - self._answered_at,
            jobs=self.commands.held(),
            ended=self.commands.ended,
            end_seals=self.commands.end_seals,
            committed=self._forgotten(),
        )

    def _facts(self) -> HostFacts:
        engine_address = f"{self.host_id}:7000" if self.is_engine_up else ""
        return HostFacts(self.host_id, "10.0.0.1", self.domain, engine_address, 29500, "0", 1)

    def reported_copies(self, history: Lineage | None = None) -> tuple[ShardCopy, ...]:
        """The copies that the engine reports; with `history`, also if it does not know the job."""
        if not self.is_engine_up:
            return ()
        is_reached = self.world.network.are_joined(self.host_id, STORE)
        stored = self.engine.copies(self.world.store, is_reached=is_reached, history=history)
        part = self.engine.part
        if part is not None and part.group.storing is not None:
            part.group.storing.note_reported(stored, self.host_id)
        return (*self.copies, *stored)

    def _status(self, group: SimulatedGeneration, worker: SimulatedWorker) -> RankStatus:
        age_s = self.world.now - worker.moved_at
        doing = worker.doing(self.world.now)
        return RankStatus(
            group.job, group.generation, worker.rank, worker.pid, worker.phase, worker.step, age_s, *doing
        )

    def _steps(self, group: SimulatedGeneration, worker: SimulatedWorker) -> RankSteps:
        first = worker.new_steps[0][0] if worker.new_steps else -1
        at = tuple(at + self.clock.error_s for _, at in worker.new_steps)
        worker.new_steps = []
        return RankSteps(group.job, group.generation, worker.rank, first, at)

    def _unreachable(self, mine: list[tuple[SimulatedGeneration, SimulatedWorker]]) -> tuple[str, ...]:
        peers = {peer: None for group, _ in mine for peer in group.parts[self.host_id].peers.get(self.host_id, ())}
        return tuple(peer for peer in peers if not self._reaches(peer, LINK_LOST_AFTER_S))

    def _testimonies(self) -> tuple[Testimony, ...]:
        reached = (peer for peer in self._asked if peer in self.world.hosts and self._reaches(peer, 0.0))
        return tuple(Testimony(peer, 0.1, 0.5 if self.world.hosts[peer].is_daemon_up else None) for peer in reached)

    def _reaches(self, peer: str, patience_s: float) -> bool:
        other = self.world.hosts.get(peer)
        if other is None or not (other.is_up and other.is_engine_up and self.is_engine_up) or other.is_paused:
            return False
        joined = self.world.network.are_joined(self.host_id, peer)
        return joined or self.world.network.cut_for_s(self.host_id, peer) < patience_s

    # --- commands ----------------------------------------------------------------------------------------------------

    def _poll_for_ever(self) -> None:
        self.control.poll(self)
        for update in list(self.commands.outgoing.values()):
            self.control.reply(self, update)
        self.world.after(POLL_S, self.while_alive(self._poll_for_ever))
