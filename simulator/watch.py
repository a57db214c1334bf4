"""Looks at a simulated cluster after every event, for what must hold at every moment.

What the history or the database keeps is checked at the end (`simulator.checks`): there, nothing is lost. Here is what
a later event hides: what two tables say at once, a copy that is overwritten, a database that is replaced. Each look
costs only what has changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

from flyball.contracts.checkpoints import Lineage, ShardSource, Tier
from flyball.contracts.cluster import restored_world_size, restores_another_world
from flyball.contracts.decisions import DecisionKind, StartWorkers
from simulator.checks.record_checks import BESIDE, Violation
from simulator.cluster import JOB, Cluster
from simulator.world.store import SharedStore
from simulator.world.world import KNOWN_AFTER_S

MAX_EVENTS_AT_ONCE = 20_000  # events at one moment of simulated time, after which nothing will ever come of it


class Livelock(Exception):
    """The simulated time stands still, though events go on."""


class Watch:
    """Its `violations` are those that lie behind."""

    def __init__(self, cluster: Cluster) -> None:
        self._world, self._memory = cluster.world, cluster.memory
        self._timeline = cluster.timeline
        self.violations: list[Violation] = []
        self._at, self._count = self._timeline.now, 0
        self._copies = self._stores = -1
        self._stored = (-1, -1)  # a generation, and the newest step of its history in the store
        self._points, self._era = (-1, -1), (-1, -1, -1)
        self._begin_database()
        self._timeline.after_each = self.look

    def _begin_database(self) -> None:
        """Another database is in its place: what it has was looked at before, or is lost."""
        memory = self._memory
        self._commands = memory.commands
        self._seen = (len(memory.commands), len(memory.action_changes), len(memory.incident_changes))

    def look(self) -> None:
        """Look at what the last event changed. Raises Livelock."""
        self._count = self._count + 1 if self._timeline.now == self._at else 0
        self._at = self._timeline.now
        if self._count > MAX_EVENTS_AT_ONCE:
            raise Livelock(f"{self._count} events, and it is still {self._world.elapsed_s:.3f} s")
        memory = self._memory
        if memory.commands is not self._commands:
            self._begin_database()
        now = (len(memory.commands), len(memory.action_changes), len(memory.incident_changes))
        if now != self._seen:
            (commands, actions, incidents), self._seen = self._seen, now
            found = [
                *(self._starts(commands) if commands != now[0] else ()),
                *(self._open_actions() if actions != now[1] else ()),
                *(self._open_incidents() if incidents != now[2] else ()),
            ]
            self.violations += found
        store = self._world.store
        if store is not None and store.changes != self._stores:
            self._stores = store.changes
            self.violations += self._stored_step(store)
        if self._world.copies_changed != self._copies:
            self._copies = self._world.copies_changed
            self.violations += self._recovery_point()

    # --- the database ------------------------------------------------------------------------------------------------

    def _open_actions(self) -> Iterator[Violation]:
        """No job has two actions that are carried out at once."""
        rows = [row for row in self._memory.actions.values() if not row.state.ended]
        counts = Counter(row.plan.job for row in rows if row.plan.kind is not DecisionKind.CORDON)
        for job, count in counts.items():
            if count > 1:
                yield self._violation("two_open_actions", f"{job} has {count} open actions")

    def _open_incidents(self) -> Iterator[Violation]:
        """No job has two open incidents of one failure."""
        rows = [row for row in self._memory.incidents.values() if not row.state.closed and row.cause not in BESIDE]
        for job, count in Counter(row.job for row in rows).items():
            if count > 1:
                names = " and ".join(row.incident_id for row in rows if row.job == job)
                yield self._violation("two_open_incidents", f"{names} of {job} are open at once")

    def _starts(self, since: int) -> Iterator[Violation]:
        """A start names a step of which every shard can be had: a copy is where the plan says, or was lost there so
        lately that nobody can know."""
        for row in islice(self._memory.commands.values(), since, None):
            body = row.command.body
            if not isinstance(body, StartWorkers) or body.placement.restore is None:
                continue
            placement, restore = body.placement, body.placement.restore
            part = placement.host(row.command.host_id)
            ranks = part.ranks if part is not None else ()
            if restores_another_world(placement):  # then each needs a part of every shard
                ranks = tuple(range(restored_world_size(placement)))
            for rank in ranks:
                sources = restore.sources.get(str(rank), ())
                if not any(self._has(source, restore.step) for source in sources):
                    name = f"generation {placement.generation} is to restore step {restore.step}"
                    where = ", ".join(source.host_id or "the store" for source in sources) or "nobody"
                    yield self._violation("shard_not_there", f"{name}: the shard of rank {rank} is not on {where}")

    def _has(self, source: ShardSource, step: int) -> bool:
        host = self._world.hosts.get(source.host_id)
        if source.tier is Tier.PERSISTENT:
            return self._world.store is not None and self._world.store.has(source, step)
        if host is None:
            return False
        if not host.is_up or self._world.now - host.switched_at < KNOWN_AFTER_S:
            return True
        wanted = (JOB, source.generation, step, source.rank, source.tier)
        return any((c.job, c.generation, c.step, c.rank, c.tier) == wanted for c in host.copies)

    # --- the copies --------------------------------------------------------------------------------------------------

    def _recovery_point(self) -> Iterator[Violation]:
        """The newest complete step only grows, and so does the newest one that outlives any one host: no copy of either
        is overwritten before a newer one is as safe. Unless a host loses its memory, the job goes back, or its ranks
        give up to wait for a replica."""
        world = self._world
        lineage = world.truth.lineage
        if not lineage:
            return
        on_two = self._newest(lineage, copies=2) if world.truth.has_replicas else -1
        newest = self._newest(lineage, copies=1), on_two
        era = (world.memories_lost, world.replicas_given_up, lineage[-1].generation)
        if era == self._era:
            for before, now, how in zip(self._points, newest, ("complete", "complete on two hosts"), strict=True):
                if now < before:
                    what = f"step {before} was {how}, and now step {now} is the newest that is"
                    yield self._violation("recovery_point_dropped", what)
        self._points, self._era = newest, era

    def _stored_step(self, store: SharedStore) -> Iterator[Violation]:
        """The newest step of the history in the store only grows, as long as the job does not go back."""
        lineage = self._world.truth.lineage
        if not lineage:
            return
        generation, newest = lineage[-1].generation, max((step for step, _ in store.complete(lineage)), default=-1)
        if self._stored[0] == generation and newest < self._stored[1]:
            what = f"step {self._stored[1]} was in the store, and now step {newest} is the newest that is"
            yield self._violation("stored_step_dropped", what)
        self._stored = (generation, newest)

    def _newest(self, lineage: Lineage, *, copies: int) -> int:
        """The newest step of the history of which every rank has this many copies, each on another host; -1: none.
        Computed without the core's code."""
        holders: dict[tuple[int, int], dict[int, set[str]]] = {}
        for host in self._world.hosts.values():
            for copy in host.copies:
                of_step = holders.setdefault((copy.generation, copy.step), {})
                of_step.setdefault(copy.rank, set()).add(host.host_id)
        newest = -1
        for entry in lineage:
            size = entry.world_size or self._world.truth.world_size
            for (generation, step), ranks in holders.items():
                counts = entry.upto_step is None or step <= entry.upto_step
                if step > newest and generation == entry.generation and counts and len(ranks) >= size:
                    newest = step if all(len(found) >= copies for found in ranks.values()) else newest
        return newest

    def _violation(self, invariant: str, what: str) -> Violation:
        return Violation(invariant, f"at {self._world.elapsed_s:.3f} s {what}")
