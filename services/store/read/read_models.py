"""Data for users, ready for JSON, one snapshot per call.

Times are wall-clock seconds, null if not reached. Steps are -1 if there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Connection

from flyball.contracts.errors import NotFound
from services.record.codec import number_of, plain
from services.runtime.list_filters import (
    ActionFilter,
    DecisionFilter,
    HostFilter,
    IncidentFilter,
    JobFilter,
    OrderFilter,
    SignalFilter,
)
from services.runtime.paging import Page
from services.store.decisions.order_store import load_orders
from services.store.read import incident_story, read_copies, read_history, read_hosts, read_lists, read_state
from services.store.read.read_host_map import host_map
from services.store.sql.database import Database
from services.store.sql.set_aside import RESTORE, setting_aside
from services.store.sql.shared_reads import GivenPlans

Json = dict[str, Any]
T = TypeVar("T")
_Rows = tuple[tuple[str, str], ...]  # table, key: see `readable`
_FIRST = Page()


class _Filters(NamedTuple):
    """Filters that let everything pass."""

    jobs: JobFilter = JobFilter()
    hosts: HostFilter = HostFilter()
    incidents: IncidentFilter = IncidentFilter()
    decisions: DecisionFilter = DecisionFilter()
    orders: OrderFilter = OrderFilter()


_FILTERS = _Filters()


class SqlReadModels:
    """The data of the API, the live page and the command line. Thread-safe."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._given = GivenPlans()
        self._plans = read_state.job_plans()

    def jobs(self, page: Page = _FIRST, *, open_only: bool = False, wanted: JobFilter = _FILTERS.jobs) -> list[Json]:
        """Return a page of all jobs, or of those that have not ended, oldest first."""
        return self._read(
            lambda c: read_state.jobs(c, page=page, open_only=open_only, wanted=wanted, plans=self._plans)
        )

    def job_counts(self) -> dict[str, int]:
        """Return how many jobs are open, and how many have ended."""
        return self._read(read_state.job_counts)

    def job(self, name: str) -> Json:
        """Return one job: spec, state, generation, and each rank with host, step and phase. Raises NotFound."""
        return self._only(
            lambda c: read_state.jobs(c, name, plans=self._plans, with_ranks=True),
            (("jobs", name),),
            f"job {name!r}",
            "`flyball get jobs` lists them",
        )

    def hosts(self, page: Page = _FIRST, *, also_left: bool = False, wanted: HostFilter = _FILTERS.hosts) -> list[Json]:
        """Return a page of the hosts that have reported, by name; the first page has the last of them. `also_left`:
        includes those that left in an orderly way."""
        return self._read(
            lambda c: read_hosts.hosts(c, page=page, also_left=also_left, wanted=wanted, given=self._given)
        )

    def host(self, host_id: str) -> Json:
        """Return one host. Raises NotFound."""
        return self._only(
            lambda c: read_hosts.hosts(c, host_id, given=self._given),
            (("hosts", host_id),),
            f"host {host_id!r}",
            "`flyball get hosts` lists them",
        )

    def host_states(self) -> dict[str, int]:
        """Return how many hosts that have not left are in each state, those with none included."""
        return self._read(read_hosts.host_states)

    def checkpoints(self, job: str, *, with_copies: bool = False) -> Json:
        """Return the verified copies by tier, and the recovery point; only if asked each copy too, of which a large job
        has a hundred thousand. Raises NotFound."""
        return self._only(
            lambda c: read_copies.checkpoints(c, job, with_copies=with_copies),
            (("jobs", job),),
            f"job {job!r}",
            "`flyball get jobs` lists them",
        )

    def recoverability(self, job: str) -> Json:
        """Return the newest step in each tier, and what a loss of hosts would cost. Raises NotFound."""
        return self._only(
            lambda c: read_copies.recoverability(c, job, self._given),
            (("jobs", job),),
            f"job {job!r}",
            "`flyball get jobs` lists them",
        )

    def host_map(self) -> Json:
        """Return all hosts in short, by failure domain."""
        return self._read(lambda c: host_map(c, self._given))

    def incidents(
        self, job: str | None, page: Page = _FIRST, wanted: IncidentFilter = _FILTERS.incidents
    ) -> list[Json]:
        """Return a page of incidents, oldest first: cause, times, signals, decisions, lost steps, sources of restores,
        and the timeline."""
        return self._read(lambda c: read_history.incidents(c, job, page=page, wanted=wanted))

    def incident(self, incident_id: str) -> Json:
        """Return one incident as a story: signals, decisions with actions and commands, and all of it in the order of
        time. Raises NotFound."""
        number = number_of(incident_id)
        return self._only(
            lambda c: incident_story.incident(c, number),
            (("incidents", f"inc-{number}"),),
            f"incident {incident_id!r}",
            "`flyball get incidents` lists the newest",
        )

    def signals(self, page: Page, wanted: SignalFilter) -> list[Json]:
        """Return a page of signals, in the order of storing."""
        return self._read(lambda c: read_lists.signals(c, page, wanted))

    def actions(self, page: Page, wanted: ActionFilter) -> list[Json]:
        """Return a page of actions, in the order of their decisions."""
        return self._read(lambda c: read_lists.actions(c, page, wanted))

    def action(self, action_id: str) -> Json:
        """Return one action with its plan, phases, commands and answers. Raises NotFound."""
        number = number_of(action_id)

        def read(connection: Connection) -> list[Json]:
            whole = read_history.action(connection, number)
            return [one | whole for one in read_lists.action(connection, number) if whole is not None]

        rows = (("actions", f"act-{number}"), ("decisions", f"dec-{number}"))
        return self._only(read, rows, f"action {action_id!r}", "`flyball get actions` lists the newest")

    def decisions(
        self, job: str | None, page: Page = _FIRST, wanted: DecisionFilter = _FILTERS.decisions
    ) -> list[Json]:
        """Return a page of decisions with their reasons, oldest first."""
        return self._read(lambda c: read_history.decisions(c, job, page, wanted))

    def decision(self, decision_id: str) -> Json:
        """Return one decision: the incident, the signals before it, its action with phases, commands and answers.
        Raises NotFound."""
        number = number_of(decision_id)
        return self._only(
            lambda c: read_history.decision(c, number),
            (("decisions", f"dec-{number}"),),
            f"decision {decision_id!r}",
            "`flyball get decisions` lists the newest",
        )

    def orders(self, page: Page = _FIRST, wanted: OrderFilter = _FILTERS.orders) -> list[Json]:
        """Return a page of operators' orders that stand or were refused, by kind and target; the first page has the
        last of them. `before` of the page: "KIND:TARGET"."""
        kind, _, target = page.before.partition(":")
        found = [
            order
            for order in self._read(load_orders)
            if (not wanted.kinds or order.kind in wanted.kinds)
            and (not wanted.states or order.state in wanted.states)
            and (not wanted.targets or order.target in wanted.targets)
            and (not page.before or (order.kind.value, order.target) < (kind, target))
        ]
        return [plain(order) for order in found[-page.limit :]]

    def _read(self, work: Callable[[Connection], T]) -> T:
        with self._db.read() as connection:
            return work(connection)

    def _only(self, work: Callable[[Connection], Sequence[Json]], rows: _Rows, what: str, hint: str) -> Json:
        """Return the one item that `work` finds. Raises NotFound, which says so if it is there but one of its own rows
        cannot be read."""
        with setting_aside() as aside:
            found = self._read(work)
        if found:
            return found[0]
        for row in aside.rows:
            if (row.table, row.key) in rows:
                raise NotFound(
                    f"The {what} cannot be read: {row.key} of {row.table} ({row.reason}).",
                    hint=RESTORE,
                )
        raise NotFound(f"There is no {what}.", hint=hint)
