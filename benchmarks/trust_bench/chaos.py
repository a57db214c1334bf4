"""Random faults against the live stack, two at once among them, and what an operator would do beside them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from flyball.cli.ckpt.places import find_copies
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import FlyballError
from flyball.contracts.on_host.segments import SHM_DIR_VARIABLE
from simulator.inject.campaign.draws import draw_faults
from simulator.inject.campaign.mixes import MixedFault
from simulator.inject.campaign.outcome import FaultOutcome
from simulator.inject.campaign.run import Campaign
from simulator.inject.injector import FaultInjector
from simulator.inject.journal import Journal
from simulator.inject.kinds.network import NetCut
from trust_bench.audit import Audit, Generation, Sample, Unreachables, audit, doubled_actions, read_executions
from trust_bench.interruption import Interruption
from trust_bench.own import clean_environment
from trust_bench.stack import JOB, MARK, SIZES, TRAIN, StackError, TrustStack

HOSTS = ("host-a", "host-b", "host-c", "host-d")
NNODES = 3
PACE_S = 0.2
PATIENCE_S = 180.0
HANG_TIMEOUT_S = 20.0
REPAIR_S = 10.0  # until a lost host is back, and a cordoned one is given work again
END_DEADLINE_S = 120.0
LOOK_S = 1.0
CUT_IS_SEEN_S = 5.0  # until a host that is back reports its copies
LOAD_EVERY_S = 60.0
REFERENCE_DEADLINE_S = 1800.0
CHECKPOINT = {
    "adapt_interval": False,  # on a busy machine saves would become rarer
    "disk_dir": "checkpoints",
    "disk_is_default": True,
    "disk_every_steps": 20,
    "persistent_every_steps": 50,
}


def mix(redis_port: int, database_port: int, *, network: bool) -> tuple[MixedFault, ...]:
    """Faults of workers are the most frequent ones, as on real clusters."""
    workers = ("kill", "hang", "hang-collective", "hang-data", "exception", "exit", "out-of-memory")
    hosts = ("host-reboot", "host-down", "preempt", "condition", "engine-kill", "engine-pause", "engine-slow")
    found = [MixedFault(name, 3.0) for name in workers]
    found += [MixedFault(name, 1.5) for name in (*hosts, "daemon-pause", "slow", "cpu-limit", "nan")]
    found += [MixedFault("corrupt-shard", 0.5, options={"tier": tier}) for tier in ("memory", "peer", "disk")]
    services = ("api", "sensor", "controller", "actuator")
    for fault in ("service-pause", "service-kill", "service-stop"):
        found += [MixedFault(fault, 0.5, options={"service": service}) for service in services]
    for server, port in (("redis", redis_port), ("database", database_port)):
        options = {"server": server, "port": str(port)}
        found += [MixedFault(fault, 1.0, options=options) for fault in ("server-pause", "server-kill")]
    if network:
        found += [MixedFault("net-cut", 1.5), MixedFault("net-slow", 1.0)]
    return tuple(found)


class ChaosResult(msgspec.Struct, frozen=True):
    faults: tuple[FaultOutcome, ...]
    struck_together: int  # faults that struck while another had no verdict
    incidents: int
    incidents_without_fault: tuple[str, ...]
    audit: Audit
    duration_s: float
    ended_early: str
    loads: tuple[float, ...]  # over one minute, once a minute


class Operator:
    """Repairs what is lost, gives repaired hosts work again, and notes what could be restored at each moment."""

    def __init__(self, stack: TrustStack) -> None:
        self._stack = stack
        self._clock = SystemClock()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._repair, self._look)]
        self._missing_since: dict[str, float] = {}
        self.samples: list[Sample] = []
        self.loads: list[float] = []

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(END_DEADLINE_S)  # it may be asking a supervisor that was broken

    def _repair(self) -> None:
        while not self._over.wait(2.0):
            for host_id in self._stack.host_ids:
                if self._is_due(f"lost {host_id}", not self._stack.has_daemon(host_id)):
                    self._stack.start_host(host_id)
            try:
                states = {str(h["host_id"]): str(h["state"]) for h in self._stack.api.items("/v1/hosts")}
                for host_id, state in states.items():
                    if self._is_due(f"cordoned {host_id}", state in ("cordoned", "in_repair")):
                        self._stack.api.post(f"/v1/hosts/{host_id}/undrain")
            except FlyballError:
                continue  # the supervisor is what was broken

    def _is_due(self, what: str, is_so: bool) -> bool:
        """Whether it has been so for long enough."""
        if not is_so:
            self._missing_since.pop(what, None)
            return False
        since = self._missing_since.setdefault(what, time.monotonic())
        if time.monotonic() < since + REPAIR_S:
            return False
        del self._missing_since[what]
        return True

    def _look(self) -> None:
        noted_at = 0.0
        while not self._over.wait(LOOK_S):
            at = self._clock.wall_s()
            self.samples.append(Sample(at, newest_recoverable(self._stack)))
            if at > noted_at + LOAD_EVERY_S:
                self.loads.append(round(os.getloadavg()[0], 1))
                noted_at = at


def newest_recoverable(stack: TrustStack) -> int:
    """The newest step of which every rank has a committed copy anywhere; -1: none."""
    try:
        environ = {SHM_DIR_VARIABLE: str(stack.shm_dir)}
        point = find_copies(environ, state_dir=str(stack.root), folders=(), job=JOB).inventory.recovery_point
    except (FlyballError, OSError):  # nothing is there yet, or it goes away while it is read
        return -1
    return point.step if point is not None else -1


def run_chaos(
    *,
    faults: int,
    duration_s: float,
    seed: int,
    announce: Callable[[str], None],
    judged: Callable[[FaultOutcome], None],
    interruption: Interruption,
) -> ChaosResult:
    """Raises StackError, and FlyballError if the job cannot be started."""
    with TrustStack(HOSTS, interruption) as stack:
        announce(
            f"a stack of {len(HOSTS)} hosts in {stack.root}" + (f"; {stack.no_network}" if stack.no_network else "")
        )
        spec = {**CHECKPOINT, "persistent_dir": str(stack.root / "persistent")}
        stack.submit(nnodes=NNODES, pace_s=PACE_S, injectable=True, hang_timeout_s=HANG_TIMEOUT_S, checkpoint=spec)
        began_s, clock = time.monotonic(), SystemClock()
        drawn = draw_faults(
            mix(stack.port("redis"), stack.port("database"), network=not stack.no_network),
            rate_per_h=3600.0 * faults / duration_s,
            duration_s=4.0 * duration_s,
            seed=seed,
        )[:faults]
        operator = Operator(stack)
        operator.start()
        try:
            journal = Journal(stack.root / "injections")
            with (
                interruption.shielded(),  # until all is undone; the campaign itself can be interrupted
                FaultInjector(stack.api, clock=clock, journal=journal, supervisor_dir=stack.supervisor_dir) as injector,
                interruption.in_order(),
            ):
                campaign = Campaign(
                    stack.api,
                    injector,
                    job=JOB,
                    clock=clock,
                    announce=announce,
                    is_over=lambda: interruption.is_asked or time.monotonic() > began_s + duration_s,
                    patience_s=PATIENCE_S,
                    overlap=True,
                    judged=judged,
                )
                outcomes, ended_early = campaign.run(drawn)
        finally:
            operator.end()
        announce("the last incidents are waited for, then all is compared with an uninterrupted run")
        _wait_calm(stack)
        duration_s = time.monotonic() - began_s
        incidents = stack.api.everything("/v1/incidents")
        generations = _generations(stack)
        doubled = doubled_actions(stack.root / "job" / "spawns.txt", sorted(stack.root.glob("host-*.log")))
        stack.kill()  # the uninterrupted run has the processors for itself
        executions = read_executions(stack.losses_dir)
        steps = 1 + max(e.step for e in executions)
        expected = uninterrupted(stack.root / "reference", steps, announce)
    return ChaosResult(
        faults=tuple(outcomes),
        struck_together=sum(bool(o.beside) for o in outcomes),
        incidents=len(incidents),
        incidents_without_fault=tuple(_without_fault(incidents, outcomes)),
        audit=audit(
            executions,
            expected,
            generations=generations,
            samples=operator.samples,
            diverged={
                int(i["generation"]): int(i["harm"]["clean_step"])
                for i in incidents
                if i.get("harm")  # whatever else was found with it
            },
            unreachables=Unreachables(
                [o.at for o in outcomes if o.fault in ("host-down", "host-reboot") and o.at],
                [o.at for o in outcomes if o.fault == "corrupt-shard" and o.at],
                [(o.at, o.at + NetCut.lasts_s + CUT_IS_SEEN_S) for o in outcomes if o.fault == NetCut.name and o.at],
            ),
            doubled=doubled,
        ),
        duration_s=duration_s,
        ended_early=ended_early,
        loads=tuple(operator.loads),
    )


def _wait_calm(stack: TrustStack) -> None:
    """Until no incident is open; if that takes too long, the verdicts say what is."""

    def is_calm() -> bool:
        try:
            return all(i["state"] in ("resolved", "escalated") for i in stack.api.items("/v1/incidents"))
        except FlyballError:
            return False

    try:
        stack.until("no open incident", is_calm, PATIENCE_S)
    except StackError:
        return


def _generations(stack: TrustStack) -> list[Generation]:
    rows = stack.query(
        "SELECT generation, granted_at, restore_step FROM generations WHERE started_at > 0 ORDER BY generation"
    )
    return [Generation(int(g), float(at), -1 if step is None else int(step)) for g, at, step in rows]


def _without_fault(incidents: Sequence[dict[str, object]], outcomes: Sequence[FaultOutcome]) -> list[str]:
    """Incidents that followed no fault: they would be false alarms."""
    claimed = {name for outcome in outcomes for name in outcome.incident_ids}
    return [
        f"{i['incident_id']} {i['cause']} {i['host_id']}: {i['message']}"
        for i in incidents
        if i["incident_id"] not in claimed and not i.get("part_of")
    ]


def uninterrupted(folder: Path, steps: int, announce: Callable[[str], None]) -> dict[tuple[int, int], str]:
    """The losses of plain torchrun with the same seed and ranks, of so many steps. Raises StackError."""
    folder.mkdir()
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NNODES))
    arguments = ("--steps", str(steps), *SIZES, "--print-every", "10000000", "--losses-dir", str(folder))
    environment = clean_environment() | {"OMP_NUM_THREADS": "1", MARK: str(folder.parent)}
    announce(f"an uninterrupted run of {steps} steps, by torchrun")
    try:
        subprocess.run(
            [*torchrun, str(TRAIN), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=REFERENCE_DEADLINE_S,
        )
    except subprocess.CalledProcessError as error:
        raise StackError(f"the uninterrupted run failed: {error.stderr[-2000:]}") from error
    except subprocess.TimeoutExpired as error:
        raise StackError(f"the uninterrupted run took longer than {REFERENCE_DEADLINE_S:.0f} s") from error
    return {(e.rank, e.step): e.loss for e in read_executions(folder)}
