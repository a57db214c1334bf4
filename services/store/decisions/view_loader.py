"""Builds the policy's view from the tables, in one snapshot.

Only changes are read and decoded again; `HostCache` reads thousands of hosts in pages. With very many hosts the view
contains only what a round is about (`services.controller.round.focus`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, func, or_, select

from flyball.contracts.checkpoints import Lineage
from flyball.contracts.clock import Clock
from flyball.contracts.cluster import JobState, Phase
from flyball.contracts.decisions import ActionPlan, ActionState, GenerationPlan, Incident
from flyball.contracts.identity import run_id
from services.controller.round.focus import (
    Focus,
    asks,
    clean_steps,
    named_hosts,
    named_jobs,
    open_hosts,
    open_jobs,
    ordered_jobs,
    placed_hosts,
)
from services.controller.round.view import (
    ActionView,
    Fleet,
    GenerationView,
    JobView,
    PastFailure,
    RankView,
    View,
)
from services.record.answers import ActionAnswers, failed_in
from services.record.codec import MAX_NUMBER, number_of
from services.record.host_views import CachedHost, Newest, OtherHosts, host_views, newest_ranks
from services.record.stored_steps import Wanted
from services.rules.grant_seals import GrantSeals
from services.store.actions.action_cache import COLUMNS, AnswerCache, decided_plans, incident_id, load_plans
from services.store.decisions import check_store, standing_store
from services.store.decisions.condition_store import ConditionCache
from services.store.decisions.drain_store import load_drains
from services.store.decisions.host_cache import HostCache
from services.store.decisions.host_failures import HostFailures
from services.store.decisions.order_store import load_orders
from services.store.decisions.past_actions import JobPast, PastActions
from services.store.decisions.readable_jobs import ReadableJobs, told_of, with_unreadable
from services.store.reports import vouching
from services.store.reports.persistent_steps import PersistentCopies
from services.store.reports.rank_rows import FirstSteps, RecordedRank, recorded_ranks
from services.store.sql import lease
from services.store.sql.set_aside import readable, setting_aside
from services.store.sql.shared_reads import HAS_ENDED, open_incidents
from services.store.sql.tables import actions, decisions, generations, incidents, job_failures, jobs

TURN_PAGES = 2  # pages of hosts read in a round for jobs whose turn it is: all hosts come up before all jobs
HOST_RANKS = 8  # the least that a host adds to the size of a job

_HOST_ID: Any = attrgetter("host_id")
_NO_PAST = JobPast()
_SUBMITTED = JobState.SUBMITTED.value  # also after a job was submitted again: it has no ranks yet
_FAILED = (ActionState.FAILED, ActionState.TIMED_OUT)
_Rows = Mapping[Any, Sequence[Row[Any]]]


class ViewLoader:
    """Caches plans and hosts until they change. Belongs to one thread."""

    def __init__(self, clock: Clock, seals: GrantSeals) -> None:
        self._hosts = HostCache(clock)
        self._known = ReadableJobs()
        self._standings = standing_store.StandingCache(seals)
        self._actions: dict[int, ActionPlan] = {}
        self._answers = AnswerCache()
        self._copies = PersistentCopies()
        self._first_steps = FirstSteps()
        self._failed: set[str] = set()  # actions, as of the last view
        self._vouched = vouching.VouchedHosts()
        self._others = OtherHosts()
        self._failures = HostFailures(clock)
        self._checks = check_store.CheckCache()
        self._past = PastActions(clock)
        self._conditions = ConditionCache()
        self._seen: list[tuple[Any, ...]] = []  # rows of jobs with which `_placement` was made
        self._placement: tuple[Mapping[str, str], Newest] = ({}, {})

    def expire_hosts(self, host_ids: Iterable[str]) -> None:
        """Read these hosts again: they changed."""
        self._hosts.expire(host_ids)

    def expire_checks(self) -> None:
        """Read the checks of hosts again: some changed."""
        self._checks.expire()

    def expire_all_hosts(self) -> None:
        """Read all hosts again: another controller may have changed them."""
        self._hosts.expire_all()
        self._checks.expire()
        self._failures.forget()
        self._past.forget()

    def running_jobs(self) -> list[tuple[str, int]]:
        """Return the jobs that have ranks, each with its number of ranks, as of the last view."""
        return [(job, max(known.ranks, HOST_RANKS * len(known.given))) for (job, _), known in self._known.plans.items()]

    def load(self, connection: Connection, focus: Focus | None = None) -> View:
        """Return the view of `_load`, with the rows that could not be decoded."""
        with setting_aside() as aside:
            view = self._load(connection, focus)
        return msgspec.structs.replace(view, unreadable=aside.rows) if aside.rows else view

    def _load(self, connection: Connection, focus: Focus | None) -> View:
        """Load jobs that have not ended or still have open incidents, actions or workers; all hosts; open incidents and
        their actions. With a focus, return what `focused` selects from that, without reading all hosts."""
        unresolved = tuple(open_incidents(connection))
        self._hosts.expire(incident.host_id for incident in unresolved if incident.host_id)
        if focus is not None:
            self._hosts.expire(named_hosts(focus.signals))
        checks = self._checks.read(connection)
        action_rows, plans = self._action_rows(connection, unresolved, check_store.running(checks))
        action_jobs = {row.number: row.job for row in action_rows}
        answers = self._answers.read(connection, action_jobs.keys())
        action_views = _actions(connection, action_rows, plans, answers)
        failed = {action.action_id: action.plan.stop_hosts for action in action_views if action.state in _FAILED}
        for action_id in failed.keys() - self._failed:  # perhaps because its hosts no longer have the step
            self._hosts.expire(failed[action_id])
        self._failed = set(failed)
        cached = self._hosts.read(connection, pages=None if focus is None else TURN_PAGES if focus.jobs else 0)
        ahead, asked = self._standings.read(connection)
        named = open_jobs(unresolved, action_views) | {held.spec.job for one in ahead for held in one.standing.jobs}
        named.update(job for one in ahead for job in one.ended)
        orders = load_orders(connection)
        named |= ordered_jobs(orders)
        every = _job_rows(connection, named.union(*(host.workers for host in cached.values())))
        rows, running = self._known.read(connection, every)
        placed, newest = self._placed(rows, running)
        placed = with_unreadable(placed, cached, {row.job for row in every} - {row.job for row in rows})
        drains, conditions = load_drains(connection), self._conditions.read(connection)
        pressing = (name for name, standing in conditions.items() if any(one.is_pressing for one in standing))
        noted = {*drains, *pressing}  # hosts that every round covers
        shown = list(cached.values())
        self._others.note(cached, self._hosts.changed(), placed, newest)
        signalled = named_hosts(focus.signals) if focus is not None else set()
        present = {row.job for row in rows}
        if focus is not None:
            named |= focus.jobs | named_jobs(focus.signals)
            named.update(row.job for row in rows if asks(JobState(row.state), stop_requested=bool(row.stop_requested)))
            named.update(placed[name] for name in (*signalled, *noted) if name in cached and name in placed)
            rows = [row for row in rows if row.job in named]
        past = self._past.read(
            connection,
            unresolved,
            action_jobs,
            shown={row.job for row in rows},
            present=present,
            restarted={row.job for row in rows if row.generation > 0},
        )
        job_views = self._jobs(connection, rows, running, cached, past)
        if focus is not None:
            involved = {
                *signalled,
                *told_of(ahead),
                *noted,
                *open_hosts(unresolved, action_views),
                *placed_hosts(job_views),
            }
            involved.update(self._others.of(named))
            shown = [cached[name] for name in involved if name in cached]
        shown.sort(key=_HOST_ID)
        vouched = self._vouched.read(connection)
        losses, failed_at = self._failures.read(connection, unresolved)
        self._copies.forget_others(newest)
        marks = clean_steps(focus.signals if focus is not None else (), unresolved)
        return View(
            jobs=job_views,
            hosts=host_views(
                shown,
                placed,
                newest,
                drains,
                vouched.received_at,
                losses=losses,
                failed_at=failed_at,
                conditions=conditions,
                checks=checks,
            ),
            incidents=unresolved,
            actions=action_views,
            copies=(
                *self._known.copies_of(connection, shown, None if focus is None else named),
                *self._copies.read(connection, _wanted(job_views, marks)),
            ),
            next_incident=_next(connection, incidents),
            next_decision=max(_next(connection, decisions), standing_store.decision_floor(connection) + 1),
            is_whole=focus is None,
            fleet=Fleet() if focus is None else Fleet.of(host.failure_domain for host in cached.values()),
            cluster=standing_store.cluster_id(connection),
            standings=ahead,
            asked=asked,
            epoch=lease.current_epoch(connection),
            orders=orders,
        )

    def _action_rows(
        self, connection: Connection, unresolved: Sequence[Incident], checks: set[int]
    ) -> tuple[Sequence[Row[Any]], Mapping[int, ActionPlan]]:
        """Return the rows of actions, and their plans. One whose own plan cannot be decoded is shown with the one that
        was decided: it ends as failed, and the policy has to see that."""
        rows = _action_rows(connection, unresolved, checks)
        rows = [row for row in rows if readable("actions", f"act-{row.number}", ActionState, row.state) is not None]
        numbers = {row.number for row in rows}
        self._actions = {number: plan for number, plan in self._actions.items() if number in numbers}
        self._actions.update(load_plans(connection, numbers - self._actions.keys()))
        plans = self._actions | dict(decided_plans(connection, numbers - self._actions.keys()))
        return [row for row in rows if row.number in plans], plans

    def _placed(self, rows: Sequence[Row[Any]], running: Mapping[str, Any]) -> tuple[Mapping[str, str], Newest]:
        """Return host -> the job that has ranks on it, and job -> (newest generation, whether it ended)."""
        plans = self._known.plans
        seen = [
            (row.job, row.generation, row.state, row.job in running, plans.get((row.job, row.generation)))
            for row in rows
        ]
        if seen == self._seen:
            return self._placement  # the same objects: whoever compares them is quick
        placed: dict[str, str] = {}
        newest: dict[str, tuple[int, bool]] = {}
        for row in rows:
            has_ended = JobState(row.state).ended
            newest[row.job] = (row.generation if row.job in running else -1, has_ended)
            if row.job in running and not has_ended and row.state != _SUBMITTED:
                placed.update(dict.fromkeys(self._known.plans[row.job, row.generation].given, row.job))
        self._seen, self._placement = seen, (placed, newest)
        return self._placement

    def _jobs(
        self,
        connection: Connection,
        rows: Sequence[Row[Any]],
        running: Mapping[str, Any],
        cached: Mapping[str, CachedHost],
        past: Mapping[str, JobPast],
    ) -> tuple[JobView, ...]:
        names = [row.job for row in rows]
        if not names:
            return ()
        seen = {
            row.job: newest_ranks(cached, row.job, row.generation, self._known.plans[row.job, row.generation].given)
            for row in rows
            if row.job in running
        }
        # If the positions of all ranks are known, read only rows of ended ranks: each of very many ranks has a row.
        whole = {
            row.job
            for row in rows
            if row.job in seen and len(seen[row.job]) == self._known.plans[row.job, row.generation].ranks
        }
        for recorded in chain(
            recorded_ranks(connection, {name for name in names if name not in whole}),
            recorded_ranks(connection, whole, only_ended=True),
        ):
            of_job = seen.setdefault(recorded.job, {})
            of_job[recorded.rank] = _with_exit(of_job.get(recorded.rank), recorded)
        first_steps = self._first_steps.read(connection, {job: running[job].generation for job in seen})
        granted = {
            row.job: _generation(
                running[row.job],
                self._known.plans[row.job, row.generation].plan,
                self._known.lineages[row.job][1],
                seen[row.job],
                first_steps.get(row.job, 0.0),
            )
            for row in rows
            if row.job in running
        }
        failures = _grouped(
            connection.execute(
                select(job_failures).where(job_failures.c.job.in_(names)).order_by(job_failures.c.number)
            ).all()
        )
        return tuple(
            JobView(
                spec=self._known.specs[row.job],
                state=JobState(row.state),
                submitted_at=row.submitted_at,
                stop_requested=bool(row.stop_requested),
                generation=None if row.state == _SUBMITTED else granted.get(row.job),
                before=_before(row, self._known.adopted.get(row.job), granted.get(row.job))
                if row.state == _SUBMITTED
                else None,
                stored_run=row.run,
                failures=tuple(
                    PastFailure(f.generation, f.cause, f.error_kind, f.error_message, f.step, f.host_id)
                    for f in failures[row.job]
                ),
                newest_step=row.newest_step,
                message=row.message,
                ended_at=row.ended_at,
                recoveries=past.get(row.job, _NO_PAST).recoveries,
                acted_at=past.get(row.job, _NO_PAST).acted_at,
            )
            for row in rows
        )


def _next(connection: Connection, table: Any) -> int:  # noqa: ANN401 - a table's columns have no static type
    newest = select(func.coalesce(func.max(table.c.number), 0)).where(table.c.number < MAX_NUMBER)
    return int(connection.scalar(newest) or 0) + 1


def _grouped(rows: Sequence[Row[Any]]) -> _Rows:
    by_job: defaultdict[str, list[Row[Any]]] = defaultdict(list)
    for row in rows:
        by_job[row.job].append(row)
    return by_job


def _with_exit(seen: RankView | None, recorded: RecordedRank) -> RankView:
    rank = seen or RankView(recorded.rank, recorded.host_id, -1, Phase.STARTING, 0.0)
    if recorded.exited is None:
        return rank
    return msgspec.structs.replace(
        rank,
        step=max(rank.step, recorded.exited.last_step),
        reported_at=rank.reported_at or recorded.exited_at,
        exited=recorded.exited,
        exited_at=recorded.exited_at,
    )


def _generation(
    row: Any,  # noqa: ANN401
    plan: GenerationPlan,
    lineage: Lineage,
    seen: Mapping[int, RankView],
    first_step_at: float,
) -> GenerationView:
    return GenerationView(
        generation=plan.generation,
        parent=plan.parent,
        lineage=lineage,
        hosts=plan.hosts,
        peers=plan.peers,
        started_at=row.started_at,
        restore_step=row.restore_step,
        restart_count=plan.restart_count,
        restarts_used=plan.restarts_used,
        furthest_step=plan.furthest_step,
        run=plan.run,
        parent_lineage=plan.parent_lineage,
        ran_before_s=plan.ran_before_s,
        too_few_hosts=plan.too_few_hosts,
        step_s=plan.step_s,
        first_step_at=first_step_at,
        ranks=tuple(seen[number] for number in sorted(seen)),
    )


def _before(row: Any, lineage: Lineage | None, granted: GenerationView | None) -> GenerationView | None:  # noqa: ANN401
    """Return what a resubmitted job continues from. Its lineage is empty if this is another run."""
    if lineage:
        number = max(lineage[-1].generation, row.generation)
        return GenerationView(number, None, lineage, (), {}, 0.0, None, 0)
    if granted is None or granted.run == (row.run or run_id(row.submitted_at)):
        return granted
    return msgspec.structs.replace(granted, lineage=())


def _wanted(job_views: Sequence[JobView], marks: Mapping[str, Iterable[int]]) -> dict[str, Wanted]:
    return {
        view.spec.job: Wanted.of(view.spec, generation.lineage, marks.get(view.spec.job, ()))
        for view in job_views
        if (generation := view.generation or view.before) is not None
    }


def _job_rows(connection: Connection, named: Collection[str]) -> Sequence[Row[Any]]:
    wanted = or_(~HAS_ENDED, jobs.c.job.in_(sorted(named)))
    return connection.execute(select(jobs).where(wanted).order_by(jobs.c.submitted_at, jobs.c.job)).all()


def _action_rows(connection: Connection, open_incidents: Sequence[Incident], checks: set[int]) -> Sequence[Row[Any]]:
    newest = [*checks, *(number_of(incident.action_id) for incident in open_incidents if incident.action_id)]
    granted = (jobs.c.job == generations.c.job) & (jobs.c.generation == generations.c.generation)
    running = select(generations.c.decision).join(jobs, granted).where(jobs.c.state == JobState.RUNNING.value)
    is_failed_start = (actions.c.phase == "start") & actions.c.state.in_([state.value for state in _FAILED])
    of_running = actions.c.number.in_(list(connection.scalars(running)))
    rows: dict[int, Row[Any]] = {}
    # One query per condition, so that each uses its index: for all at once MySQL would read every action ever stored.
    for wanted in (~actions.c.ended, actions.c.number.in_(newest), is_failed_start & of_running):
        rows |= {row.number: row for row in connection.execute(select(*COLUMNS).where(wanted))}
    return [rows[number] for number in sorted(rows)]


def _actions(
    connection: Connection,
    rows: Sequence[Row[Any]],
    plans: Mapping[int, ActionPlan],
    answers: Mapping[int, ActionAnswers],
) -> tuple[ActionView, ...]:
    if not rows:
        return ()
    fixed = {
        row.decision: row.restore_step
        for row in connection.execute(
            select(generations.c.decision, generations.c.restore_step).where(
                generations.c.decision.in_(list(plans)), generations.c.started_at > 0.0
            )
        )
    }
    return tuple(
        ActionView(
            action_id=f"act-{row.number}",
            decision_id=f"dec-{row.number}",
            incident_id=incident_id(row.incident),
            plan=plans[row.number],
            state=ActionState(row.state),
            phase=row.phase,
            started_at=row.started_at,
            message=row.message,
            positions=answers[row.number].positions,
            stands=answers[row.number].stands,
            checks=answers[row.number].checks,
            unmeasured=answers[row.number].unmeasured,
            failed=failed_in(answers[row.number], row.phase),
            restore_step=fixed.get(row.number),
            restore_fixed=row.number in fixed,
        )
        for row in rows
    )
