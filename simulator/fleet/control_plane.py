"""The production control plane, shown the hosts that matter: policy, recovery point, playbook and their records.

The policy decides with `decide`, the playbook moves with `advance`, and both keep their records in the simulator's
database, as in production. What is left out is what repeats: the lease, polling, and reports that say nothing new.

A job of 16,384 GPUs is shown as the hosts that an incident concerns, and a few that stand for all others: these are
alike, in a job whose ranks train in lock step. Each shown host has one rank, for all of its GPUs. Limits that depend on
the size of the fleet get the true one, as in a production round that does not cover all hosts (`Fleet`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any, Protocol

import msgspec

from flyball.contracts.checkpoints import Lineage, Replication, ShardCopy, Tier
from flyball.contracts.cluster import HostRanks, HostState, JobSpec, Phase
from flyball.contracts.decisions import Command, CommandResult, CommandUpdate, GenerationPlan, UpdateState
from flyball.contracts.events import Event
from flyball.contracts.reports.conditions import ConditionKey
from flyball.contracts.reports.drains import DrainState
from flyball.contracts.reports.signals import Signal, SignalBody
from services.actuator.rules.playbook import advance
from services.controller.policy import decide
from services.controller.round.choices.peer_choice import choose_peers
from services.controller.round.choices.spare_choice import HISTORY_S, failures_of_hosts
from services.controller.round.view import DrainView, Fleet, Outcome, PolicySettings, StandingCondition, View
from services.record.codec import number_of
from services.record.report_events import RankRow
from simulator.fleet.training import SavedStep
from simulator.ports.action_store import MemoryActionStore
from simulator.ports.decision_store import MemoryDecisionStore
from simulator.ports.memory import HostRow, Memory
from simulator.ports.status_store import MemoryJobStore
from simulator.world.events import EventQueue, MachineClock

JOB = "job"
HOLDER = "controller#1"
_LEASE_S = 1e12  # nobody else wants it
_KEPT = 16  # closed incidents and their records that a view may still need
_KEPT_GENERATIONS = 64  # of a history, each with a step that counts; no host and no store has older ones
_KEPT_S = 3600.0  # likewise: what happened within the last hour counts for limits
_MOST_ROUNDS = 50  # in a row, at one moment
_LATE_SHARE = 0.5  # of the time since the last change: so late may a round be that has nothing to do but to look again


class Fleetwide(Protocol):
    """What the control plane learns of the hosts, and asks them to do."""

    def is_up(self, host_id: str) -> bool: ...

    def phase(self, generation: int) -> tuple[Phase, int] | None:
        """The phase and newest step of a generation's ranks; None if none runs."""
        ...

    def copies(self, host_id: str) -> tuple[ShardCopy, ...]: ...

    def persistent_copies(self) -> Mapping[tuple[str, int, int, int], ShardCopy]: ...

    def obey(self, commands: Sequence[Command]) -> None: ...

    def decided(self, outcome: Outcome) -> None:
        """A round changed something."""
        ...


class FleetControl:
    """One job's control plane. `look` is called when something happened, or is due."""

    def __init__(
        self,
        timeline: EventQueue,
        fleetwide: Fleetwide,
        settings: PolicySettings,
        fleet: Fleet,
    ) -> None:
        self._timeline, self._fleetwide, self._settings, self._fleet = timeline, fleetwide, settings, fleet
        clock = MachineClock(timeline)
        self.memory = Memory(clock)
        self._store, self._actions = MemoryDecisionStore(self.memory, clock), MemoryActionStore(self.memory)
        grant = self._store.acquire_lease(HOLDER, _LEASE_S)
        assert grant is not None
        self._epoch = grant.epoch
        self._seq = 0
        self._wake_at = inf
        self._changed_at = timeline.now
        self._failed_at: dict[str, tuple[float, ...]] = {}  # host -> when it failed, over the last month
        self._aside: dict[str, tuple[HostRow, dict[ConditionKey, StandingCondition]]] = {}  # broken for longer
        self._digest = hashlib.sha256()
        self.events: list[Event] = []
        self.rounds = 0
        self.decisions = 0

    # --- what is shown -----------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self._timeline.now

    @property
    def plan(self) -> GenerationPlan | None:
        """The newest generation, as it is shown."""
        job = self.memory.jobs.get(JOB)
        row = self.memory.generations.get((JOB, job.generation)) if job is not None else None
        return row.plan if row is not None else None

    @property
    def is_busy(self) -> bool:
        """Whether an incident or an action is open."""
        incidents, actions = self.memory.incidents.values(), self.memory.actions.values()
        return any(not i.state.closed for i in incidents) or any(not a.state.ended for a in actions)

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended: here, it failed."""
        return self.memory.jobs[JOB].state.ended

    @property
    def digest(self) -> str:
        """Equal for two runs in which everything was decided and carried out alike."""
        return self._digest.hexdigest()

    def submit(self, spec: JobSpec) -> None:
        """A user submits the job."""
        MemoryJobStore(self.memory).submit(spec, self.now)

    def join(self, host_id: str, domain: str) -> None:
        """Show a host that is free, or is back."""
        if (aside := self._aside.pop(host_id, None)) is not None:
            self.memory.hosts[host_id], self.memory.conditions[host_id] = aside
        elif host_id not in self.memory.hosts:
            self.memory.hosts[host_id] = self._row(host_id, domain, HostState.SPARE)

    def _row(self, host_id: str, domain: str, state: HostState) -> HostRow:
        return HostRow(
            host_id=host_id,
            state=state,
            since=self.now,
            reason="it reported for the first time",
            address="10.0.0.1",
            failure_domain=domain,
            engine_address=f"{host_id}:7000",
            free_port=29500,
            incarnation=f"{host_id}-1",
            sent_at=self.now,
            last_report_at=self.now,
            workers={},
            copies=(),
        )

    def forget(self, host_id: str) -> None:
        """A machine was taken away for good."""
        tables: tuple[dict[str, Any], ...] = (self.memory.hosts, self.memory.conditions, self.memory.drains)
        for table in (*tables, self._failed_at, self._aside):
            table.pop(host_id, None)

    def state_of(self, host_id: str) -> HostState | None:
        row = self.memory.hosts.get(host_id)
        return None if row is None else row.state

    def show(self, hosts: Mapping[str, str]) -> None:
        """Show these hosts of the job (with their failure domains) instead of those before; for the time between
        incidents. They are in the order of their ranks."""
        memory, job = self.memory, self.memory.jobs[JOB]
        row = memory.generations[JOB, job.generation]
        shown = tuple(HostRanks(name, "10.0.0.1", f"{name}:7000", (rank,)) for rank, name in enumerate(hosts))
        peers = choose_peers(dict(hosts), job.spec.checkpoint.replicas, Replication.RING)
        for part in row.plan.hosts:
            if part.host_id not in hosts:
                del memory.hosts[part.host_id]
        row.plan = msgspec.structs.replace(
            row.plan, hosts=shown, peers=peers, parent_lineage=_of_any_size(row.plan.parent_lineage)
        )
        if row.lineage is not None:
            row.lineage = _of_any_size(row.lineage)
        job.spec = job.spec.on(len(shown))
        job.spec = msgspec.structs.replace(job.spec, max_nodes=0)
        for name, domain in hosts.items():
            if name not in memory.hosts:
                memory.hosts[name] = self._row(name, domain, HostState.HEALTHY)
                memory.hosts[name].since = row.started_at
        known = memory.ranks[JOB, job.generation]
        before = next(iter(known.values()), RankRow())
        memory.ranks[JOB, job.generation] = {
            rank: RankRow(name, 1000 + rank, before.step, before.phase, self.now) for rank, name in enumerate(hosts)
        }

    def drain(self, host_id: str, deadline_s: float) -> None:
        """An operator drains a host."""
        self.memory.drains[host_id] = DrainView(DrainState.REQUESTED, self.now, self.now + deadline_s, "maintenance")

    def undrain(self, host_id: str) -> None:
        """The operator's work is done."""
        drain = self.memory.drains.get(host_id)
        if drain is not None:
            self.memory.drains[host_id] = msgspec.structs.replace(drain, state=DrainState.CANCELLED)

    # --- rounds ------------------------------------------------------------------------------------------------------

    def look(self, *told: tuple[str, SignalBody]) -> None:
        """Run rounds and moves until nothing follows any more. `told`: signals with their senders."""
        signals = [self._signal(source, body) for source, body in told]
        for _ in range(_MOST_ROUNDS):
            outcome = self._round(signals)
            wakes = [outcome.wake_at] if outcome.wake_at else []
            moved = self._move(wakes)
            signals = []
            if outcome.empty and not moved:
                break
            self._changed_at = self.now
        self._drain_events()
        # A hold is looked at again every second, perhaps for days. Whatever ends it calls `look` itself, unless it is
        # a limit of time.
        self._wake(max(min(wakes, default=inf), self.now + _LATE_SHARE * (self.now - self._changed_at)))

    def answer(self, updates: Iterable[CommandUpdate]) -> None:
        """Hosts reply to commands."""
        for update in updates:
            self._actions.record(update)
        self.look()

    def _signal(self, source: str, body: SignalBody) -> Signal:
        self._seq += 1
        row = self.memory.hosts.get(source)
        return Signal(source, row.incarnation if row else f"{source}-1", self._seq, self.now, body)

    def _round(self, signals: Sequence[Signal]) -> Outcome:
        self._report()
        view, now = self._view(), self.now
        outcome = decide(view, signals, self._settings, now)
        self.rounds += 1
        if signals or not outcome.empty:
            self._store.commit(
                epoch=self._epoch, now=now, signals=signals, cursor=None, outcome=outcome, first_steps={}
            )
            for decision in outcome.decisions:
                self._digest.update(msgspec.msgpack.encode(decision))
            self.decisions += len(outcome.decisions)
            self._fleetwide.decided(outcome)
        return outcome

    def _report(self) -> None:
        """Bring the records of hosts and ranks up to date, as the newest reports would."""
        memory, fleetwide, plan = self.memory, self._fleetwide, self.plan
        placed = {} if plan is None else {part.host_id: part.ranks[0] for part in plan.hosts}
        running = None if plan is None else fleetwide.phase(plan.generation)
        ranks = memory.ranks[JOB, plan.generation] if plan is not None else {}
        for row in memory.hosts.values():
            if not fleetwide.is_up(row.host_id):
                continue
            row.last_report_at = row.sent_at = self.now
            is_placed = row.host_id in placed
            row.workers = {JOB: plan.generation} if plan is not None and running is not None and is_placed else {}
            row.copies = fleetwide.copies(row.host_id)
            if running is not None and is_placed:
                phase, step = running
                rank = placed[row.host_id]
                ranks[rank] = RankRow(row.host_id, 1000 + rank, step, phase, self.now)
        if plan is not None:
            memory.persistent_copies = dict(fleetwide.persistent_copies())
            if running is not None:
                memory.raise_newest_step(JOB, running[1])

    def _view(self) -> View:
        view = self._store.load_view()
        recent = failures_of_hosts(self.memory.incidents.values())
        hosts = tuple(
            msgspec.structs.replace(host, failed_at=failures) if failures else host
            for host in view.hosts
            for failures in (self._failures(host.host_id, recent),)
        )
        return msgspec.structs.replace(view, hosts=hosts, is_whole=False, fleet=self._fleet)

    def _failures(self, host_id: str, recent: Mapping[str, tuple[float, ...]]) -> tuple[float, ...]:
        return (*self._failed_at.get(host_id, ()), *recent.get(host_id, ()))

    def _move(self, wakes: list[float]) -> bool:
        """One move of every open action; returns whether there was one."""
        moved = False
        for progress in self._actions.open_actions():
            step = advance(progress, self.now)
            has_moved = bool(step.commands or step.events or step.placement is not None)
            if not has_moved and (step.phase, step.state, step.attempt) == (
                progress.phase,
                progress.state,
                progress.attempt,
            ):
                wakes.append(step.wake_at or inf)
                continue
            moved = self._actions.apply(progress, step, self.now) or moved
            self._digest.update(f"{progress.action_id} {step.phase} {step.state} {self.now!r}".encode())
            row = self.memory.actions[number_of(progress.action_id)]
            if commands := [c.command for c in row.commands[len(row.commands) - len(step.commands) :]]:
                self._fleetwide.obey(commands)
        return moved

    def _wake(self, at: float) -> None:
        """Look again at this moment, instead of that which an earlier round named."""
        if at == self._wake_at > self.now:
            return
        self._wake_at = at = max(at, self.now + 1e-3)
        if at == inf:
            return

        def wake() -> None:
            if self._wake_at == at:
                self._wake_at = inf
                self.look()

        self._timeline.after(at - self.now, wake)

    # --- records -----------------------------------------------------------------------------------------------------

    def _drain_events(self) -> None:
        if self.memory.events:
            self.events += self.memory.events
            self.memory.events = []

    def tidy(self) -> None:
        """Drop records that no view needs any more. Call it while nothing is open."""
        memory, since = self.memory, self.now - _KEPT_S
        job = memory.jobs[JOB]
        for host_id, row in list(memory.hosts.items()):
            is_away = row.state in (HostState.CORDONED, HostState.SILENT) and row.since < since
            if is_away and host_id not in memory.drains:
                del memory.hosts[host_id]
                self._aside[host_id] = row, memory.conditions.pop(host_id, {})
        closed = sorted(n for n, i in memory.incidents.items() if i.state.closed and i.resolved_at < since)
        for number in closed[: max(0, len(closed) - _KEPT)]:
            incident = memory.incidents.pop(number)
            for host_id, moments in failures_of_hosts([incident]).items():
                if host_id in memory.hosts or host_id in self._aside:
                    kept = (*self._failed_at.get(host_id, ()), *moments)
                    self._failed_at[host_id] = tuple(at for at in kept if at > self.now - HISTORY_S)
        first = min(memory.incidents, default=0)
        old = [n for n, row in memory.actions.items() if row.state.ended and row.ended_at < since]
        for number in old[: max(0, len(old) - _KEPT)]:
            for command in memory.actions.pop(number).commands:
                memory.commands.pop(command.command.command_id, None)
        for number in [n for n, (d, _) in memory.decisions.items() if _number(d.incident_id) < first and d.at < since]:
            if len(memory.decisions) > 1:
                del memory.decisions[number]
        for key in [key for key in memory.generations if key[1] < job.generation - 1]:
            del memory.generations[key]
        for key in [key for key in memory.ranks if key[1] < job.generation - 1]:
            del memory.ranks[key]
        for exit_key in [key for key in memory.exits if key[1] < job.generation - 1]:
            del memory.exits[exit_key]
        self._cut_histories()
        memory.signals.clear()
        memory.incident_changes.clear()
        memory.action_changes.clear()

    def _cut_histories(self) -> None:
        """Every decision carries them, so that each would cost more than the one before."""
        job = self.memory.jobs[JOB]
        job.failures = tuple(f for f in job.failures if f.generation >= job.generation - _KEPT_GENERATIONS)
        for row in self.memory.generations.values():
            row.plan = msgspec.structs.replace(row.plan, parent_lineage=row.plan.parent_lineage[-_KEPT_GENERATIONS:])
            row.lineage = row.lineage and row.lineage[-_KEPT_GENERATIONS:]


def _number(incident_id: str) -> int:
    return number_of(incident_id) if incident_id else -1


def _of_any_size(lineage: Lineage) -> Lineage:
    """The lineage of a job of whatever size it is shown in."""
    return tuple(msgspec.structs.replace(entry, world_size=0) if entry.world_size else entry for entry in lineage)


def reply(command: Command, at: float, result: CommandResult | None = None) -> CommandUpdate:
    """A host's reply to a command that it carried out."""
    return CommandUpdate(
        command.command_id,
        command.host_id,
        f"{command.host_id}-1",
        UpdateState.SUCCEEDED,
        at,
        result=result or CommandResult(),
    )


def copy_of(saved: SavedStep, rank: int, tier: Tier, host_id: str) -> ShardCopy:
    """A rank's copy of a saved step."""
    digest = f"{saved.generation}.{saved.step}.{rank}"
    return ShardCopy(JOB, saved.generation, saved.step, rank, tier, host_id, 1000, digest)
