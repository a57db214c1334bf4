"""A simulated host: its daemon with spool and journal on disk, its engine's slots, and the ranks that run on it.

What a daemon does about a command is decided by the daemon's own rules (`host_daemon`), carrying it out is simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from flyball.contracts.checkpoints import ShardCopy
from flyball.contracts.cluster import HostFacts, RankStatus
from flyball.contracts.decisions import (
    CommandUpdate,
)
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
from host_daemon.store.outbox import BATCH, MAX_KEPT, went_back
from services.actuator.ports import Judgement
from simulator.world.commands import Commands
from simulator.world.events import MachineClock
from simulator.world.training import RunningGeneration, SimulatedWorker, error_of

if TYPE_CHECKING:
    from simulator.world.world import World

INTERVAL_S = 1.0
RESEND_AFTER_S = 1.0
FLOOD_AT_ONCE, FLOOD_EVERY_S = 150, 0.25  # three times as much as a host may send
POLL_S = 0.5
SENSOR, ACTUATOR = "sensor", "actuator"  # the far ends of a host's links to the control plane
LINK_LOST_AFTER_S = 1.0  # a cut shorter than this leaves an engine's connection standing


class ControlPlane(Protocol):
    """What a daemon reaches over the network: each call arrives later, or never."""

    def report(self, host: Host, report: Report) -> None: ...

    def poll(self, host: Host) -> None: ...

    def answer(self, host: Host, update: CommandUpdate) -> None: ...

    def tell(self, host: Host, standing: HostStanding) -> None: ...


class Host:
    def __init__(self, world: World, control: ControlPlane, host_id: str, domain: str, clock: MachineClock) -> None:
        self.world, self.control, self.host_id, self.domain, self.clock = world, control, host_id, domain, clock
        self.copies: list[ShardCopy] = []
        self.workers: dict[tuple[int, int], tuple[RunningGeneration, SimulatedWorker]] = {}  # by generation and rank
        self.is_up = True
        self.is_daemon_up = False
        self.is_engine_up = True
        self.is_paused = False
        self._put_off: list[Callable[[], None]] = []  # until it is resumed
        self.has_files = True
        self.is_disk_full = False
        self.keeps_saves = True
        self._up_since = world.now
        # on disk
        self._incarnations = 0
        self.incarnation = ""
        self.predecessors: tuple[str, ...] = ()
        self._spool: dict[tuple[str, int], Signal] = {}
        self._kept: dict[tuple[str, int], Signal] = {}  # of those that were committed
        self._has_gap = False
        self._unseen_exits: list[tuple[RunningGeneration, SimulatedWorker]] = []  # while no daemon ran
        self.commands = Commands(self)
        self.start_daemon()

    # --- the machine -------------------------------------------------------------------------------------------------

    def go_down(self) -> None:
        """Lose what is in memory."""
        self.is_up = False
        self.kill_daemon()
        self.copies.clear()
        self._unseen_exits.clear()
        self.workers.clear()

    def come_up(self) -> None:
        """Boot."""
        self.is_up, self.is_paused = True, False
        self._up_since = self.world.now
        self.is_engine_up = True
        self.start_daemon()

    def pause(self) -> None:
        """Stop every process where it is, as for a snapshot of a virtual machine."""
        self.is_paused = True

    def resume(self) -> None:
        """Go on as if nothing had happened."""
        if self.is_paused:
            self.is_paused, self._up_since = False, self.world.now
            put_off, self._put_off = self._put_off, []
            for happening in put_off:
                happening()

    def stop_engine(self) -> None:
        """The engine's process is gone; what it holds lies in shared memory."""
        self.is_engine_up = False

    def start_engine(self) -> None:
        """Another engine takes its slots over."""
        self.is_engine_up = True
        self._up_since = self.world.now

    def has_been_in_reach_for_s(self) -> float:
        """For how long it has been up, and every link to and from it open."""
        if not (self.is_up and self.is_daemon_up and self.is_engine_up) or self.is_paused:
            return 0.0
        others = [name for name in self.world.hosts if name != self.host_id]
        if any(not self.world.network.are_joined(self.host_id, other) for other in (*others, SENSOR, ACTUATOR)):
            return 0.0
        return self.world.now - max(self._up_since, self.world.network.healed_at)

    def has_heard_for_s(self, other: Host) -> float:
        """For how long the two machines have been up, with their daemons, and joined."""
        are_up = all(host.is_daemon_up and not host.is_paused for host in (self, other))
        if not are_up or not self.world.network.are_joined(self.host_id, other.host_id):
            return 0.0
        return self.world.now - max(self._up_since, other._up_since, self.world.network.healed_at)

    # --- the daemon --------------------------------------------------------------------------------------------------

    def start_daemon(self) -> None:
        """Start a daemon on what the last one left."""
        if not self.is_up or self.is_daemon_up:
            return
        self.is_daemon_up = True
        self._up_since = self.world.now
        self.predecessors = (self.incarnation, *self.predecessors)[:MAX_PREDECESSORS] if self.incarnation else ()
        self._incarnations += 1
        self.incarnation = f"{self.host_id}-{self._incarnations}"
        self._seq = self._report_seq = self._replied_seq = 0
        self._sent_at: dict[tuple[str, int], float] = {}
        self._asked: tuple[str, ...] = ()
        self._told: dict[str, int] = {}
        self._send_again()  # a new daemon does so with all that lies there
        self._database = ""  # the incarnation of the one that answered last
        self._heard_at = self.world.now
        self.commands.restart()
        for group, worker in self._unseen_exits:
            self._exited(group, worker, exit_code=None, signal_number=None, message="", is_expected=False)
        self._unseen_exits = []
        alive = self.while_alive
        self.world.after(self.world.rng.uniform(0.0, INTERVAL_S), alive(self._report_for_ever))
        self.world.after(self.world.rng.uniform(0.0, POLL_S), alive(self._poll_for_ever))

    def kill_daemon(self) -> None:
        """End the daemon; the ranks live on."""
        self.is_daemon_up = False

    def while_alive(self, happening: Callable[[], None]) -> Callable[[], None]:
        """Nothing happens any more when this daemon is gone, and nothing yet while it is paused."""
        mine = self.incarnation

        def happen() -> None:
            if not self.is_daemon_up or self.incarnation != mine:
                return
            if self.is_paused:
                self._put_off.append(happen)
            else:
                happening()

        return happen

    def put(self, body: SignalBody) -> None:
        """Spool a signal, and report at once."""
        self._spool_signal(body)
        self.world.after(0.005, self.while_alive(self.send_report))

    def _spool_signal(self, body: SignalBody) -> None:
        self._seq += 1
        signal = Signal(self.host_id, self.incarnation, self._seq, self.clock.wall_s(), body)
        self._spool[signal.incarnation, signal.seq] = signal

    def flood(self, until: float) -> None:
        """Spool more signals than a host may send, and report again and again, until then."""
        for _ in range(FLOOD_AT_ONCE):
            self._spool_signal(EngineRestarted("again"))
        self.send_report()
        if self.world.now < until:
            self.world.after(FLOOD_EVERY_S, self.while_alive(lambda: self.flood(until)))

    def notice(self, remaining_s: float) -> None:
        """The host will be taken away."""
        if self.is_daemon_up:
            self.put(PreemptionNotice(self.clock.wall_s() + remaining_s, "a simulated cloud"))

    def worker_went(
        self,
        group: RunningGeneration,
        worker: SimulatedWorker,
        *,
        exit_code: int | None,
        signal_number: int | None,
        message: str,
        is_expected: bool,
    ) -> None:
        """A child ended."""
        self.workers.pop((group.generation, worker.rank), None)
        if self.is_daemon_up:
            self._exited(
                group,
                worker,
                exit_code=exit_code,
                signal_number=signal_number,
                message=message,
                is_expected=is_expected,
            )
        elif self.is_up:
            self._unseen_exits.append((group, worker))

    def _exited(
        self,
        group: RunningGeneration,
        worker: SimulatedWorker,
        *,
        exit_code: int | None,
        signal_number: int | None,
        message: str,
        is_expected: bool,
    ) -> None:
        self.put(
            WorkerExited(
                job=group.job,
                generation=group.generation,
                rank=worker.rank,
                pid=worker.pid,
                exit_code=exit_code,
                signal_number=signal_number,
                last_step=worker.step,
                error=error_of(message) if message else None,
                expected=is_expected,
                last_phase=worker.phase,
            )
        )

    @property
    def has_uncommitted(self) -> bool:
        """Whether the spool holds what no controller has committed."""
        return bool(self._spool)

    # --- reports -----------------------------------------------------------------------------------------------------

    def _report_for_ever(self) -> None:
        self.send_report()
        self.world.after(INTERVAL_S, self.while_alive(self._report_for_ever))

    def send_report(self) -> None:
        """Say all that is known here."""
        now = self.world.now
        due = [key for key in self._spool if now - self._sent_at.get(key, 0.0) >= RESEND_AFTER_S][:BATCH]
        self._sent_at.update(dict.fromkeys(due, now))
        self._report_seq += 1
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
                copies=self.told_copies(),
                succeeds=self.predecessors,
                seq=self._report_seq,
            ),
        )

    def replied(self, reply: ReportReply, seq: int) -> None:
        """Forget what is committed; note what is asked. `seq`: of the report."""
        if seq > self._replied_seq:
            self._asked, self._replied_seq = reply.ask, seq
        if went_back(self._told, reply.committed):
            self._send_again()
        self._told.update(reply.committed)
        for key in [key for key in self._spool if key[1] <= reply.committed.get(key[0], 0)]:
            self._kept[key] = self._spool.pop(key)
            self._sent_at.pop(key, None)
        for key in list(self._kept)[: max(0, len(self._kept) - MAX_KEPT)]:
            del self._kept[key]
        if reply.committed:
            forgotten = self._forgotten()
            self._has_gap = any(upto < forgotten.get(one, 0) for one, upto in reply.committed.items())

    def answered(self, judged: Judgement) -> None:
        """Note who answered a poll; one that asks for it is told what is known here."""
        obeyed = self.commands.obeyed
        if judged.cluster == obeyed.cluster or not obeyed.cluster:
            self._heard_at = self.world.now
        if judged.incarnation != self._database:
            if self._database:
                self._send_again()
            self._database = judged.incarnation
        if self.host_id in judged.ahead or self._has_gap:
            self.control.tell(self, self._standing())

    def _send_again(self) -> None:
        self._spool, self._kept = {**self._kept, **self._spool}, {}

    def _forgotten(self) -> dict[str, int]:
        """As the daemon's outbox has it."""
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
            unanswered_s=self.world.now - self._heard_at,
            jobs=self.commands.held(),
            ended=self.commands.ended,
            committed=self._forgotten(),
        )

    def _facts(self) -> HostFacts:
        engine_address = f"{self.host_id}:7000" if self.is_engine_up else ""
        return HostFacts(self.host_id, "10.0.0.1", self.domain, engine_address, 29500, "0", 1)

    def told_copies(self) -> tuple[ShardCopy, ...]:
        """What the engine says that it holds."""
        return tuple(self.copies) if self.is_engine_up else ()

    def _status(self, group: RunningGeneration, worker: SimulatedWorker) -> RankStatus:
        age_s = self.world.now - worker.moved_at
        doing = worker.doing(self.world.now)
        return RankStatus(
            group.job, group.generation, worker.rank, worker.pid, worker.phase, worker.step, age_s, *doing
        )

    def _steps(self, group: RunningGeneration, worker: SimulatedWorker) -> RankSteps:
        first = worker.new_steps[0][0] if worker.new_steps else -1
        at = tuple(at + self.clock.error_s for _, at in worker.new_steps)
        worker.new_steps = []
        return RankSteps(group.job, group.generation, worker.rank, first, at)

    def _unreachable(self, mine: list[tuple[RunningGeneration, SimulatedWorker]]) -> tuple[str, ...]:
        peers = {peer: None for group, _ in mine for peer in group.parts[self.host_id].peers.get(self.host_id, ())}
        return tuple(peer for peer in peers if not self._hears(peer, LINK_LOST_AFTER_S))

    def _testimonies(self) -> tuple[Testimony, ...]:
        heard = (peer for peer in self._asked if peer in self.world.hosts and self._hears(peer, 0.0))
        return tuple(Testimony(peer, 0.1, 0.5 if self.world.hosts[peer].is_daemon_up else None) for peer in heard)

    def _hears(self, peer: str, patience_s: float) -> bool:
        other = self.world.hosts.get(peer)
        if other is None or not (other.is_up and other.is_engine_up and self.is_engine_up) or other.is_paused:
            return False
        joined = self.world.network.are_joined(self.host_id, peer)
        return joined or self.world.network.cut_for_s(self.host_id, peer) < patience_s

    # --- commands ----------------------------------------------------------------------------------------------------

    def _poll_for_ever(self) -> None:
        self.control.poll(self)
        for update in list(self.commands.outgoing.values()):
            self.control.answer(self, update)
        self.world.after(POLL_S, self.while_alive(self._poll_for_ever))
