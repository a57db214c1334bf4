"""Makes faults happen in a simulated cluster, and ends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from flyball.contracts.reports.conditions import HostCondition, Severity
from flyball.contracts.reports.drains import DrainState
from services.controller.round.view import DrainView
from simulator.checks.history import FaultBegan, FaultEnded
from simulator.cluster import Cluster
from simulator.faults.faults import Fault, FaultKind
from simulator.supervisor.processes import SimulatedProcess
from simulator.world import conditions
from simulator.world.host import ACTUATOR, SENSOR, Host
from simulator.world.store import STORE
from simulator.world.training import SIGKILL, ProcessEnd

_AWAY_AFTER_PREEMPTION_S = 60.0
_MISSED_AFTER_S = 20.0  # before a missing spare is noticed
_RESTARTED = 0.7  # fraction of the databases that go back for which all processes restart, too
_STAYS_S = 20.0  # beyond the announced time


_ON_ALL_HOSTS = (
    FaultKind.ALL_HOSTS_PAUSED,
    FaultKind.ALL_HOSTS_CUT_FROM_SUPERVISOR,
    FaultKind.ALL_HOSTS_LOST,
)


class Injector:
    """Begins and ends faults. `running` counts those that have not ended."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self.running = 0

    def plan(self, fault: Fault) -> None:
        """Have a fault happen at its time."""
        self.running += 1
        self._world.after(fault.after_s, lambda: self._begin(fault))

    def _begin(self, fault: Fault) -> None:
        target, end, lasts_s = self._apply(fault)
        what = f"{fault} on {target}" if target else str(fault)
        self._world.note(FaultBegan(self._world.now, what))

        def over() -> None:
            end()
            self.running -= 1
            self._world.note(FaultEnded(self._world.now, what))

        self._world.after(lasts_s, over)

    def _apply(self, fault: Fault) -> tuple[str, Callable[[], None], float]:
        """Begin a fault; returns its target, the function that ends it, and its duration."""
        name = fault.kind.value
        for kinds, apply in (
            ((FaultKind.NOTICE_IN_VAIN, FaultKind.DRAIN_IN_VAIN), self._in_vain),
            (_ON_ALL_HOSTS, self._on_all_hosts_of_the_job),
            ((FaultKind.STORE_AWAY, FaultKind.HOST_CUT_FROM_STORE), self._on_store),
            ((FaultKind.PORTS_TAKEN, FaultKind.SHARE_AWAY, FaultKind.SPARE_LACKS_FILES), self._on_starts),
        ):
            if fault.kind in kinds:
                return apply(fault)
        if name.startswith(("worker", "daemon")):
            return self._on_worker(fault)
        if name.startswith(("host", "preempted", "engine")):
            return self._on_host(fault)
        if name.startswith(("sensor", "controller", "actuator")):
            return self._on_process(fault)
        return self._on_shared(fault)

    def _on_worker(self, fault: Fault) -> tuple[str, Callable[[], None], float]:
        world = self._world
        alive = [pair for host in world.hosts.values() for pair in host.workers.values()]
        if fault.kind is FaultKind.DAEMON_KILLED:
            host = self._host(fault)
            host.kill_daemon()
            return host.host_id, host.start_daemon, fault.lasts_s
        if not alive:
            return "nobody", _nothing, 0.0
        group, worker = alive[int(fault.pick * len(alive))]
        target = f"rank {worker.rank} of generation {group.generation} on {worker.host_id}"
        match fault.kind:
            case FaultKind.WORKER_HANGS:
                worker.is_hung = True
            case FaultKind.WORKER_FAILED:
                world.exit(group, worker, ProcessEnd(exit_code=1, message=f"ValueError at {world.now:.3f}"))
            case FaultKind.WORKERS_KILLED_TOGETHER:
                other = next((w for w in group.workers.values() if w.host_id != worker.host_id), worker)
                for victim in {worker.rank: worker, other.rank: other}.values():
                    world.exit(group, victim, ProcessEnd(signal_number=SIGKILL))
            case _:
                world.exit(group, worker, ProcessEnd(signal_number=SIGKILL))
        return target, _nothing, 0.0

    def _in_vain(self, fault: Fault) -> tuple[str, Callable[[], None], float]:
        """A host is about to leave, but no other host is free."""
        world, memory = self._world, self._cluster.memory
        host = self._host(fault)
        free = [other for other in world.hosts.values() if other.is_up and not other.workers and other is not host]

        def drain() -> None:
            memory.drains[host.host_id] = DrainView(DrainState.REQUESTED, world.now, world.now + fault.lasts_s)

        def end() -> None:
            for spare in free:
                world.bring_up(spare.host_id)
            if host.host_id in memory.drains:
                memory.drains[host.host_id] = DrainView(DrainState.CANCELLED, world.now, world.now)

        for spare in free:
            world.take_down(spare.host_id)
        if fault.kind is FaultKind.NOTICE_IN_VAIN:
            world.after(_MISSED_AFTER_S, partial(host.notice, fault.lasts_s))
            return host.host_id, end, _MISSED_AFTER_S + fault.lasts_s + _STAYS_S
        world.after(_MISSED_AFTER_S / 2 * fault.size, drain)
        return host.host_id, end, _MISSED_AFTER_S + fault.lasts_s

    def _on_all_hosts_of_the_job(self, fault: Fault) -> tuple[str, Callable[[], None], float]:
        """Spares stay as they are: the job could restart on them at once."""
        busy = [host for host in self._world.hosts.values() if host.workers]
        target = ", ".join(host.host_id for host in busy) or "nobody"
        if fault.kind is FaultKind.ALL_HOSTS_CUT_FROM_SUPERVISOR:
            links = [(host.host_id, far) for host in busy for far in (SENSOR, ACTUATOR)]
            return target, self._cut(links), fault.lasts_s

        if fault.kind is FaultKind.ALL_HOSTS_LOST:
            for host in busy:
                self._world.take_down(host.host_id)
            return target, partial(self._bring_up, busy), fault.lasts_s

        def end() -> None:
            for host in busy:
                host.resume()

        for host in busy:
            host.pause()
        return target, end, fault.lasts_s

    def _bring_up(self, hosts: Sequence[Host]) -> None:
        for host in hosts:
            self._world.bring_up(host.host_id)

    def _on_starts(self, fault: Fault) -> tuple[str, Callable[[], None], float]:
        """Faults that only a start of ranks reveals; they also force one."""
        world, hosts = self._world, list(self._world.hosts.values())
        if fault.kind is FaultKind.SPARE_LACKS_FILES:
            free = [host for host in hosts if host.is_up and not host.workers]
            busy = [host for host in hosts if host.workers]
            if not free or not busy:
                return "nobody", _nothing, 0.0
            spare, lost = free[int(fault.pick * len(free))], busy[int(fault.size * len(busy))]
            spare.has_files = False
            world.take_down(lost.host_id)

            def end() -> None:
                spare.has_files = True
                world.bring_up(lost.host_id)

            return f"{spare.host_id} when {lost.host_id} goes", end, fault.lasts_s
        if fault.kind is FaultKind.PORTS_TAKEN:
            world.ports_taken += 1 + int(5 * fault.size)
        else:
            self._set_files(hosts, has_files=False)
        alive = [pair for host in hosts for pair in host.workers.values()]
        if alive:
            group, worker = alive[int(fault.pick * len(alive))]
            world.exit(group, worker, ProcessEnd(signal_number=SIGKILL))
        return "", partial(self._set_files, hosts, has_files=True), fault.lasts_s

    def _set_files(self, hosts: Sequence[Host], *, has_files: bool) -> None:
        for host in hosts:
            host.has_files = has_files

    def _on_host(self, fault: Fault) -> tuple[str, Callable[[], None], float]:
        world, host, lasts_s = self._world, self._host(fault), fault.lasts_s
        name = host.host_id
        others = [other for other in world.hosts if other != name]
        target, end = name, _nothing
        match fault.kind:
            case FaultKind.HOST_DOWN | FaultKind.HOST_RESTARTS:
                world.take_down(name)
                end = partial(world.bring_up, name)
            case FaultKind.ENGINE_AWAY:
                host.stop_engine()
                end = host.start_engine
            case FaultKind.PREEMPTED:
                host.notice(lasts_s)
                world.after(lasts_s, partial(world.take_down, name))
                end, lasts_s = partial(world.bring_up, name), lasts_s + _AWAY_AFTER_PREEMPTION_S
            case FaultKind.HOST_CLOCK_JUMPS:
                host.clock.error_s = (fault.size - 0.5) * 50.0
                end = partial(setattr, host.clock, "error_s", 0.0)
            case FaultKind.HOST_DISK_FULL:
                host.is_disk_full = True
                end = partial(setattr, host, "is_disk_full", False)
            case FaultKind.HOST_FLOODS:
                host.while_alive(partial(host.flood, world.now + lasts_s))()
            case FaultKind.HOST_KEEPS_NO_SAVE:
                host.keeps_saves = False
                end = partial(setattr, host, "keeps_saves", True)
            case FaultKind.HOST_WARNS | FaultKind.HOST_BROKEN:
                severity = Severity.WARNING if fault.kind is FaultKind.HOST_WARNS else Severity.CRITICAL
                condition = HostCondition(
                    f"kind-{fault.pick:.3f}", severity, "As drawn.", conditions.SOURCE, host.clock.wall_s()
                )
                host.conditions.begin(condition)
                end = partial(host.conditions.end, condition)
            case FaultKind.HOST_CUT_OFF:
                end = self._cut([(name, far) for far in (*others, SENSOR, ACTUATOR, STORE)])
            case FaultKind.HOSTS_CUT_FROM_EACH_OTHER:
                other = others[int(fault.size * len(others))]
                target, end = f"{name} and {other}", self._cut([(name, other)])
            case FaultKind.HOST_CUT_FROM_SENSORS:
                end = self._cut([(name, SENSOR)], both_ways=fault.size < 0.5)
            case _:
                end = self._cut([(name, ACTUATOR)])
        return target, end, lasts_s

    def _cut(self, links: list[tuple[str, str]], *, both_ways: bool = True) -> Callable[[], None]:
        pairs = links + [(target, source) for source, target in links if both_ways]
        for source, target in pairs:
            self._world.network.cut(source, target)

        def heal() -> None:
            for source, target in pairs:
                self._world.network.heal(source, target)

        return heal

    def _on_process(self, fault: Fault) -> tuple[str, Callable[[], None], float]:
        kind, _, what = fault.kind.value.partition("_")
        cluster = self._cluster
        if kind == "controller":
            process = cluster.leader()
            if what == "stopped_at_commit":
                process.stop_at_commit_for(fault.lasts_s)
                return process.name, _nothing, 0.0
            if what == "clock_jumps":
                process.clock.error_s = (fault.size - 0.5) * 20.0
                return process.name, lambda: setattr(process.clock, "error_s", 0.0), fault.lasts_s
            return self._kill_or_stop(process, what, fault.lasts_s)
        processes: Sequence[SimulatedProcess] = cluster.sensors if kind == "sensor" else cluster.actuators
        return self._kill_or_stop(processes[int(fault.pick * len(processes))], what, fault.lasts_s)

    def _kill_or_stop(
        self, process: SimulatedProcess, what: str, lasts_s: float
    ) -> tuple[str, Callable[[], None], float]:
        if what == "stopped":
            process.stop_for(lasts_s)
            return process.name, _nothing, lasts_s
        process.kill()

        def restart() -> None:
            if not process.is_running:
                process.start()

        return process.name, restart, lasts_s

    def _on_store(self, fault: Fault) -> tuple[str, Callable[[], None], float]:
        host = self._host(fault).host_id
        is_away = fault.kind is FaultKind.STORE_AWAY
        end = self._cut([(name, STORE) for name in (self._world.hosts if is_away else (host,))])
        return "" if is_away else host, end, fault.lasts_s

    def _on_shared(self, fault: Fault) -> tuple[str, Callable[[], None], float]:
        cluster, network = self._cluster, self._world.network
        match fault.kind:
            case FaultKind.BUS_FLUSHED:
                cluster.bus.flush()
                return "", _nothing, 0.0
            case FaultKind.BUS_AWAY:
                cluster.set_bus_away(True)
                return "", lambda: cluster.set_bus_away(False), fault.lasts_s
            case FaultKind.DATABASE_AWAY:
                cluster.memory.is_away = True
                return "", lambda: setattr(cluster.memory, "is_away", False), fault.lasts_s
            case FaultKind.DATABASE_OLDER | FaultKind.DATABASE_LOST:
                return self._on_database(fault)
            case FaultKind.LOSSY_NETWORK:
                network.loss = 0.05 + 0.35 * fault.size
                return "", lambda: setattr(network, "loss", 0.0), fault.lasts_s
            case _:
                network.slow_fraction, network.delay_s = 0.2, 0.02
                return "", self._fast_again, fault.lasts_s

    def _on_database(self, fault: Fault) -> tuple[str, Callable[[], None], float]:
        """Wipe the database, or set it back to a backup: together with its processes, or, like a replica, beneath
        them."""
        cluster = self._cluster
        if fault.kind is FaultKind.DATABASE_LOST:
            cluster.replace_database(None, restarted=True)
            return "", _nothing, 0.0
        backup = cluster.memory.back_up()
        return "", partial(cluster.replace_database, backup, restarted=fault.size < _RESTARTED), fault.lasts_s

    def _fast_again(self) -> None:
        self._world.network.slow_fraction, self._world.network.delay_s = 0.01, 0.004

    def _host(self, fault: Fault) -> Host:
        """Usually a host with workers."""
        hosts = list(self._world.hosts.values())
        busy = [host for host in hosts if host.workers]
        chosen = busy if busy and fault.size < 0.85 else hosts
        return chosen[int(fault.pick * len(chosen))]


def _nothing() -> None:
    pass
