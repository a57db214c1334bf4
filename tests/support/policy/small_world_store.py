"""The small world's store: the database as dictionaries, around the real playbook."""

from __future__ import annotations

import msgspec

from flyball.contracts.checkpoints import ShardCopy
from flyball.contracts.cluster import HostState, Phase, Placement
from flyball.contracts.decisions import (
    ActionState,
    Command,
    CommandUpdate,
    Decision,
    Incident,
    StartWorkers,
    UpdateState,
)
from flyball.contracts.identity import Fence
from flyball.contracts.reports.rank_columns import statuses_in
from flyball.contracts.reports.signals import Report, Signal, WorkerExited
from services.actuator.ports import ActionProgress, OutboxCommand, PlaybookStep
from services.actuator.rules.playbook import advance
from services.controller.round.view import (
    ActionView,
    GenerationView,
    HostView,
    JobView,
    Outcome,
    PastFailure,
    RankView,
    View,
)
from services.rules.incident_states import ACTION, ActionEvent


class Store:
    """Has the same rules as the real one."""

    def __init__(self) -> None:
        self.hosts: dict[str, HostView] = {}
        self.workers: dict[str, dict[str, int]] = {}
        self.copies: dict[str, tuple[ShardCopy, ...]] = {}
        self.jobs: dict[str, JobView] = {}
        self.ranks: dict[tuple[str, int, int], RankView] = {}
        self.started: dict[tuple[str, int], tuple[float, Placement]] = {}
        self.incidents: dict[str, Incident] = {}
        self.decisions: list[Decision] = []
        self.actions: dict[str, ActionProgress] = {}
        self.messages: dict[str, str] = {}
        self.steps: list[tuple[str, PlaybookStep]] = []

    def report(self, report: Report, now: float) -> None:
        facts, host_id = report.facts, report.facts.host_id
        known = self.hosts.get(host_id)
        self.hosts[host_id] = HostView(
            host_id=host_id,
            state=known.state if known else HostState.HEALTHY,
            since=known.since if known else now,
            address=facts.address,
            failure_domain=facts.failure_domain,
            engine_address=facts.engine_address,
            free_port=facts.free_port,
            last_report_at=now,
            preempt_deadline_at=known.preempt_deadline_at if known else 0.0,
            reason=known.reason if known else "",
        )
        self.workers[host_id] = {workers.job: workers.generation for workers in report.workers}
        self.copies[host_id] = report.copies
        for status in statuses_in(report.workers, report.progress):
            key = (status.job, status.generation, status.rank)
            before = self.ranks.get(key)
            self.ranks[key] = RankView(
                rank=status.rank,
                host_id=host_id,
                step=max(status.step, before.step if before else -1),
                phase=status.phase,
                reported_at=now,
                exited=before.exited if before else None,
                exited_at=before.exited_at if before else 0.0,
            )

    def view(self) -> View:
        jobs = tuple(
            msgspec.structs.replace(job, generation=self._generation(name, job)) for name, job in self.jobs.items()
        )
        placed = {
            part.host_id: job.spec.job
            for job in jobs
            if job.generation and not job.state.ended
            for part in job.generation.hosts
        }
        newest = {job.spec.job: job.generation.generation for job in jobs if job.generation}
        hosts = tuple(
            msgspec.structs.replace(
                host,
                job=placed.get(name, ""),
                stale_jobs={j: g for j, g in self.workers[name].items() if g < newest.get(j, -1)},
            )
            for name, host in sorted(self.hosts.items())
        )
        still_open = tuple(i for i in self.incidents.values() if not i.state.closed)
        wanted = {i.action_id for i in still_open}
        actions = tuple(self._action(a) for a in self.actions.values() if not a.state.ended or a.action_id in wanted)
        copies = tuple(copy for name in sorted(self.copies) for copy in self.copies[name])
        return View(jobs, hosts, still_open, actions, copies, len(self.incidents) + 1, len(self.decisions) + 1)

    def _generation(self, name: str, job: JobView) -> GenerationView | None:
        granted = [d.action.next for d in self.decisions if d.job == name and d.action and d.action.next]
        if not granted:
            return None
        plan = granted[-1]
        started_at, placement = self.started.get((name, plan.generation), (0.0, None))
        return GenerationView(
            generation=plan.generation,
            parent=plan.parent,
            lineage=placement.lineage if placement else plan.parent_lineage,
            hosts=plan.hosts,
            peers=plan.peers,
            started_at=started_at,
            restore_step=placement.restore.step if placement and placement.restore else None,
            restart_count=plan.restart_count,
            restarts_used=plan.restarts_used,
            furthest_step=plan.furthest_step,
            ranks=tuple(v for (j, g, _), v in sorted(self.ranks.items()) if (j, g) == (name, plan.generation)),
        )

    def _action(self, action: ActionProgress) -> ActionView:
        positions: dict[str, int] = {}
        for record in action.commands:
            for position in record.update.result.positions if record.update else ():
                key = str(position.rank)
                positions[key] = max(position.step, positions.get(key, position.step))
        following = action.plan.next
        started = self.started.get((action.plan.job, following.generation)) if following else None
        return ActionView(
            action_id=action.action_id,
            decision_id=action.decision_id,
            incident_id=action.incident_id,
            plan=action.plan,
            state=action.state,
            phase=action.phase,
            started_at=action.started_at,
            message=self.messages.get(action.action_id, ""),
            positions=positions,
            restore_step=started[1].restore.step if started and started[1].restore else None,
            restore_fixed=started is not None,
        )

    def commit(self, outcome: Outcome, signals: list[Signal], now: float) -> None:
        for signal in signals:
            if isinstance(body := signal.body, WorkerExited):
                key = (body.job, body.generation, body.rank)
                before = self.ranks.get(key) or RankView(
                    body.rank, signal.source, body.last_step, Phase.STARTING, signal.at
                )
                if before.exited is None:
                    self.ranks[key] = msgspec.structs.replace(
                        before, exited=body, exited_at=signal.at, step=max(before.step, body.last_step)
                    )
        for change in outcome.hosts:
            host = self.hosts[change.host_id]
            notice = change.preempt_deadline_at
            self.hosts[change.host_id] = msgspec.structs.replace(
                host,
                state=change.state,
                since=now if change.state is not host.state else host.since,
                reason=change.reason,
                preempt_deadline_at=host.preempt_deadline_at if notice is None else notice,
            )
        for incident in outcome.incidents:
            self.incidents[incident.incident_id] = incident
        for action_id in outcome.superseded_actions:
            self.actions[action_id] = msgspec.structs.replace(
                self.actions[action_id], state=ACTION.advance(self.actions[action_id].state, ActionEvent.SUPERSEDED)
            )
        for change in outcome.jobs:
            job = self.jobs[change.job]
            failures: tuple[PastFailure, ...] = (*job.failures, change.failure) if change.failure else job.failures
            self.jobs[change.job] = msgspec.structs.replace(
                job, state=change.state, message=change.message, failures=failures
            )
        for decision in outcome.decisions:
            assert decision.decision_id == f"dec-{len(self.decisions) + 1}"
            self.decisions.append(decision)
            if decision.action is not None:
                action_id = decision.decision_id.replace("dec", "act")
                self.actions[action_id] = ActionProgress(
                    action_id=action_id,
                    decision_id=decision.decision_id,
                    incident_id=decision.incident_id,
                    plan=decision.action,
                    state=ActionState.QUEUED,
                    phase="",
                    version=0,
                    started_at=now,
                    commands=(),
                )
                self.carry_out(action_id, now)

    def carry_out(self, action_id: str, now: float) -> None:
        """Carry out one step of the playbook."""
        action = self.actions[action_id]
        addresses = {name: host.engine_address for name, host in self.hosts.items()}
        action = msgspec.structs.replace(action, engine_addresses=addresses)
        step = advance(action, now)
        self.steps.append((action_id, step))
        known = {record.command.command_id for record in action.commands}
        fresh = []
        for draft in step.commands:
            assert draft.command_id not in known, "a command was written twice"
            body = draft.body
            following = action.plan.next
            generation = (
                body.placement.generation
                if isinstance(body, StartWorkers)
                else (following.generation - 1 if following else action.plan.generation)
            )
            command = Command(draft.command_id, action_id, draft.host_id, Fence(1, generation), body, draft.deadline_s)
            fresh.append(OutboxCommand(command, step.phase, now, None))
        if step.placement is not None:
            key = (step.placement.job, step.placement.generation)
            assert key not in self.started, "a generation was started twice"
            self.started[key] = (now, step.placement)
        if step.message:
            self.messages[action_id] = step.message
        self.actions[action_id] = msgspec.structs.replace(
            action,
            phase=step.phase,
            state=step.state,
            attempt=step.attempt,
            version=action.version + 1,
            commands=(*action.commands, *fresh),
        )

    def answer(self, update: CommandUpdate) -> None:
        for action_id, action in self.actions.items():
            records = []
            for record in action.commands:
                final = record.update is not None and record.update.state is not UpdateState.ACKNOWLEDGED
                mine = record.command.command_id == update.command_id and not final
                records.append(msgspec.structs.replace(record, update=update) if mine else record)
            self.actions[action_id] = msgspec.structs.replace(action, commands=tuple(records))
