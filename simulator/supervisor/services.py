"""The simulated controllers and actuators around the real loop and executor, and how daemons reach them. What a process
keeps in memory is lost with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from flyball.contracts.cluster import HostState
from flyball.contracts.decisions import ActionPlan, Command, CommandUpdate, GenerationPlan
from flyball.contracts.reports.signals import HostSilent, Report, ReportReply, Signal
from flyball.contracts.reports.standings import HostStanding
from flyball.contracts.reports.succession import speaks_for_host
from services.actuator.executor import Executor
from services.actuator.ports import Judgement, PlaybookStep
from services.controller.loop import ControllerLoop
from services.controller.replay import RoundInputs
from services.controller.view import Outcome, PolicySettings
from services.rules.recovery_point import newest_step
from services.rules.stream import Cursor
from services.runtime.loops import OUTAGES, Outage
from services.sensor.detector.witnesses import neighbours
from simulator.checks.history import Condemned, Granted
from simulator.ports import standings
from simulator.ports.action_store import MemoryActionStore
from simulator.ports.decision_store import MemoryDecisionStore
from simulator.ports.memory import Memory
from simulator.supervisor.processes import P, Shared, SimulatedProcess
from simulator.supervisor.sensors import Sensor
from simulator.world.events import MachineClock
from simulator.world.host import ACTUATOR, SENSOR, Host
from simulator.world.world import World


class WatchedStore(MemoryDecisionStore):
    """A decision store whose commits can be held up, and are compared with the truth."""

    def __init__(self, controller: Controller, memory: Memory) -> None:
        super().__init__(memory, controller.clock)
        self._controller = controller

    def commit(
        self,
        *,
        epoch: int,
        now: float,
        signals: Sequence[Signal],
        cursor: Cursor | None,
        outcome: Outcome,
        first_steps: Mapping[str, PlaybookStep],
        inputs: RoundInputs | None = None,
    ) -> None:
        if outcome.decisions:
            self._controller.hold_up()
        super().commit(
            epoch=epoch,
            now=now,
            signals=signals,
            cursor=cursor,
            outcome=outcome,
            first_steps=first_steps,
            inputs=inputs,
        )
        for plan in (d.action for d in outcome.decisions if d.action is not None and d.action.next is not None):
            self._controller.granted(plan)
        said_by = {s.body.host_id: s.source for s in signals if isinstance(s.body, HostSilent)}
        for change in outcome.hosts:
            if change.state is HostState.SILENT:
                self._controller.condemned(change.host_id, said_by.get(change.host_id, ""))


def lasting_neighbours(host_id: str, own: GenerationPlan, present: GenerationPlan) -> list[str]:
    """Who can be asked about a host whose ranks are of generation `own`: with one that was replaced since, nobody keeps
    a link."""
    kept = neighbours(present.hosts, present.peers).get(host_id, ())
    return [name for name in neighbours(own.hosts, own.peers).get(host_id, ()) if name in kept]


class Controller(SimulatedProcess):
    """One process around the real loop."""

    def __init__(
        self, world: World, name: str, clock: MachineClock, shared: Shared, sensors: Mapping[str, Sensor]
    ) -> None:
        super().__init__(world, name, clock)
        self._memory, self._bus, self._wakeup = shared.memory, shared.bus, shared.wakeup
        self._sensors = sensors
        self._hold_up_s = 0.0
        shared.wakeup.listeners.setdefault("signals", []).append(self.wake)

    def begin(self) -> None:
        self._outage = Outage(self.name, self.clock)
        self._loop = ControllerLoop(
            store=WatchedStore(self, self._memory),
            bus=self._bus,
            wakeup=self._wakeup,
            clock=self.clock,
            settings=PolicySettings(),
            holder=f"{self.name}#{self.starts}",
        )
        self.woken = self.every(self._round)

    def stop_at_commit_for(self, seconds: float) -> None:
        """Stop the process just before it stores its next decision: it does not know what happens meanwhile."""
        self._hold_up_s = seconds

    def hold_up(self) -> None:
        """Let time go on for all others."""
        if self._hold_up_s > 0.0:
            until, self._hold_up_s = self.world.now + self._hold_up_s, 0.0
            self.world.timeline.run_until(until)

    def granted(self, plan: ActionPlan) -> None:
        """Note what was known of the steps that a generation could go on from."""
        assert plan.next is not None
        told = [copy for row in self._memory.hosts.values() for copy in row.copies]
        asked = [copy for copy in told if copy.host_id in plan.stop_hosts]
        found = (newest_step(copies, plan.next.parent_lineage, plan.spec.world_size) for copies in (told, asked))
        steps = [-1 if step is None else step for step in found]
        self.world.granted_at[plan.next.generation] = self.world.now
        self.world.note(Granted(self.world.now, plan.job, plan.next.generation, *steps))

    def condemned(self, host_id: str, said_by: str) -> None:
        """Note what a controller said of a host that may be well."""
        host = self.world.hosts[host_id]
        sensor = self._sensors.get(said_by.removeprefix("sensor."))
        witness = self._witness(host, sensor) if sensor is not None else ""
        self.world.note(Condemned(self.world.now, host_id, host.is_up and host.is_daemon_up, witness))

    def _witness(self, host: Host, sensor: Sensor) -> str:
        """A neighbour that heard of the host all the time, and was itself heard by the sensor that said it."""
        group = next((group for group, _ in reversed(host.workers.values())), None)
        if group is None:
            return ""
        plans = {key: row.plan for key, row in self._memory.generations.items() if key[0] == group.job}
        if (group.job, group.generation) not in plans:  # the database lost it
            return ""
        for name in lasting_neighbours(host.host_id, plans[group.job, group.generation], plans[max(plans)]):
            is_heard = sensor.answers and self.world.now - sensor.heard_at.get(name, 0.0) < 2.0
            if is_heard and self.world.hosts[name].has_heard_for_s(host) > 30.0:
                return name
        return ""

    def _round(self) -> float:
        try:
            wait_s = self._loop.run_once()
        except OUTAGES as error:
            return self._outage.pause_s(error)
        self._outage.ended()
        return wait_s


class Actuator(SimulatedProcess):
    """One process around the real executor; it answers the daemons' polls."""

    def __init__(self, world: World, name: str, clock: MachineClock, shared: Shared) -> None:
        super().__init__(world, name, clock)
        self.store = MemoryActionStore(shared.memory)
        self._memory = shared.memory
        self._wakeup = shared.wakeup
        shared.wakeup.listeners.setdefault("actions", []).append(self.wake)

    def begin(self) -> None:
        self._outage = Outage(self.name, self.clock)
        self._executor = Executor(store=self.store, wakeup=self._wakeup, clock=self.clock)
        self.woken = self.every(self._round)

    def commands(self, host: Host) -> tuple[Sequence[Command], Judgement | None]:
        """What a poll of a host is answered with, and by whom; None: by nobody."""
        try:
            if not self._hears(host.host_id, host.incarnation, host.predecessors):
                return (), None
            given = self.store.commands_for(host.host_id, self.clock.wall_s())
            judged = standings.judge(self._memory, {host.host_id: host.commands.obeyed})
        except OUTAGES:
            return (), None
        return () if judged.ahead else given, judged

    def take_standing(self, standing: HostStanding) -> None:
        """Store what a host tells that is ahead of the database."""
        try:
            standings.tell(self._memory, standing, self.clock.wall_s())
        except OUTAGES:
            return  # it is told again
        self._wakeup.notify("signals")

    def take(self, update: CommandUpdate, predecessors: Sequence[str]) -> bool:
        """Store a host's answer; whether that worked."""
        try:
            if not self._hears(update.host_id, update.incarnation, predecessors):
                return False
            self.store.record(update)
        except OUTAGES:
            return False
        self._wakeup.notify("actions")
        return True

    def _hears(self, host_id: str, incarnation: str, predecessors: Sequence[str]) -> bool:
        return speaks_for_host(incarnation, predecessors, self.store.daemons_of([host_id]).get(host_id, ""))

    def _round(self) -> float:
        try:
            wait_s = self._executor.run_once()
        except OUTAGES as error:
            return self._outage.pause_s(error)
        self._outage.ended()
        return wait_s


class Gateway:
    """How daemons reach the control plane: each picks a process that answers, and moves on when it does not."""

    def __init__(self, world: World, sensors: Sequence[Sensor], actuators: Sequence[Actuator]) -> None:
        self._world, self._sensors, self._actuators = world, sensors, actuators

    def report(self, host: Host, report: Report) -> None:
        """Send a report, and later its reply."""
        sensor = self._pick(self._sensors, host)
        if sensor is None:
            return
        incarnation = host.incarnation

        def arrive() -> None:
            if not sensor.answers:
                return
            reply = sensor.accept(report)
            if reply is not None:
                self._world.network.send(SENSOR, host.host_id, partial(replied, reply))

        def replied(reply: ReportReply) -> None:
            if host.incarnation == incarnation:
                host.while_alive(partial(host.replied, reply, report.seq))()

        self._world.network.send(host.host_id, SENSOR, arrive)

    def poll(self, host: Host) -> None:
        """Ask for commands."""
        actuator = self._pick(self._actuators, host)
        network = self._world.network
        if actuator is None or not network.are_joined(host.host_id, ACTUATOR):
            return
        commands, judged = actuator.commands(host)
        if judged is not None:
            network.send(ACTUATOR, host.host_id, host.while_alive(partial(host.answered, judged)))
            for command in commands:
                obey = partial(host.commands.obey, command, judged.cluster)
                network.send(ACTUATOR, host.host_id, host.while_alive(obey))

    def tell(self, host: Host, standing: HostStanding) -> None:
        """Send what a host knows; lost, it is asked for again."""
        actuator = self._pick(self._actuators, host)
        if actuator is None:
            return

        def arrive() -> None:
            if actuator.answers:
                actuator.take_standing(standing)

        self._world.network.send(host.host_id, ACTUATOR, arrive)

    def answer(self, host: Host, update: CommandUpdate) -> None:
        """Send an answer; it is sent again until it was taken."""
        actuator = self._pick(self._actuators, host)
        if actuator is None:
            return
        predecessors = host.predecessors

        def arrive() -> None:
            if actuator.answers and actuator.take(update, predecessors):
                self._world.network.send(
                    ACTUATOR, host.host_id, host.while_alive(partial(host.commands.delivered, update))
                )

        self._world.network.send(host.host_id, ACTUATOR, arrive)

    def _pick(self, processes: Sequence[P], host: Host) -> P | None:
        """The same one as long as it answers."""
        offset = sum(map(ord, host.host_id)) % len(processes)
        ordered = (*processes[offset:], *processes[:offset])
        return next((process for process in ordered if process.answers), None)
