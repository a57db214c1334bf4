"""Faults of the control plane on this machine: its services, and the Redis and database that they use."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import psutil

from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import ConfigurationError, FlyballError, NotFound, UsageError
from flyball.state_folder import clear_errors
from simulator.inject.kinds.hosts import TIED, command_of, start_again, start_plan
from simulator.inject.kinds.kind import FaultSite, FaultTarget, Option, Plan, RealFault
from simulator.inject.kinds.namespaces import held_open
from simulator.inject.kinds.processes import of_process, send_to, signal_planned
from simulator.inject.processes import LiveProcess, holds_open, look_at, own_processes, wait_ended

SERVICES = ("sensor", "controller", "actuator", "api")
SERVERS = {"redis": (6379, ("redis", "valkey")), "database": (3306, ("maria", "mysql", "postgres"))}
SERVICE = Option("service", "controller", f"{', '.join(SERVICES)}; with `flyball up` all are one process")
SERVER = Option("server", "redis", " or ".join(SERVERS))
END_TIMEOUT_S = 60.0  # a database writes what it holds
PORT = Option("port", 0, "where it listens on this machine; 0: its usual port")


def service_process(site: FaultSite) -> LiveProcess:
    """The process that holds the lock of a service in the supervisor's state folder."""
    name = site.text("service")
    if name not in SERVICES:
        raise UsageError(f"There is no service {name!r}.", hint=f"service={'|'.join(SERVICES)}")
    if site.supervisor_dir is None:
        raise UsageError(
            "The state folder of this supervisor's services was not found on this machine.",
            hint="run this command where they run, or name it with --supervisor-dir DIR",
        )
    lock = site.supervisor_dir / f"{name}.lock"
    try:
        pid = int(lock.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        pid = 0
    process = look_at(pid) if pid and holds_open(pid, lock) else None  # the file outlives its owner
    return _running(process, f"The service {name}", str(site.supervisor_dir))


def server_process(site: FaultSite) -> LiveProcess:
    """The process of this user that listens on the server's port, if it is such a server."""
    name = site.text("server")
    if name not in SERVERS:
        raise UsageError(f"There is no server {name!r}.", hint=f"server={'|'.join(SERVERS)}")
    usual_port, words = SERVERS[name]
    port = site.count("port") or usual_port
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr and c.pid]
    pids = {c.pid or 0 for c in listening if getattr(c.laddr, "port", 0) == port}
    found = [p for p in own_processes() if p.pid in pids and any(word in p.argv[0] for word in words)]
    return _running(found[0] if found else None, f"A {name} server", f"port {port}")


def _running(process: LiveProcess | None, what: str, where: str) -> LiveProcess:
    if process is None:
        raise NotFound(f"{what} does not run on this machine ({where}).", hint="run this command where it runs")
    return process


class _Paused(RealFault):
    target = FaultTarget.SERVICE
    lasts_s = 10.0

    def find(self, site: FaultSite) -> LiveProcess:
        """The process. Raises NotFound."""
        raise NotImplementedError

    def plan(self, site: FaultSite) -> Plan:
        return of_process(self.find(site))

    def inject(self, plan: Plan) -> None:
        signal_planned(plan, signal.SIGSTOP)

    def undo(self, plan: Plan) -> None:
        send_to(plan, signal.SIGCONT)


class _Killed(RealFault):
    """Killed, and started again as it was when the fault is over; not if somebody else has started it by then."""

    target = FaultTarget.SERVICE
    lasts_s = 5.0
    number = signal.SIGKILL

    def find(self, site: FaultSite) -> LiveProcess:
        """The process. Raises NotFound."""
        raise NotImplementedError

    def lacks(self, site: FaultSite) -> str:
        argv = self.find(site).argv
        if TIED in argv:
            return "it ends with the command that started it; start it with `flyball up`"
        if shutil.which(argv[0]) is None:
            return f"its title ({argv[0]}) has replaced its command line; start Redis with --set-proc-title no"
        return ""

    def plan(self, site: FaultSite) -> Plan:
        process = self.find(site)
        log_folder = site.supervisor_dir or Path("/tmp")
        log = str(log_folder / f"injected-{site.injection_id}.log")
        return of_process(process) | start_plan(process, "services.main") | {"log": log}

    def inject(self, plan: Plan) -> None:
        log = Path(plan["log"])
        with clear_errors(log):
            log.touch()  # the mark that it was signalled
        try:
            signal_planned(plan, self.number)
        except FlyballError:
            log.unlink(missing_ok=True)
            raise

    def undo(self, plan: Plan) -> None:
        """Waits until the process has ended: one that is still ending has the same command line as a new one. Raises
        ConfigurationError at the deadline."""
        if not Path(plan["log"]).exists():
            return
        process = look_at(int(plan["pid"]))
        ending = [process] if process is not None and process.start_ticks == plan["start_ticks"] else []
        if wait_ended(ending, timeout_s=END_TIMEOUT_S, clock=SystemClock()):
            raise ConfigurationError(
                f"The process {plan['pid']} was told to end and still runs, so it was not started again.",
                hint="wait until it ends, or kill it; then run `flyball inject undo`",
            )
        running = (found for found in map(look_at, psutil.pids()) if found is not None)
        if not any(command_of(found.argv, "services.main") == plan["argv"] for found in running):
            with held_open(plan["namespace"]) as namespace:
                start_again(plan, Path(plan["log"]), namespace)


class ServicePause(_Paused):
    name = "service-pause"
    about = "SIGSTOP to a service of the control plane"
    options = (SERVICE,)

    def find(self, site: FaultSite) -> LiveProcess:
        return service_process(site)


class ServiceKill(_Killed):
    name = "service-kill"
    about = "SIGKILL to a service of the control plane; it is started again when the fault is over"
    options = (SERVICE,)

    def find(self, site: FaultSite) -> LiveProcess:
        return service_process(site)


class ServiceStop(ServiceKill):
    name = "service-stop"
    about = "the same with SIGTERM: it ends in order"
    number = signal.SIGTERM


class ServerPause(_Paused):
    name = "server-pause"
    about = "SIGSTOP to Redis or the database"
    options = (SERVER, PORT)

    def find(self, site: FaultSite) -> LiveProcess:
        return server_process(site)


class ServerKill(_Killed):
    name = "server-kill"
    about = "SIGKILL to Redis or the database; it is started again when the fault is over"
    options = (SERVER, PORT)

    def find(self, site: FaultSite) -> LiveProcess:
        return server_process(site)


class ServerStop(ServerKill):
    name = "server-stop"
    about = "the same with SIGTERM: it ends in order"
    number = signal.SIGTERM
