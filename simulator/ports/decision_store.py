"""A `DecisionStore` in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flyball import __version__
from flyball.contracts.clock import Clock
from flyball.contracts.decisions import ActionState, Decision, Incident
from flyball.contracts.errors import StaleEpoch
from flyball.contracts.events import Event, EventKind
from flyball.contracts.reports.signals import Signal, WorkerExited
from services.actuator.ports import PlaybookStep
from services.controller.replay import RoundInputs, StoredRound
from services.controller.round.focus import Focus, focused
from services.controller.round.view import ConditionChange, HostChange, JobChange, Outcome, StandingCondition, View
from services.record import outcome_events, signal_events, step_events
from services.record.checks import begun_by, is_newest
from services.record.codec import number_of
from services.record.lease_terms import MARGIN, Held, Renewals, epoch_for
from services.record.report_events import RankRow
from services.record.signal_events import SignalKey
from services.rules.stream import Cursor, LeaseGrant
from simulator.ports import standings, steps
from simulator.ports.memory import ActionRow, ExitRow, GenerationRow, Memory, StateChange
from simulator.ports.views import load_view


class MemoryDecisionStore:
    """One per controller process: it remembers whether the process has held the lease."""

    def __init__(self, memory: Memory, clock: Clock) -> None:
        self._memory = memory
        self._clock = clock
        self._has_held = False
        self._renewals = Renewals()
        self._revision = 0  # of the newest view

    def acquire_lease(self, holder: str, ttl_s: float) -> LeaseGrant | None:
        """Take or renew the lease; None while another process holds it."""
        memory, began_s = self._memory, self._clock.monotonic_s()
        with memory.transaction():
            now = memory.clock.wall_s()
            is_over = self._renewals.is_over(memory.held, began_s, ttl_s)
            epoch = epoch_for(holder, memory.held, now, has_held=self._has_held, is_over=is_over)
            if epoch is None:
                return None
            if epoch != memory.held.epoch:
                kind = EventKind.CONTROLLER_ELECTED
                memory.changed([Event(at=self._clock.wall_s(), kind=kind, data={"epoch": epoch, "holder": holder})])
                memory.begin_epoch(Held(holder, epoch, now + ttl_s))
            memory.held = Held(holder, epoch, now + ttl_s)
        self._has_held = True
        return LeaseGrant(epoch, began_s + ttl_s * (1.0 - MARGIN))

    def release_lease(self, holder: str) -> None:
        """Let another controller take over at once."""
        with self._memory.transaction():
            held = self._memory.held
            if held.holder == holder:
                self._memory.held = Held(held.holder, held.epoch, 0.0)

    def went_back(self, holder: str) -> None:
        """Nothing else is cached here that could be wrong."""
        self._revision = 0
        self.release_lease(holder)

    def cursor(self) -> Cursor | None:
        """Up to where signals are stored with their decisions."""
        with self._memory.transaction():
            return self._memory.cursor

    def revision(self) -> int:
        """Changes with every write."""
        with self._memory.transaction():
            return self._memory.revision

    def load_view(
        self, focus: Focus | None = None, *, anew: bool = True, yields: Callable[[], bool] | None = None
    ) -> View:
        """Everything the policy reads, or the part that a round concerns: at once, and always anew."""
        with self._memory.transaction():
            view = load_view(self._memory)
            self._revision = self._memory.revision
        return view if focus is None else focused(view, focus)

    def running_jobs(self) -> list[tuple[str, int]]:
        """Jobs with ranks, and their numbers of ranks."""
        with self._memory.transaction():
            jobs = [job for job in self._memory.jobs.values() if not job.state.ended]
            return [
                (job.spec.job, job.spec.world_size)
                for job in jobs
                if (job.spec.job, job.generation) in self._memory.generations
            ]

    def unseen(self, signals: Sequence[Signal]) -> list[Signal]:
        """Signals that are not stored yet, or their replacements; each once, in order."""
        first: dict[SignalKey, Signal] = {}
        for signal in signal_events.storable(signals):
            first.setdefault(signal_events.key_of(signal), signal)
        with self._memory.transaction():
            return [signal for key, signal in first.items() if key not in self._memory.signals]

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
        """Store a round of the policy. Raises StaleEpoch, and stores nothing, if a newer controller leads."""
        memory = self._memory
        with memory.transaction():
            if memory.held.epoch != epoch:
                raise StaleEpoch(f"Epoch {epoch} is over.", hint="nothing to do: another one leads now")
            if memory.revision < self._revision:
                raise StaleEpoch("The database is older than the view of this round.", hint="nothing to do")
            news: list[Event] = []
            news += _store_hosts(memory, outcome.hosts, now)
            news += _store_conditions(memory, outcome.conditions, now)
            news += _store_signals(memory, signals, now)
            memory.cursor = cursor or memory.cursor
            news += _store_incidents(memory, outcome.incidents)
            news += _supersede(memory, outcome.superseded_actions, now)
            news += _store_decisions(memory, outcome.decisions, epoch)
            for change in (*outcome.checks, *(c for decision in outcome.decisions for c in begun_by(decision))):
                if is_newest(memory.checks.get(change.host_id), change):
                    memory.checks[change.host_id] = change.check
            news += _store_actions(memory, outcome.decisions, first_steps, now)
            news += _store_jobs(memory, outcome.jobs, now)
            if outcome.adoption is not None:
                news += standings.adopt(memory, outcome.adoption, now)
            standings.need(memory, outcome, now)
            for one in outcome.withdrawn:
                row = memory.standings.get(one.standing.host_id)
                if row is not None and row.received_at == one.told_at:
                    del memory.standings[one.standing.host_id]
            if inputs is not None:
                self._keep(inputs, signals, epoch, now)
            memory.changed([*news, *outcome.events])

    def keep_round(self, inputs: RoundInputs, signals: Sequence[Signal], *, epoch: int, now: float) -> None:
        """Store the inputs of a round that is already stored."""
        with self._memory.transaction():
            if self._memory.held.epoch != epoch:
                raise StaleEpoch(f"Epoch {epoch} is over.", hint="nothing to do: another one leads now")
            self._keep(inputs, signals, epoch, now)

    def _keep(self, inputs: RoundInputs, signals: Sequence[Signal], epoch: int, now: float) -> None:
        number = len(self._memory.rounds) + 1
        self._memory.rounds.append(StoredRound(number, now, epoch, __version__, tuple(signals), inputs))


def _store_hosts(memory: Memory, changes: Sequence[HostChange], now: float) -> list[Event]:
    events: list[Event] = []
    for change in sorted(changes, key=lambda change: change.host_id):
        row = memory.hosts.get(change.host_id)
        if row is None:
            continue
        events += outcome_events.of_host(change, row.state, now)
        if change.state is not row.state:
            row.since = now
        row.state, row.reason = change.state, change.reason
        seen = change.ended_drain
        if seen is not None and memory.drains.get(change.host_id) == seen:
            del memory.drains[change.host_id]
        if change.preempt_deadline_at is not None:
            row.preempt_deadline_at = change.preempt_deadline_at
    return events


def _store_conditions(memory: Memory, changes: Sequence[ConditionChange], now: float) -> list[Event]:
    for change in changes:
        standing = memory.conditions.setdefault(change.host_id, {})
        if not change.has_ended:
            standing[change.condition.key] = StandingCondition(change.condition, change.is_overruled)
        elif standing.get(change.condition.key, StandingCondition(change.condition)).condition == change.condition:
            standing.pop(change.condition.key, None)
    return outcome_events.of_expired(changes, now)


def _store_signals(memory: Memory, fresh: Sequence[Signal], now: float) -> list[Event]:
    for signal in fresh:
        unique = signal_events.key_of(signal)
        assert unique not in memory.signals, f"{unique} is stored already"  # like a UNIQUE constraint
        memory.signals[unique] = signal
    for sender in {(signal.source, signal.incarnation): None for signal in fresh}:
        memory.raise_watermark(sender)
    for signal in fresh:
        body = signal.body
        if not isinstance(body, WorkerExited):
            continue
        memory.raise_newest_step(body.job, body.last_step)
        key = (body.job, body.generation, body.rank)
        if key[:2] in memory.generations and key not in memory.exits:
            memory.exits[key] = ExitRow(body, signal.at)
            rows = memory.ranks[key[:2]]
            row = rows.setdefault(body.rank, RankRow(signal.source, body.pid, reported_at=signal.at))
            row.step = max(row.step, body.last_step)
    return [signal_events.event_of(signal, now) for signal in fresh]


def _store_incidents(memory: Memory, changed: Sequence[Incident]) -> list[Event]:
    events: list[Event] = []
    for incident in changed:
        number = number_of(incident.incident_id)
        before = memory.incidents.get(number)
        if outcome_events.is_news(before, incident):
            memory.incident_changes.append(StateChange(number, incident.since, incident.state, incident.message))
        events += outcome_events.of_incident(before, incident)
        memory.incidents[number] = incident
    return events


def _supersede(memory: Memory, action_ids: Sequence[str], now: float) -> list[Event]:
    events: list[Event] = []
    for action_id in action_ids:
        row = memory.actions[number_of(action_id)]
        if row.state.ended:
            continue
        before = steps.position_of(row)
        row.state, row.ended_at, row.message = ActionState.SUPERSEDED, now, "superseded by a newer decision"
        row.version += 1
        memory.action_changes.append(StateChange(row.number, now, row.state, row.phase))
        steps.close_commands(memory, row)
        events.append(step_events.ended_event(before, row.state, now))
    return events


def _store_decisions(memory: Memory, decided: Sequence[Decision], epoch: int) -> list[Event]:
    events: list[Event] = []
    for decision in decided:
        number = number_of(decision.decision_id)
        assert number not in memory.decisions, f"{decision.decision_id} is there already"
        memory.decisions[number] = (decision, epoch)
        if decision.action is not None and decision.action.next is not None:
            plan = decision.action.next
            assert (plan.job, plan.generation) not in memory.generations, f"generation {plan.generation} is there"
            memory.generations[plan.job, plan.generation] = GenerationRow(plan, number)
            job = memory.jobs[plan.job]
            job.generation = max(job.generation, plan.generation)
            job.spec = job.spec.on(decision.action.spec.nnodes)
        events += outcome_events.of_decision(decision)
    return events


def _store_actions(
    memory: Memory, decided: Sequence[Decision], first_steps: Mapping[str, PlaybookStep], now: float
) -> list[Event]:
    events: list[Event] = []
    for decision in decided:
        if decision.action is None:
            continue
        number = number_of(decision.decision_id)
        row = memory.actions[number] = ActionRow(number, decision.incident_id, decision.action, decision.at)
        memory.action_changes.append(StateChange(number, decision.at, row.state))
        step = first_steps.get(f"act-{number}")
        if step is not None:
            events += steps.store(memory, row, step, now)
    return events


def _store_jobs(memory: Memory, changes: Sequence[JobChange], now: float) -> list[Event]:
    events: list[Event] = []
    for change in changes:
        row = memory.jobs.get(change.job)
        if row is None:
            continue
        ended = outcome_events.of_job(change, row.state, now)
        if ended:
            row.ended_at = now
        row.state, row.message = change.state, change.message
        if change.failure is not None:
            row.failures = (*row.failures, change.failure)
        events += ended
    return events
