"""A job's ranks as they truly are: whether they run, what they hold, and how their hosts obey commands."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from flyball.contracts.checkpoints import ShardCopy, Tier
from flyball.contracts.cluster import Phase, Placement, WorkerError
from flyball.contracts.decisions import (
    Command,
    CommandResult,
    CommandUpdate,
    FlushState,
    GenerationPlan,
    RankPosition,
    SaveEmergency,
    StartWorkers,
    StopWorkers,
    UpdateState,
)
from flyball.contracts.events import Event
from flyball.contracts.reports.signals import SignalBody, WorkerExited
from services.controller.round.view import Fleet, Outcome, PolicySettings
from simulator.fleet import log
from simulator.fleet.control_plane import JOB, FleetControl, copy_of, reply
from simulator.fleet.hosts import TrueHost
from simulator.fleet.restore_check import RestoreCheck
from simulator.fleet.scenario import Cause, FleetScenario
from simulator.fleet.training import JobTraining, SavedStep
from simulator.world.events import BEGAN_AT, EventQueue

_ANSWER_S = 0.2  # for commands that take no time
SIGKILL = 9
Told = tuple[str, SignalBody]  # a signal, and who sends it


class JobRanks:
    """The ranks of all generations of one job. Only those of shown hosts have names."""

    def __init__(
        self,
        timeline: EventQueue,
        scenario: FleetScenario,
        hosts: Mapping[str, TrueHost],
        *,
        joined: Callable[[GenerationPlan], None],
        decided: Callable[[Outcome], None],
    ) -> None:
        self._timeline, self._scenario, self.hosts = timeline, scenario, hosts
        self._joined, self._decided = joined, decided
        self._restore_check = RestoreCheck()
        self.every_steps = max(1, round(scenario.checkpoint.every_s / scenario.job.step_s))
        self.training = JobTraining(
            step_s=scenario.job.step_s,
            every_steps=self.every_steps,
            save_s=scenario.checkpoint.save_s,
            replicate_s=scenario.checkpoint.replicate_s,
            persistent_every=scenario.checkpoint.persistent_every,
            persistent_s=scenario.checkpoint.persistent_s,
            at=timeline.now,
        )
        self.log: list[Event] = []
        self.violations: list[str] = []  # restarts that went back further than they had to
        self.running = -1  # the generation whose workers run; -1: none
        self.restoring: int | None = None  # the step from which a generation is about to go on
        self.trained: GenerationPlan | None = None  # the generation that trained last, as it is shown
        self._phase = Phase.STARTING
        self._placement: Placement | None = None
        self._copies_of: tuple[SavedStep, SavedStep, int] | None = None
        self._copies: Mapping[str, tuple[ShardCopy, ...]] = {}
        self._persistent_of: tuple[SavedStep, int] | None = None
        self._persistent: Mapping[tuple[str, int, int, int], ShardCopy] = {}
        fleet = Fleet.of(host.rack for host in hosts.values())
        self.control = FleetControl(timeline, self, PolicySettings(), fleet)

    @property
    def now(self) -> float:
        return self._timeline.now

    def _after(self, delay_s: float, happening: Callable[[], None]) -> None:
        self._timeline.after(delay_s, happening)

    # --- what the control plane sees ---------------------------------------------------------------------------------

    def is_up(self, host_id: str) -> bool:
        """Whether a host reports."""
        host = self.hosts.get(host_id)
        return host is not None and host.is_up

    def phase(self, generation: int) -> tuple[Phase, int] | None:
        """The phase and newest step of a generation's ranks; None if none runs."""
        if self.running != generation:
            return None
        return self._phase, self._reported_step

    @property
    def _reported_step(self) -> int:
        """The newest step in the beacons of the newest workers: none of their own before they have their state."""
        return -1 if self._phase is Phase.STARTING else self.training.step_at(self.now)

    def copies(self, host_id: str) -> tuple[ShardCopy, ...]:
        """The copies in a host's memory: its own rank's, and those of the hosts whose replicas it holds."""
        if not self.hosts[host_id].has_memory:
            return ()
        return self._all_copies().get(host_id, ())

    def _all_copies(self) -> Mapping[str, tuple[ShardCopy, ...]]:
        """host -> what it has in memory if that survived, by the generation that trained last."""
        own, replicas = self.training.committed_at(self.now), self.training.replicated_at(self.now)
        if (own, replicas, id(self.trained)) != self._copies_of:
            self._copies_of = own, replicas, id(self.trained)
            found: defaultdict[str, list[ShardCopy]] = defaultdict(list)
            plan = self.trained
            if plan is not None:
                for part, rank in ((of_host, rank) for of_host in plan.hosts for rank in of_host.ranks):
                    for saved in {own, replicas} - {SavedStep()}:
                        found[part.host_id].append(copy_of(saved, rank, Tier.MEMORY, part.host_id))
                    for peer in plan.peers.get(part.host_id, ()) if replicas != SavedStep() else ():
                        found[peer].append(copy_of(replicas, rank, Tier.PEER, peer))
            self._copies = {host_id: tuple(sorted(copies)) for host_id, copies in found.items()}
        return self._copies

    def persistent_copies(self) -> Mapping[tuple[str, int, int, int], ShardCopy]:
        """What the store has, by job, generation, step and rank."""
        saved = self.training.persistent_at(self.now)
        if saved == SavedStep() or self.trained is None:
            return {}
        if (saved, id(self.trained)) != self._persistent_of:
            self._persistent_of = saved, id(self.trained)
            copies = [copy_of(saved, rank, Tier.PERSISTENT, "") for part in self.trained.hosts for rank in part.ranks]
            self._persistent = {(copy.job, copy.generation, copy.step, copy.rank): copy for copy in copies}
        return self._persistent

    def decided(self, outcome: Outcome) -> None:
        """A round changed something."""
        for decision in outcome.decisions:
            self._restore_check.decided(decision)
        self._decided(outcome)

    # --- what happens to the ranks -----------------------------------------------------------------------------------

    def halt(self, *, saved: bool = False) -> int:
        """The ranks stop where they are; returns their newest step."""
        if self.training.is_stepping:
            self.log += log.steps(self.training, self.now)
            self.training.stop(self.now, saved=saved)
        return self.training.newest

    def exits(self, cause: Cause | None, victims: Sequence[TrueHost], number: int = 0) -> tuple[list[Told], list[Told]]:
        """The signals about the ends of the running workers: of the hosts that are hit, and of the others."""
        plan, step = self.control.plan, self._reported_step
        assert plan is not None
        hit = {victim.name for victim in victims}
        first: list[Told] = []
        later: list[Told] = []
        for part in plan.hosts:
            is_hit = part.host_id in hit
            message = cause.message if cause is not None and is_hit else ""
            lost = "" if is_hit else "NCCL error: Connection closed by peer"
            text = f"{message} ({number})" if message else lost
            body = WorkerExited(
                job=JOB,
                generation=self.running,
                rank=part.ranks[0],
                pid=1000 + part.ranks[0],
                exit_code=1 if text else None,
                signal_number=None if text else SIGKILL,
                last_step=step,
                error=WorkerError("RuntimeError", text) if text else None,
                last_phase=self._phase,
            )
            if self.hosts[part.host_id].is_up:
                (first if is_hit else later).append((part.host_id, body))
        return first, later

    def tell_of(self, generation: int, told: Sequence[Told]) -> None:
        """Tell of workers that ended by themselves, unless they were stopped before."""
        plan = self.control.plan
        if plan is not None and plan.generation == generation and self.running < 0:
            well = [one for one in told if self.hosts[one[0]].is_up]
            self.control.look(*well)

    # --- commands ----------------------------------------------------------------------------------------------------

    def obey(self, commands: Sequence[Command]) -> None:
        """Hosts carry out commands of one step of the playbook: all at once, and those that are up."""
        by_kind: defaultdict[type, list[Command]] = defaultdict(list)
        for command in commands:
            by_kind[type(command.body)].append(command)
        for kind, same in by_kind.items():
            if kind is StopWorkers:
                self.halt()
                self.running = -1
                self._after(self._scenario.times.stop_s, partial(self._stopped, same))
            elif kind is StartWorkers:
                self._after(_ANSWER_S, partial(self._started, same))
            elif kind is SaveEmergency:
                self._save(same)
            else:
                self._after(_ANSWER_S, partial(self._done, same))

    def _reachable(self, commands: Sequence[Command]) -> list[Command]:
        return [command for command in commands if self.is_up(command.host_id)]

    def _stopped(self, commands: Sequence[Command]) -> None:
        step = self._reported_step
        placed = {part.host_id: part.ranks for part in self.trained.hosts} if self.trained is not None else {}
        self.control.answer(
            reply(
                command,
                self.now,
                CommandResult(
                    positions=tuple(RankPosition(rank, step) for rank in placed.get(command.host_id, ())),
                    copies=self.copies(command.host_id),
                    free_port=29501,
                ),
            )
            for command in self._reachable(commands)
        )

    def _started(self, commands: Sequence[Command]) -> None:
        body = commands[0].body
        assert isinstance(body, StartWorkers)
        generation = body.placement.generation
        plan = self.control.plan
        if plan is None or plan.generation != generation:
            return
        reachable = self._reachable(commands)
        self._check_restore(body.placement, plan)
        if {command.host_id for command in reachable} >= {part.host_id for part in plan.hosts}:
            self.running, self._phase, self._placement = generation, Phase.STARTING, body.placement
            start_s, restore_s = self._scenario.times.start_s, self._restore_s(body.placement)
            self._after(start_s + restore_s, partial(self._restored, generation, self.now, restore_s))
        self.control.answer(reply(command, self.now) for command in reachable)

    def _restore_s(self, placement: Placement) -> float:
        if placement.restore is None:
            return 0.0
        tiers = {found[0].tier for found in placement.restore.sources.values()}
        times = self._scenario.times
        return times.persistent_restore_s if Tier.PERSISTENT in tiers else times.restore_s

    def _done(self, commands: Sequence[Command]) -> None:
        releases = any(isinstance(command.body, FlushState) and command.body.disarm for command in commands)
        if releases and self.running >= 0 and self._phase is Phase.PARKED:
            self._phase = Phase.STEP
            self.training.begin(self.now, self.running, SavedStep(self.training.newest, self.running))
            self._expect_steps(self.training.newest + 1)
        self.control.answer(reply(command, self.now) for command in self._reachable(commands))

    def _save(self, commands: Sequence[Command]) -> None:
        """All ranks save a step that is still ahead, and park."""
        body = commands[0].body
        assert isinstance(body, SaveEmergency)
        generation = body.generation
        if self.running != generation or not self.training.is_stepping:
            return
        reachable = self._reachable(commands)
        at = self.training.completed_at(body.step)

        def acknowledge() -> None:
            self.control.answer(
                CommandUpdate(c.command_id, c.host_id, f"{c.host_id}-1", UpdateState.ACKNOWLEDGED, self.now)
                for c in reachable
            )

        def saved() -> None:
            self.control.answer(reply(c, self.now) for c in self._reachable(reachable))

        def park() -> None:
            if self.running == generation and self.training.is_stepping:
                self.halt(saved=True)
                self._phase = Phase.PARKED
                self._after(self._scenario.checkpoint.save_s + self._scenario.checkpoint.replicate_s, saved)

        self._after(_ANSWER_S, acknowledge)
        self._after(at - self.now + 1e-6, park)

    def _restored(self, generation: int, spawned_at: float, restore_s: float) -> None:
        """The ranks of a generation have their state, and begin to step, unless a host is broken."""
        plan, placement = self.control.plan, self._placement
        if self.running != generation or self._phase is not Phase.STARTING or plan is None or placement is None:
            return
        hosts = [self.hosts[part.host_id] for part in plan.hosts]
        broken = [host for host in hosts if host.condition]
        if broken:
            first, later = self.exits(None, broken)
            self.running = -1
            self.control.look(*first, *later)
            return
        for host in hosts:
            host.has_memory = True
        self._phase = Phase.STEP
        restore = placement.restore
        restored = SavedStep(restore.step, restore.source_generation) if restore is not None else SavedStep()
        failed_step = self.training.newest
        self._joined(plan)
        self.trained = plan
        self._restore_check.trains()
        self.restoring = None
        self.training.begin(self.now, generation, restored)
        self.log.append(
            log.started(generation, spawned_at=spawned_at, restore_began_at=self.now - restore_s, restored_at=self.now)
        )
        self._expect_steps(max(failed_step, restored.step) + 1)
        self.control.look()

    def _expect_steps(self, step: int) -> None:
        """Have the control plane see that steps advance past those before the fault."""
        generation = self.training.generation

        def seen() -> None:
            if self.training.generation == generation and self.training.is_stepping:
                self.control.look()

        for one in sorted({self.training.newest + 1, step}):
            self._after(self.training.completed_at(one) - self.now + 1e-6, seen)

    def _check_restore(self, placement: Placement, plan: GenerationPlan) -> None:
        """Compare the restore step with what the hosts that are up, and the store, truly have."""
        if self.trained is None:
            return
        self.restoring = found = placement.restore.step if placement.restore is not None else -1
        expected = self._restore_check.newest_there(self.training, self.trained, self._has_memory)
        if found < expected:
            what = f"generation {plan.generation} restores step {found}; step {expected} is there"
            self.violations.append(f"committed_step_lost: at {(self.now - BEGAN_AT):.0f} s {what}")

    def _has_memory(self, name: str) -> bool:
        host = self.hosts.get(name)
        return host is not None and host.is_up and host.has_memory
