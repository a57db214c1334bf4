"""The fleet as it truly is: hosts, faults, repairs, and one job that trains. Drives the control plane by its events.

Everything is scheduled: the next fault of each cause, the end of a repair, the next answer of a host. Nothing happens
per step, per report or per host, so a run costs what its incidents cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random

import msgspec

from flyball.contracts.checkpoints import CheckpointSpec
from flyball.contracts.cluster import HostState, JobSpec
from flyball.contracts.decisions import (
    GenerationPlan,
)
from flyball.contracts.reports.conditions import HostCondition, Severity
from flyball.contracts.reports.signals import ConditionBegan, ConditionEnded
from services.controller.round.view import Fleet, Outcome
from simulator.fleet import detection, log
from simulator.fleet.arrivals import arrivals, stream
from simulator.fleet.control_plane import JOB
from simulator.fleet.hosts import Pool, TrueHost
from simulator.fleet.ranks import JobRanks, Told
from simulator.fleet.scenario import Cause, Effect, FaultReach, FleetScenario
from simulator.world.events import BEGAN_AT, EventQueue

LEAST_STAND_INS, MOST_STAND_INS = 3, 16  # hosts shown beside those that a fault hits
_AMPLE = 3.0  # times the faults that an incident takes in on average
SHOWN_SPARES = 4  # beside those that are needed now
PROBE_EVERY_S = 5.0  # a daemon's look at its GPUs and links
DRAIN_S = 1800.0  # for how long an operator waits until a host is left
HOUR_S = 3600.0
_AGAIN_S = 30.0  # a fault that finds no host shown that is well comes a little later
_LOST_S = (0.1, 1.0)  # until the others notice that a worker ended
SENSOR = "sensor.s1"


class FleetFault(msgspec.Struct):
    """One fault, and what came of it. `draws` decides whom it hits and how: the same for the n-th fault of a cause,
    whatever happened before, so that two scenarios with one seed have the same luck."""

    cause: str
    at_s: float
    draws: Random
    hosts: tuple[str, ...] = ()
    interrupted: bool = False  # it stopped the ranks


class FleetWorld:
    """One run of a scenario."""

    def __init__(self, scenario: FleetScenario, seed: int) -> None:
        self.scenario = scenario
        self.timeline = EventQueue()
        self.faults: list[FleetFault] = []
        self.postponed = 0  # faults that came later because no host shown was well
        self._cordoned: dict[str, float] = {}  # host -> since when
        self._hit: set[str] = set()  # hosts, by faults that one incident takes in
        coming = _AMPLE * scenario.faults_per_incident
        self._stand_ins = min(MOST_STAND_INS, LEAST_STAND_INS + round(coming))
        self._seed = seed
        self._relapses = stream(seed, "relapses")
        self._rng = stream(seed, "reactions")
        self._hosts: dict[str, TrueHost] = {}
        self._of_job, self._free = Pool(), Pool()
        self._racks: defaultdict[str, list[TrueHost]] = defaultdict(list)
        self._drained: set[str] = set()
        self._make_hosts(stream(seed, "hosts"))
        self.fleet = Fleet.of(host.rack for host in self._hosts.values())
        self.ranks = JobRanks(self.timeline, scenario, self._hosts, joined=self._move_job, decided=self._decided)
        self.control, self.training = self.ranks.control, self.ranks.training

    def _make_hosts(self, rng: Random) -> None:
        cluster, nodes = self.scenario.cluster, self.scenario.job.nodes
        for number in range(nodes + cluster.spares):
            host = TrueHost(
                f"host-{number:05d}",
                f"rack-{number // cluster.hosts_per_rack:04d}",
                is_lemon=rng.random() < cluster.lemons,
            )
            self._add(host)
            (self._of_job if number < nodes else self._free).add(host)

    def _add(self, host: TrueHost) -> None:
        self._hosts[host.name] = host
        self._racks[host.rack].append(host)

    # --- running -----------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self.timeline.now

    @property
    def now_s(self) -> float:
        return self.timeline.now - BEGAN_AT

    @property
    def spares_left(self) -> int:
        """How many hosts are free now."""
        return len(self._free)

    @property
    def spares_suffice(self) -> bool:
        """Whether there are free hosts for all of the job's that are gone or broken."""
        plan = self.control.plan
        placed = [self._hosts.get(part.host_id) for part in plan.hosts] if plan is not None else []
        wanted = sum(host is None or not host.is_up or bool(host.condition) for host in placed)
        return self.spares_left >= max(1, wanted)

    def run(self, passed: Callable[[float], None] = lambda _: None) -> None:
        """Run the whole scenario. `passed` is told the simulated seconds so far."""

        def is_over() -> bool:
            passed(self.now - BEGAN_AT)
            return self.control.has_ended

        for host in self._of_job.first(1 + self._stand_ins):
            self.control.join(host.name, host.rack)
        job, checkpoint = self.scenario.job, self.scenario.checkpoint
        has_store = checkpoint.persistent_every > 0
        self.control.submit(
            JobSpec(
                job=JOB,
                argv=("train.py",),
                workdir="/",
                nnodes=len(self.control.memory.hosts),
                max_restarts=job.max_restarts,
                checkpoint=CheckpointSpec(
                    every_steps=self.ranks.every_steps,
                    replicas=checkpoint.replicas,
                    persistent_dir="/store" if has_store else "",
                    persistent_every_steps=self.ranks.every_steps * checkpoint.persistent_every,
                ),
                policy=job.policy,
            )
        )
        for cause in self.scenario.causes:
            moments = arrivals(cause, self.scenario.rate_per_s(cause), stream(self._seed, cause.name))
            self._plan_next(cause, enumerate(moments, 1))
        self.control.look()
        self.timeline.run_until(BEGAN_AT + self.scenario.length_s, unless=is_over)
        self.timeline.now = BEGAN_AT + self.scenario.length_s
        if self.training.is_stepping:
            self.ranks.log += log.steps(self.training, self.now)
        self.training.end(self.now, restoring=self.ranks.restoring)

    def _after(self, delay_s: float, happening: Callable[[], None]) -> None:
        self.timeline.after(delay_s, happening)

    # --- faults ------------------------------------------------------------------------------------------------------

    def _plan_next(self, cause: Cause, moments: Iterator[tuple[int, float]]) -> None:
        number, at_s = next(moments, (0, self.scenario.length_s))
        if at_s >= self.scenario.length_s:
            return

        def strike() -> None:
            self._strike(cause, FleetFault(cause.name, self.now_s, stream(self._seed, f"{cause.name}/{number}")))
            self._plan_next(cause, moments)

        self._after(at_s - self.now_s, strike)

    def _strike(self, cause: Cause, fault: FleetFault, host: TrueHost | None = None) -> None:
        """A fault happens, to `host` or to a random one of the job."""
        rng = fault.draws
        victims = self._victims(cause, rng, host)
        if not victims:
            self.postponed += 1
            self._after(_AGAIN_S, partial(self._strike, cause, fault, host))
            return
        fault.hosts = tuple(victim.name for victim in victims)
        runs = self.training.is_stepping if cause.effect is Effect.HANG else self.ranks.running >= 0
        fault.interrupted = runs and cause.effect is not Effect.PLANNED
        self.faults.append(fault)
        if fault.interrupted and not self.control.is_busy:  # an incident that is open takes it in
            self.ranks.log.append(log.fault(self.now, cause.name, victims[0].name))
        match cause.effect:
            case Effect.PROCESS:
                self._end_workers(cause, victims[:1])
            case Effect.GPU:
                self._break_gpus(cause, victims, rng)
            case Effect.HOST:
                self._lose(cause, victims, rng)
            case Effect.HANG:
                self._hang(victims[0], rng)
            case Effect.PLANNED:
                self._drained.add(victims[0].name)
                self.control.drain(victims[0].name, DRAIN_S)
                self.control.look()

    def _victims(self, cause: Cause, rng: Random, host: TrueHost | None) -> list[TrueHost]:
        """The hosts of the job that a fault hits, all of them shown. While an incident is open, those shown stand for
        all others: if another one is hit, one that no fault of this incident has hit stands in for it."""
        plan = self.control.plan
        if plan is None:
            return []
        if self.control.is_busy or not self.training.is_stepping:
            shown = [self._hosts[part.host_id] for part in plan.hosts]
            well = [one for one in shown if one.is_up and not one.condition and one.name not in self._drained]
            if host is not None:
                return [host] if host in well else []
            first = self._of_job.draw(rng, self._lemon_factor)
            if first not in well:
                fresh = [one for one in well if one.name not in self._hit] or well
                first = fresh[int(rng.random() * len(fresh))] if fresh else None
            if first is None:
                return []
            hit = [one for one in well if one.rack == first.rack] if cause.reach is FaultReach.RACK else [first]
            self._hit.update(one.name for one in hit)
            self._show_spares()
            return hit
        drawn = host or self._of_job.draw(rng, self._lemon_factor)
        if drawn is None:
            return []
        victims = [drawn]
        if cause.reach is FaultReach.RACK:
            victims = [one for one in self._racks[drawn.rack] if one in self._of_job]
        self._show(victims)
        return victims

    @property
    def _lemon_factor(self) -> float:
        cluster = self.scenario.cluster
        return cluster.lemon_factor if cluster.lemons else 1.0

    def _show(self, victims: Sequence[TrueHost]) -> None:
        """Show the controller these hosts of the job, with others that stand for the rest, and some free ones."""
        self.control.tidy()
        wanted = max(self._stand_ins, len(victims) + 1)
        hit = {victim.name for victim in victims}
        others = [one for one in self._of_job.first(wanted + len(victims)) if one.name not in hit][:wanted]
        racks = {victim.rack for victim in victims}
        others.sort(key=lambda one: one.rack in racks)  # rank 0's host is linked with all: seldom the one that is hit
        self.control.show({one.name: one.rack for one in (*others, *victims)})
        self.ranks.trained = self.control.plan
        self._hit = hit
        self._show_spares()

    def _show_spares(self) -> None:
        """Show as many free hosts as could be used at once."""
        for spare in self._free.first(len(self._hit) + SHOWN_SPARES):
            self.control.join(spare.name, spare.rack)

    # --- what faults do ----------------------------------------------------------------------------------------------

    def _end_workers(self, cause: Cause, victims: Sequence[TrueHost]) -> None:
        """Workers end; those of all other hosts lose their connections."""
        if self.ranks.running < 0:
            return
        self.ranks.halt()
        first, later = self.ranks.exits(cause, victims, len(self.faults))
        generation, self.ranks.running = self.ranks.running, -1
        if first:
            self._after(self.scenario.times.notice_s, lambda: self.control.look(*first))
        self._after(self._rng.uniform(*_LOST_S), partial(self.ranks.tell_of, generation, later))

    def _break_gpus(self, cause: Cause, victims: Sequence[TrueHost], rng: Random) -> None:
        for host in victims:
            host.condition = cause.name
            self._plan_repair(cause, host, rng)
            condition = HostCondition(
                cause.name, Severity.CRITICAL, f"{cause.message or cause.name}.", "probe kernel-log", self.now
            )
            told: Told = (host.name, ConditionBegan(condition))
            self._after(rng.uniform(0.0, PROBE_EVERY_S), partial(self._tell_if, host, host.downs, told))
        self._end_workers(cause, victims)

    def _tell_if(self, host: TrueHost, downs: int, told: Told) -> None:
        if host.is_up and host.downs == downs and self._hosts.get(host.name) is host:
            self.control.look(told)

    def _lose(self, cause: Cause, victims: Sequence[TrueHost], rng: Random) -> None:
        """Hosts are gone, with all that they had in memory."""
        plan = self.control.plan
        assert plan is not None
        self.ranks.halt()
        for host in victims:
            host.is_up = host.has_memory = False
            self._plan_repair(cause, host, rng)
        if self.ranks.running >= 0:
            _, later = self.ranks.exits(None, victims)
            generation, self.ranks.running = self.ranks.running, -1
            self._after(self._rng.uniform(*_LOST_S), partial(self.ranks.tell_of, generation, later))
        domains = {part.host_id: self._hosts[part.host_id].rack for part in plan.hosts}
        watched = detection.Watched(plan, domains, self.scenario.job.step_s, self.scenario.job.hang_timeout_s)
        down = [part.host_id for part in plan.hosts if not self._hosts[part.host_id].is_up]
        by_moment: dict[float, list[Told]] = {}
        for found in detection.silence(watched, down, rng):
            by_moment.setdefault(found.after_s, []).append((SENSOR, found.body))
        for after_s, told in by_moment.items():
            self._after(after_s, partial(self._tell, told))

    def _tell(self, told: Sequence[Told]) -> None:
        self.control.look(*told)

    def _hang(self, host: TrueHost, rng: Random) -> None:
        plan = self.control.plan
        if plan is None or not self.training.is_stepping:
            return
        generation, step = self.ranks.running, self.ranks.halt()
        ranks = next(part.ranks for part in plan.hosts if part.host_id == host.name)
        watched = detection.Watched(
            plan,
            {part.host_id: self._hosts[part.host_id].rack for part in plan.hosts},
            self.scenario.job.step_s,
            self.scenario.job.hang_timeout_s,
        )
        for found in detection.hang(watched, ranks, rng):
            body = msgspec.structs.replace(found.body, step=step)
            self._after(found.after_s, partial(self._tell_of_hang, generation, (SENSOR, body)))

    def _tell_of_hang(self, generation: int, told: Told) -> None:
        if self.ranks.running == generation and not self.training.is_stepping:
            self.control.look(told)

    # --- repairs -----------------------------------------------------------------------------------------------------

    def _plan_repair(self, cause: Cause, host: TrueHost, rng: Random) -> None:
        cluster = self.scenario.cluster
        self._free.remove(host)  # a spare may break while it takes ranks
        host.downs += 1
        is_broken = cause.effect is Effect.GPU
        seconds = rng.expovariate(1.0 / cluster.repair_s) if is_broken else cluster.reboot_s
        host.has_relapse = is_broken and rng.random() >= cluster.repairs_that_hold
        self._after(seconds, partial(self._repaired, host, host.downs))

    def _repaired(self, host: TrueHost, downs: int) -> None:
        """A host is back. A repaired one counts as new: nothing stands against it. One whose repair does not hold comes
        back as it was."""
        if host.downs != downs or self._hosts.get(host.name) is not host:
            return
        plan = self.control.plan
        is_placed = plan is not None and any(part.host_id == host.name for part in plan.hosts)
        if host in self._of_job or is_placed:  # it could not be replaced: it comes back with its ranks' place
            host.is_up = True
            if host not in self._of_job:
                self._free.add(host)  # until its ranks train
            condition, host.condition = host.condition, ""
            self.control.look(*self._end_of(host, condition))
            return
        if host.condition and not host.has_relapse:
            self._replace(host)
            return
        condition, host.condition = host.condition, ""
        host.is_up = True
        self._free.add(host)
        self.control.join(host.name, host.rack)
        self.control.look(*self._end_of(host, condition))

    def _end_of(self, host: TrueHost, condition: str) -> list[Told]:
        return [(host.name, ConditionEnded("probe kernel-log", condition, ""))] if condition else []

    def _replace(self, host: TrueHost) -> None:
        base, _, number = host.name.partition(".")
        new = TrueHost(f"{base}.{int(number or 0) + 1}", host.rack)
        self._racks[host.rack].remove(host)
        del self._hosts[host.name]
        self.control.forget(host.name)
        self._cordoned.pop(host.name, None)
        self._add(new)
        self._free.add(new)
        self.control.join(new.name, new.rack)
        self.control.look()

    # --- what the control plane sees and orders ----------------------------------------------------------------------

    def _move_job(self, plan: GenerationPlan) -> None:
        """Take note of which hosts the job has left, and which it got."""
        present = {part.host_id for part in plan.hosts}
        joined = [self._hosts[name] for name in sorted(present) if self._hosts[name] not in self._of_job]
        before = self.ranks.trained.hosts if self.ranks.trained is not None else ()
        left = [part.host_id for part in before if part.host_id not in present]
        for host in joined:
            self._free.remove(host)
            self._of_job.add(host)
            if host.has_relapse:
                self._plan_relapse(host)
        for gone in [self._hosts[name] for name in left if name in self._hosts]:
            self._of_job.remove(gone)
            if gone.name in self._drained:
                self._after(self.scenario.cluster.reboot_s, partial(self._maintained, gone.name))
            elif gone.is_up and not gone.condition:
                self._free.add(gone)

    def _maintained(self, name: str) -> None:
        """An operator is done with a drained host."""
        self._drained.discard(name)
        host = self._hosts.get(name)
        if host is not None:
            self.control.undrain(name)
            if host.is_up and not host.condition:
                self._free.add(host)
            self.control.look()

    def _plan_relapse(self, host: TrueHost) -> None:
        host.has_relapse = False
        cause = next((c for c in self.scenario.causes if c.effect is Effect.GPU), None)
        if cause is None:
            return
        after_s = self._relapses.expovariate(1.0 / self.scenario.cluster.relapse_s)

        def relapse() -> None:
            if self._hosts.get(host.name) is host and host in self._of_job and host.is_up:
                self._strike(cause, FleetFault(cause.name, self.now_s, self._relapses), host)

        self._after(after_s, relapse)

    def _decided(self, outcome: Outcome) -> None:
        """Check that a round leaves the limit of cordoned hosts. The limit is computed anew, not by the policy's own
        function: a fifth of all hosts within an hour, and no more than the largest rack has."""
        for change in outcome.hosts:
            self._cordoned.pop(change.host_id, None)
            if change.state is HostState.CORDONED and change.host_id not in self._drained:
                self._cordoned[change.host_id] = self.now_s
                recent = [at_s for at_s in self._cordoned.values() if self.now_s - at_s < HOUR_S]
                allowed = max(1, self.fleet.hosts // 5)
                if self.fleet.largest_domain > 1:
                    allowed = min(allowed, self.fleet.largest_domain)
                if len(recent) > allowed:
                    what = f"the {len(recent)}th within an hour, and {allowed} may be"
                    self.ranks.violations.append(
                        f"blast_radius: {change.host_id} is cordoned at {self.now_s:.0f} s, {what}"
                    )
