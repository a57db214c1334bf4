"""The simulated controllers and actuators, around the real loop and executor, and the daemons' way to them.

A process's memory is lost with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from services.controller.round.view import Outcome, PolicySettings
from services.rules.recovery_point import newest_step
from services.rules.stream import Cursor
from services.runtime.outages import OUTAGES, Outage
from services.sensor.detector.witnesses import neighbours
from simulator.checks.history import Condemned, Cordoned, Granted
from simulator.ports import standings
from simulator.ports.action_store import MemoryActionStore
from simulator.ports.decision_store import MemoryDecisionStore
from simulator.ports.memory import Memory
from simulator.ports.stored_copies import wanted_copies
from simulator.supervisor.processes import P, Shared, SimulatedProcess
from simulator.supervisor.sensors import Sensor
from simulator.world.events import MachineClock
from simulator.world.host import ACTUATOR, SENSOR, Host
from simulator.world.world import World

HOUR_S = 3600.0


class WatchedStore(MemoryDecisionStore):
    """A decision store whose commits can be delayed, and are compared with the truth."""

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
        out_of_work = self._controller.cordoned_hosts() if outcome.hosts else frozenset()
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
        reported_by = {s.body.host_id: s.source for s in signals if isinstance(s.body, HostSilent)}
        for change in outcome.hosts:
            if change.state is HostState.SILENT:
                self._controller.condemned(change.host_id, reported_by.get(change.host_id, ""))
        still = self._controller.cordoned_hosts() if outcome.hosts else frozenset()
        for host_id in sorted(still - out_of_work):
            self._controller.cordoned(host_id, out_of_work & still)


def lasting_neighbours(host_id: str, own: GenerationPlan, present: GenerationPlan) -> list[str]:
    """Neighbours that can be asked about a host whose ranks are of generation `own`. Excludes those replaced since:
    nobody keeps a link with them."""
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
        """Stop the process just before it stores its next decision, so that it misses what happens meanwhile."""
        self._hold_up_s = seconds

    def hold_up(self) -> None:
        """Let time pass for all other processes."""
        if self._hold_up_s > 0.0:
            until, self._hold_up_s = self.world.now + self._hold_up_s, 0.0
            self.world.timeline.run_until(until)

    def granted(self, plan: ActionPlan) -> None:
        """Record which steps were known when a generation was granted."""
        assert plan.next is not None
        known = [copy for row in self._memory.hosts.values() for copy in row.copies]
        in_store = self._memory.persistent_copies.values()
        heard_of = [0, *(copy.generation for copy in (*known, *in_store)), *self._generations_that_stepped()]
        reachable = [copy for copy in known if copy.host_id in plan.stop_hosts]
        history = plan.next.parent_lineage
        stored = wanted_copies(self._memory, plan.spec, history)
        known, reachable = [*known, *stored], [*reachable, *stored]
        found = (newest_step(copies, history, plan.spec.world_size) for copies in (known, reachable, stored))
        known_step, reachable_step, stored_step = (-1 if step is None else step for step in found)
        self.world.granted_at[plan.next.generation] = now = self.world.now
        steps = known_step, reachable_step, stored_step, max(heard_of)
        self.world.note(Granted(now, plan.job, plan.next.generation, *steps))

    def _generations_that_stepped(self) -> Iterator[int]:
        """Those of which a rank reported a step of its own."""
        for key, ranks in self._memory.ranks.items():
            row = self._memory.generations.get(key)
            restored = -1 if row is None or row.restore_step is None else row.restore_step
            if any(rank.step > restored for rank in ranks.values()):
                yield key[1]

    def cordoned_hosts(self) -> frozenset[str]:
        """The hosts that the policy took out of work within the last hour; not those that were taken from it by a drain
        or a notice."""
        return frozenset(
            row.host_id
            for row in self._memory.hosts.values()
            if row.state is HostState.CORDONED
            and self.clock.wall_s() - row.since < HOUR_S
            and row.host_id not in self._memory.drains
            and row.preempt_deadline_at == 0.0
        )

    def cordoned(self, host_id: str, beside: frozenset[str]) -> None:
        """Record that a host was cordoned, and which ones were already."""
        domains = Counter(row.failure_domain for row in self._memory.hosts.values())
        self.world.note(
            Cordoned(self.world.now, host_id, tuple(sorted(beside)), domains.total(), max(domains.values(), default=0))
        )

    def condemned(self, host_id: str, reported_by: str) -> None:
        """Record that a controller declared a host silent, and whether the host was well."""
        host = self.world.hosts[host_id]
        sensor = self._sensors.get(reported_by.removeprefix("sensor."))
        witness = self._witness(host, sensor) if sensor is not None else ""
        self.world.note(Condemned(self.world.now, host_id, host.is_up and host.is_daemon_up, witness))

    def _witness(self, host: Host, sensor: Sensor) -> str:
        """A neighbour that was in touch with the host all the time, and with the sensor that reported the silence."""
        group = next((group for group, _ in reversed(host.workers.values())), None)
        if group is None:
            return ""
        plans = {key: row.plan for key, row in self._memory.generations.items() if key[0] == group.job}
        if (group.job, group.generation) not in plans:  # the database lost it
            return ""
        for name in lasting_neighbours(host.host_id, plans[group.job, group.generation], plans[max(plans)]):
            # A report that was stuck in the network is no sign that the neighbour could be asked since.
            is_reporting = sensor.answers and self.world.now - sensor.sent_at.get(name, 0.0) < 2.0
            can_be_asked = is_reporting and self.world.network.is_open(SENSOR, name)  # not if only its reports arrive
            if can_be_asked and self.world.hosts[name].in_touch_for_s(host) > 30.0:
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
        """The commands for a host's poll, and the identity of the database; None if nobody answers."""
        try:
            if not self._is_current(host.host_id, host.incarnation, host.predecessors):
                return (), None
            given = self.store.commands_for(host.host_id, self.clock.wall_s())
            judged = standings.judge(self._memory, {host.host_id: host.commands.obeyed})
        except OUTAGES:
            return (), None
        return () if judged.ahead else given, judged

    def record_standing(self, standing: HostStanding) -> None:
        """Store a host's standing that is ahead of the database."""
        try:
            standings.record(self._memory, standing, self.clock.wall_s())
        except OUTAGES:
            return  # the host sends it again
        self._wakeup.notify("signals")

    def record(self, update: CommandUpdate, predecessors: Sequence[str]) -> bool:
        """Store a host's reply; returns whether that worked."""
        try:
            if not self._is_current(update.host_id, update.incarnation, predecessors):
                return False
            self.store.record(update)
        except OUTAGES:
            return False
        self._wakeup.notify("actions")
        return True

    def _is_current(self, host_id: str, incarnation: str, predecessors: Sequence[str]) -> bool:
        return speaks_for_host(incarnation, predecessors, self.store.daemons_of([host_id]).get(host_id, ""))

    def _round(self) -> float:
        try:
            wait_s = self._executor.run_once()
        except OUTAGES as error:
            return self._outage.pause_s(error)
        self._outage.ended()
        return wait_s


class Gateway:
    """Connects daemons to the control plane. Each daemon picks a process that answers, and moves on when it stops
    answering."""

    def __init__(self, world: World, sensors: Sequence[Sensor], actuators: Sequence[Actuator]) -> None:
        self._world, self._sensors, self._actuators = world, sensors, actuators

    def report(self, host: Host, report: Report) -> None:
        """Send a report; its reply arrives later."""
        sensor = self._pick(self._sensors, host)
        if sensor is None:
            return
        incarnation, sent_at = host.incarnation, self._world.now

        def arrive() -> None:
            if not sensor.answers:
                return
            reply = sensor.accept(report, sent_at)
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
            network.send(ACTUATOR, host.host_id, host.while_alive(partial(host.poll_answered, judged)))
            for command in commands:
                obey = partial(host.commands.obey, command, judged.cluster)
                network.send(ACTUATOR, host.host_id, host.while_alive(obey))

    def send_standing(self, host: Host, standing: HostStanding) -> None:
        """Send a host's standing; if lost, it is requested again."""
        actuator = self._pick(self._actuators, host)
        if actuator is None:
            return

        def arrive() -> None:
            if actuator.answers:
                actuator.record_standing(standing)

        self._world.network.send(host.host_id, ACTUATOR, arrive)

    def reply(self, host: Host, update: CommandUpdate) -> None:
        """Send a reply to a command; repeated until it is received."""
        actuator = self._pick(self._actuators, host)
        if actuator is None:
            return
        predecessors = host.predecessors

        def arrive() -> None:
            if actuator.answers and actuator.record(update, predecessors):
                self._world.network.send(
                    ACTUATOR, host.host_id, host.while_alive(partial(host.commands.delivered, update))
                )

        self._world.network.send(host.host_id, ACTUATOR, arrive)

    def _pick(self, processes: Sequence[P], host: Host) -> P | None:
        """The same process as long as it answers."""
        offset = sum(map(ord, host.host_id)) % len(processes)
        ordered = (*processes[offset:], *processes[:offset])
        return next((process for process in ordered if process.answers), None)
