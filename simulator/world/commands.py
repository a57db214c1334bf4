"""How a simulated daemon obeys commands. The daemon's own rules decide; only the execution is simulated.

Journal and fences are on the host's disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from flyball.contracts.decisions import (
    CheckHost,
    Command,
    CommandBody,
    CommandResult,
    CommandUpdate,
    EndJob,
    FlushState,
    RankPosition,
    SaveEmergency,
    StartWorkers,
    StopWorkers,
    UpdateState,
)
from flyball.contracts.errors import FlyballError, NotFound, PortInUse, StorageFull
from flyball.contracts.identity import Fence
from flyball.contracts.reports import standings
from flyball.contracts.reports.grant_seals import GrantSeal
from flyball.contracts.reports.host_checks import CheckMeasure, CheckStage
from flyball.contracts.reports.signals import WorkerStartFailed
from flyball.contracts.reports.standings import HeldJob
from host_daemon.orders.commands import gives_way, job_of
from host_daemon.orders.job_control import ENGINE_RETURN_S
from host_daemon.orders.job_ends import AGAIN_S, ENGINE_WAIT_S
from host_daemon.store.command_journal import CommandAdmission, admit, needs_room
from simulator.checks.history import Obeyed, StartFailed
from simulator.world.training import SIGKILL, ProcessEnd, SimulatedGeneration, SimulatedWorker

if TYPE_CHECKING:
    from simulator.world.host import Host


_FULL = "The state database cannot be written."


class _Running(msgspec.Struct, eq=False):
    command: Command
    began_at: float
    resumed: bool = False  # an earlier daemon began it, or its answer could not be stored
    step: int = -1  # step that an emergency save waits for


class Commands:
    """The commands of one host."""

    def __init__(self, host: Host) -> None:
        self._host, self._world = host, host.world
        self._pids = 1000
        # survives on disk:
        self._answers: dict[str, CommandUpdate | None] = {}  # by id of a command that was begun
        self._fences: dict[str, Fence] = {}
        self._engine_fences: dict[str, Fence] = {}
        self.obeyed = standings.LastObeyed()
        self.ended: dict[str, int] = {}  # job -> generation
        self.end_seals: dict[str, GrantSeal] = {}  # likewise: of the generation in which the host was placed
        self._jobs: dict[str, tuple[StartWorkers, Fence]] = {}  # newest per job
        self._owed: dict[str, tuple[Command, EndJob]] = {}  # ended jobs whose memory the engine has yet to free
        self._ran_s: dict[int, float] = {}  # generation that is not stopped -> the longest that an ended rank ran
        # does not, unless there is room:
        self._unrecorded: dict[str, tuple[StartWorkers, Fence]] = {}  # ended jobs that the disk still has
        self.restart()

    def restart(self) -> None:
        """Another daemon begins."""
        self._running: dict[str, _Running] = {}
        self._stopped_ran_s = 0.0  # the longest that a rank of the newest generation had run when it was stopped
        self.outgoing: dict[str, CommandUpdate] = {}  # not known to have arrived
        if self._host.is_disk_full:
            for job, held in self._unrecorded.items():
                self._jobs[job] = held
                self._owed.pop(job, None)
                self.ended.pop(job, None)
        self._unrecorded = {}
        if self._owed:
            self._world.after(AGAIN_S, self._host.while_alive(self._complete_ends))

    def delivered(self, update: CommandUpdate) -> None:
        """The control plane received a reply."""
        if self.outgoing.get(update.command_id) is update:
            del self.outgoing[update.command_id]

    def held(self) -> tuple[HeldJob, ...]:
        """The jobs of this host."""
        held = []
        for body, fence in self._jobs.values():
            generation = body.placement.generation
            live = {rank: worker for (of, rank), (_, worker) in self._host.workers.items() if of == generation}
            known = self._ran_s.get(generation, self._stopped_ran_s)
            ran_s = [known, *(self._world.now - worker.began_at for worker in live.values())]
            held.append(HeldJob(body.spec, body.placement, fence, tuple(sorted(live)), max(ran_s), body.seal))
        return tuple(held)

    def worker_ended(self, generation: int, worker: SimulatedWorker) -> None:
        """A rank of this host ended."""
        self._ran_s[generation] = max(self._ran_s.get(generation, 0.0), self._world.now - worker.began_at)

    def obey(self, command: Command, cluster: str) -> None:
        """Execute a command from an actuator; it may be a repeat."""
        if not self._host.is_daemon_up or command.command_id in self._running:
            return
        job = job_of(command.body)
        answer = self._answers.get(command.command_id)
        is_known = command.command_id in self._answers
        admission = admit(command.fence, self._fences.get(job), is_known=is_known, answer=answer)
        if admission is CommandAdmission.ANSWERED and answer is not None:
            self._send(msgspec.structs.replace(answer, incarnation=self._host.incarnation))
            return
        if admission is CommandAdmission.STALE:
            self._answer(command, UpdateState.REFUSED, code="stale_command")
            return
        if admission is CommandAdmission.NEW and self._host.is_disk_full and needs_room(command.body):
            self._deny(command, StorageFull.code, _FULL)
            return
        self._fences[job] = command.fence
        self._answers.setdefault(command.command_id, None)
        if admission is CommandAdmission.NEW:
            self.obeyed = self.obeyed.after(command, cluster)
        kind, resumed = type(command.body).__name__, admission is CommandAdmission.RESUMED
        self._world.note(
            Obeyed(self._world.now, self._host.host_id, job, command.command_id, kind, command.fence, resumed)
        )
        for other in [r for r in self._running.values() if gives_way(r.command, command)]:
            self._answer(other.command, UpdateState.FAILED, code="superseded", message="A newer command replaced it.")
        running = self._running[command.command_id] = _Running(command, self._world.now, resumed)
        self._begin(running)

    def _deny(self, command: Command, code: str, message: str) -> None:
        if isinstance(command.body, StartWorkers):
            self._note_failed_start(command.body, code)
        at, host = self._host.clock.wall_s(), self._host
        self._send(
            CommandUpdate(command.command_id, host.host_id, host.incarnation, UpdateState.FAILED, at, message, code)
        )

    def _begin(self, running: _Running) -> None:
        """Execute the commands of a job one after the other."""
        command = running.command
        if self._running.get(command.command_id) is not running:
            return
        if self._world.now - running.began_at > command.deadline_s:
            self._answer(command, UpdateState.FAILED, code="timed_out", message="Not done in time.")
            return
        earlier = next(r for r in self._running.values() if job_of(r.command.body) == job_of(command.body))
        if earlier is not running:
            self._world.after(0.05, self._host.while_alive(lambda: self._begin(running)))
            return
        body, uniform = command.body, self._world.rng.uniform
        match body:
            case StopWorkers():
                self._end_workers(body.generation)
                self._world.after(uniform(0.05, 0.8), self._host.while_alive(lambda: self._list_copies(running, body)))
            case EndJob():
                self._end_workers(body.generation)
                self._world.after(uniform(0.05, 0.8), self._host.while_alive(lambda: self._end_job(running, body)))
            case StartWorkers() if running.resumed:
                self._answer_resumed_start(running, body)
            case StartWorkers():
                self._begin_start(running, body)
            case SaveEmergency() | FlushState():
                self._ask_engine(running, body)
            case _:
                self._finish_after(uniform(0.05, 0.5), running, lambda: self._look(body))

    def _begin_start(self, running: _Running, body: StartWorkers) -> None:
        self._end_workers(body.placement.generation - 1)
        self._jobs[body.spec.job] = body, running.command.fence
        self._engine_obeys(running.command)
        self._stopped_ran_s = 0.0
        self.ended.pop(body.spec.job, None)
        self.end_seals.pop(body.spec.job, None)
        self._unrecorded.pop(body.spec.job, None)
        problem = self._start_problem(body)
        if problem is None:
            self._finish_after(self._world.rng.uniform(0.05, 0.5), running, lambda: self._start(body))
        else:
            self._fail_start(running, body, problem)

    def _ask_engine(self, running: _Running, body: SaveEmergency | FlushState) -> None:
        is_fenced = isinstance(body, SaveEmergency) or body.disarm
        if is_fenced and not self._engine_obeys(running.command):
            self._answer(running.command, UpdateState.FAILED, code=StorageFull.code, message=_FULL)
            return
        if isinstance(body, SaveEmergency):
            self._arm(running, body)
            return
        if body.disarm:
            for group in list(self._world.groups.values()):
                group.release(self._host.host_id)
        self._finish_after(self._world.rng.uniform(0.05, 0.5), running, CommandResult)

    def _end_job(self, running: _Running, body: EndJob) -> None:
        """Free the job's memory and forget it. On a full disk this is recorded later."""
        if self._running.get(running.command.command_id) is not running:
            return
        if not self._host.is_engine_up and self._world.now - running.began_at < ENGINE_WAIT_S:
            self._world.after(0.2, self._host.while_alive(lambda: self._end_job(running, body)))
            return
        result = CommandResult(positions=self._positions(body.generation))
        held = self._jobs.pop(body.job, None)
        self.ended[body.job] = body.generation
        if held is not None:
            self.end_seals[body.job] = held[0].seal
        self._owed[body.job] = running.command, body
        if self._host.is_disk_full and held is not None:
            self._unrecorded[body.job] = held
        self._complete_ends()
        if self._host.is_disk_full and body.job in self._owed:
            self._answer(running.command, UpdateState.FAILED, code=StorageFull.code, message=_FULL, result=result)
        else:
            self._answer(running.command, UpdateState.SUCCEEDED, result=result)

    def _complete_ends(self) -> None:
        """Free and record what is left of jobs that ended: again and again, as the daemon."""
        for job, (command, body) in list(self._owed.items()):
            if job in self._jobs:  # it runs again and owns the memory
                del self._owed[job]
            elif self._host.is_engine_up and self._engine_obeys(command):
                del self._owed[job]
                if not body.keep_memory:
                    self._world.free(job, self._host.host_id)
        if not self._host.is_disk_full:
            self._unrecorded = {}
        if self._owed or self._unrecorded:
            self._world.after(AGAIN_S, self._host.while_alive(self._complete_ends))

    def _engine_obeys(self, command: Command) -> bool:
        """Whether the engine takes this command. It writes a newer fence down first, and has no room in reserve."""
        job = job_of(command.body)
        known = self._engine_fences.get(job)
        if self._host.is_disk_full and (known is None or known < command.fence):
            return False
        self._engine_fences[job] = command.fence
        return True

    def _answer_resumed_start(self, running: _Running, body: StartWorkers) -> None:
        """As the daemon: what ran when it was killed runs on, and the rest never did anything."""
        part, generation = body.placement.host(self._host.host_id), body.placement.generation
        ranks = part.ranks if part is not None else ()
        if all((generation, rank) in self._host.workers for rank in ranks):
            self._answer(running.command, UpdateState.SUCCEEDED)
        else:
            self._answer(running.command, UpdateState.FAILED, code="interrupted", message="Not all ranks run.")

    def _start_problem(self, body: StartWorkers) -> FlyballError | None:
        part = body.placement.host(self._host.host_id)
        if not self._host.has_files:
            return NotFound("The script does not exist on this host.")
        if part is not None and 0 in part.ranks and self._world.ports_taken:
            self._world.ports_taken -= 1
            return PortInUse("MASTER_PORT was taken.")
        return None

    def _fail_start(self, running: _Running, body: StartWorkers, problem: FlyballError) -> None:
        host, placement = self._host, body.placement
        self._note_failed_start(body, problem.code)
        part = placement.host(host.host_id)
        for rank in part.ranks if part is not None else ():
            host.put(WorkerStartFailed(placement.job, placement.generation, rank, str(problem), problem.code))
        self._answer(running.command, UpdateState.FAILED, code=problem.code, message=str(problem))

    def _note_failed_start(self, body: StartWorkers, code: str) -> None:
        placement = body.placement
        self._world.note(StartFailed(self._world.now, self._host.host_id, placement.job, placement.generation, code))

    def _finish_after(self, delay_s: float, running: _Running, work: Callable[[], CommandResult]) -> None:
        def finish() -> None:
            if self._running.get(running.command.command_id) is running:
                self._answer(running.command, UpdateState.SUCCEEDED, result=work())

        self._world.after(delay_s, self._host.while_alive(finish))

    def _end_workers(self, upto_generation: int) -> None:
        """Kill this host's ranks of these generations; their beacons keep their positions."""
        for group, worker in list(self._host.workers.values()):
            if group.generation <= upto_generation:
                self._world.exit(group, worker, ProcessEnd(signal_number=SIGKILL, is_expected=True))
        self._host.engine.end(upto_generation)
        stopped = [ran_s for of, ran_s in self._ran_s.items() if of <= upto_generation]
        self._stopped_ran_s = max([self._stopped_ran_s, *stopped])
        self._ran_s = {of: ran_s for of, ran_s in self._ran_s.items() if of > upto_generation}

    def _list_copies(self, running: _Running, body: StopWorkers) -> None:
        """Reply to a stop with all copies.

        Without the list the job would go on from an older step, so wait for an engine that is away, and finally report
        it unreachable.
        """
        if self._running.get(running.command.command_id) is not running:
            return
        if self._host.is_engine_up:
            self._answer(running.command, UpdateState.SUCCEEDED, result=self._inventory(body))
        elif self._world.now - running.began_at > ENGINE_RETURN_S:
            self._answer(running.command, UpdateState.FAILED, code="unreachable", message="The engine is away.")
        else:
            self._world.after(0.2, self._host.while_alive(lambda: self._list_copies(running, body)))

    def _inventory(self, body: StopWorkers) -> CommandResult:
        return CommandResult(
            positions=self._positions(body.generation),
            copies=self._host.reported_copies(body.history.lineage if body.history is not None else None),
            free_port=29501,
        )

    def _positions(self, generation: int) -> tuple[RankPosition, ...]:
        group = self._world.groups.get(generation)
        beacons = group.beacons.get(self._host.host_id, {}) if group is not None else {}
        return tuple(RankPosition(rank, step) for rank, step in sorted(beacons.items()))

    def _start(self, body: StartWorkers) -> CommandResult:
        part = body.placement.host(self._host.host_id)
        pids = {}
        for rank in part.ranks if part is not None else ():
            if (body.placement.generation, rank) in self._host.workers:
                continue  # an earlier daemon had started it
            self._pids += 1
            pids[str(rank)] = self._pids
            worker = self._world.begin(body.placement, self._host.host_id, rank, self._pids)
            self._host.workers[body.placement.generation, rank] = (
                self._world.groups[body.placement.generation],
                worker,
            )
        return CommandResult(pids=pids)

    def _look(self, body: CommandBody) -> CommandResult:
        """A check finds the devices well, but an all-reduce needs all hosts of the group. Other looks find nothing."""
        if not isinstance(body, CheckHost):
            return CommandResult()
        is_whole = all(self._world.hosts[name].is_daemon_up for name in body.group)
        failed = None if is_whole else CheckStage.GROUP
        measure = CheckMeasure(self._host.host_id, body.round, body.group, 1, 0.1, 0.1, failed=failed)
        return CommandResult(check=measure, free_port=29501)

    def _arm(self, running: _Running, body: SaveEmergency) -> None:
        group = self._world.groups.get(body.generation)
        positions = tuple(RankPosition(w.rank, w.step) for g, w in self._host.workers.values() if g is group)
        if group is None or not positions:
            self._answer(running.command, UpdateState.FAILED, code="no_workers", message="No rank is here.")
        elif group.park(self._host.host_id, body.step):
            self._answer(running.command, UpdateState.ACKNOWLEDGED)
            self._watch_save(running, group, body)
        else:
            result = CommandResult(positions=positions)
            self._answer(running.command, UpdateState.FAILED, code="too_late", result=result)

    def _watch_save(self, running: _Running, group: SimulatedGeneration, body: SaveEmergency) -> None:
        if self._running.get(running.command.command_id) is not running:
            return
        if group.has_saved(body.step):
            self._answer(running.command, UpdateState.SUCCEEDED)
        elif self._world.now - running.began_at > body.deadline_s:
            self._answer(running.command, UpdateState.FAILED, code="timed_out", message="The step was not saved.")
        else:
            self._world.after(0.2, self._host.while_alive(lambda: self._watch_save(running, group, body)))

    def _answer(
        self,
        command: Command,
        state: UpdateState,
        *,
        code: str = "",
        message: str = "",
        result: CommandResult = CommandResult(),  # noqa: B008 - frozen
    ) -> None:
        at = self._host.clock.wall_s()
        update = CommandUpdate(
            command.command_id, self._host.host_id, self._host.incarnation, state, at, message, code, result
        )
        if not self._host.is_disk_full:
            self._answers[command.command_id] = update
        if state is not UpdateState.ACKNOWLEDGED:
            self._running.pop(command.command_id, None)
        self._send(update)

    def _send(self, update: CommandUpdate) -> None:
        self.outgoing[update.command_id] = update
        self._host.control.reply(self._host, update)
