"""Assembles a simulated cluster: hosts with spares, two of each service, one job."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import msgspec

from flyball.contracts.checkpoints import CheckpointSpec, Tier
from flyball.contracts.cluster import JobSpec
from services.runtime.telemetry import Metrics
from simulator.ports.bus import MemoryBus
from simulator.ports.memory import Memory
from simulator.ports.status_store import MemoryJobStore
from simulator.supervisor.processes import Shared, SimulatedWakeup
from simulator.supervisor.sensors import Sensor
from simulator.supervisor.services import Actuator, Controller, Gateway
from simulator.world.events import EventQueue, MachineClock
from simulator.world.host import Host
from simulator.world.store import SharedStore
from simulator.world.world import World

JOB = "job"
MAY_SHRINK = 0.25  # share of the drawn clusters
STORES_EVERY = (0, 0, 2, 8)  # steps
SHRINKS_SOON = {"shrink_after_s": 5.0, "grow_after_s": 5.0, "grow_cooldown_s": 20.0}


class Scenario(msgspec.Struct, frozen=True):
    """The size of a cluster, and the number of its faults."""

    nodes: int
    ranks_per_node: int
    spares: int
    racks: int
    step_s: float
    faults: int
    within_s: float = 120.0  # the faults begin within this time
    never_from_scratch: bool = False
    min_nodes: int = 0  # with how few the job may go on; 0: with all only
    stores_every: int = 0  # steps between saves to the persistent tier; 0: there is none


def draw_scenario(rng: Random) -> Scenario:
    """Draw a small cluster; each is different. In a quarter of them the job may go on with one host, and there is no
    spare. Half have a persistent tier."""
    nodes = rng.randint(1, 4)
    drawn = Scenario(
        nodes=nodes,
        ranks_per_node=rng.randint(1, 2),
        spares=rng.randint(1, 2),
        racks=rng.randint(1, 3),
        step_s=rng.uniform(0.8, 2.0),
        faults=rng.randint(2, 7),
        within_s=rng.uniform(20.0, 120.0),
    )
    if rng.random() < MAY_SHRINK:
        drawn = msgspec.structs.replace(drawn, nodes=nodes + drawn.spares, spares=0, min_nodes=1)
    return msgspec.structs.replace(drawn, stores_every=rng.choice(STORES_EVERY))


class Cluster:
    def __init__(self, scenario: Scenario, rng: Random) -> None:
        self.timeline = EventQueue()
        every = scenario.stores_every
        checkpoint = (
            CheckpointSpec(persistent_dir="s3://simulated", persistent_every_steps=every) if every else CheckpointSpec()
        )
        store = SharedStore(checkpoint.policy(Tier.PERSISTENT)) if every else None
        self.world = world = World(self.timeline, rng, step_s=scenario.step_s, store=store)
        self.memory = Memory(MachineClock(self.timeline))
        self.bus = MemoryBus()
        self.wakeup = wakeup = SimulatedWakeup(world)

        def clock() -> MachineClock:
            return MachineClock(self.timeline)

        shared = Shared(self.memory, self.bus, wakeup, Metrics())
        self.sensors = [Sensor(world, f"s{n}", clock(), shared) for n in range(2)]
        by_name = {sensor.name: sensor for sensor in self.sensors}
        self.controllers = [Controller(world, f"c{n}", clock(), shared, by_name) for n in range(2)]
        self.actuators = [Actuator(world, f"a{n}", clock(), shared) for n in range(2)]
        gateway = Gateway(world, self.sensors, self.actuators)
        for number in range(scenario.nodes + scenario.spares):
            name = f"host-{number}"
            world.hosts[name] = Host(world, gateway, name, f"rack-{number % scenario.racks}", clock())
        for process in (*self.sensors, *self.controllers, *self.actuators):
            process.start()
        wakeup.listeners.setdefault("commands", []).append(self._deliver)
        self._gateway = gateway
        self.spec = JobSpec(
            job=JOB,
            argv=("train.py",),
            workdir="/",
            nnodes=scenario.nodes,
            nproc_per_node=scenario.ranks_per_node,
            max_restarts=1000,
            never_from_scratch=scenario.never_from_scratch,
            min_nodes=scenario.min_nodes,
            checkpoint=checkpoint,
            policy=SHRINKS_SOON if scenario.min_nodes else {},
        )
        world.after(1.0, self._submit)

    def leader(self) -> Controller:
        """The controller that holds the lease, or the first one."""
        name = self.memory.held.holder.partition("#")[0]
        return next((c for c in self.controllers if c.name == name), self.controllers[0])

    def set_bus_away(self, is_away: bool) -> None:
        """Streams and wake-ups use the same server."""
        self.bus.is_away = self.wakeup.is_away = is_away

    def replace_database(self, backup: Mapping[str, Any] | None, *, restarted: bool) -> None:
        """Replace the database with a backup, or an empty one. `restarted`: also restart all processes that use it."""
        self.memory.restore(backup)
        for process in (*self.sensors, *self.controllers, *self.actuators) if restarted else ():
            if process.is_running:
                process.kill()
                process.start()

    def _submit(self) -> None:
        if self.memory.is_away:
            self.world.after(1.0, self._submit)
            return
        MemoryJobStore(self.memory).submit(self.spec, self.world.now)

    def _deliver(self) -> None:
        """Answer the waiting polls."""
        for name, commands in list(self.memory.open_commands.items()):
            host = self.world.hosts[name]
            if commands and host.is_daemon_up:
                self._gateway.poll(host)
