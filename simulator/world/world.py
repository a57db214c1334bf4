"""The simulated cluster as it truly is: machines, their copies, and the ranks. The services know it from reports
only."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from random import Random
from typing import TYPE_CHECKING

from ckpt_engine.rules.slot_rules import MIN_SLOTS, SlotState, SlotView, choose_slot
from flyball.contracts.checkpoints import Lineage, ShardCopy, ShardSource, Tier, branch
from flyball.contracts.cluster import Placement
from flyball.contracts.recovery import complete_points
from simulator.checks.history import EXPECTED, HOST_LOST, Fact, HostSwitched, WorkerBegan, WorkerEnded
from simulator.world.events import BEGAN_AT, EventQueue, Happening
from simulator.world.store import STORE, SharedStore
from simulator.world.training import ProcessEnd, SimulatedGeneration, SimulatedWorker

if TYPE_CHECKING:
    from simulator.world.host import Host

KNOWN_AFTER_S = 20.0  # after this long in reach, a host's copies are known despite lost messages or an absent database


class Truth:
    """The job's true history, kept apart from the services' records."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.lineage: Lineage = ()
        self.world_size = 0  # of the generation that trains
        self.has_replicas = False  # on one host there are none
        self.newest = -1
        self._branched_at = 0.0

    def completed(self, group: SimulatedGeneration, step: int) -> None:
        """A generation completed a step."""
        if self.lineage and self.lineage[-1].generation == group.generation:
            self.newest = max(self.newest, step)

    def branched(self, group: SimulatedGeneration, step: int, source: int) -> None:
        """A generation continued from a step of an earlier one; -1: from scratch."""
        self.lineage = branch(
            self.lineage,
            restored_step=step if step >= 0 else None,
            generation=group.generation,
            source=source,
            world_size=group.placement.world_size,
        )
        self.newest, self.world_size = step, group.placement.world_size
        self.has_replicas = any(part.peers.get(host_id) for host_id, part in group.parts.items())
        self._branched_at = self._world.now

    def was_overtaken(self, group: SimulatedGeneration) -> bool:
        """Whether a newer generation restored after all ranks of this one began, because a pause held them up. What
        they do until they are stopped is not part of the history."""
        is_older = bool(self.lineage) and group.generation < self.lineage[-1].generation
        return is_older and all(worker.began_at <= self._branched_at for worker in group.workers.values())

    def held_before(self, group: SimulatedGeneration) -> tuple[int, int]:
        """Two steps, -1 if there is none: the newest complete one on hosts in reach since before the grant, and the
        newest one completed."""
        since_s = self._world.now - self._world.granted_at.get(group.generation, 0.0) + KNOWN_AFTER_S
        hosts = [host for host in self._world.hosts.values() if host.in_reach_for_s() > since_s]
        copies = [copy for host in hosts for copy in host.copies]
        points = complete_points(copies, self.lineage, group.placement.world_size)
        return max((step for step, _ in points), default=-1), self.newest


class World:
    """Everything that exists, and how it happens."""

    def __init__(self, timeline: EventQueue, rng: Random, *, step_s: float, store: SharedStore | None = None) -> None:
        self.timeline, self.rng, self.step_s, self.store = timeline, rng, step_s, store
        self.network = Network(timeline, rng)
        self.truth = Truth(self)
        self.hosts: dict[str, Host] = {}
        self.groups: dict[int, SimulatedGeneration] = {}  # by generation, of the one job
        self.granted_at: dict[int, float] = {}  # by generation
        self.facts: list[Fact] = []
        self.copies_changed = 0  # how often copies were written or removed
        self.memories_lost = 0  # how often a host lost its memory, or was told to free it
        self.replicas_given_up = 0  # how often ranks went on without a replica of a step
        self.ports_taken = 0  # number of generations that will find their port taken

    @property
    def now(self) -> float:
        return self.timeline.now

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self.timeline.now - BEGAN_AT

    def after(self, delay_s: float, happening: Happening) -> None:
        """Plan an event."""
        self.timeline.after(delay_s, happening)

    def note(self, fact: Fact) -> None:
        """Add to the history."""
        self.facts.append(fact)

    def is_up(self, host_id: str) -> bool:
        """Whether a machine runs."""
        return self.hosts[host_id].is_up

    # --- copies ------------------------------------------------------------------------------------------------------

    def hold(
        self, host_id: str, copy: ShardCopy, lineage: Lineage, world_step: int, abandoned: Collection[int]
    ) -> bool:
        """Put a copy into a host's slot, if the engine's rule gives it one. `world_step`: the newest step that all
        ranks have, with replicas. `abandoned`: steps that some rank never has, as far as the host knows."""
        held = self.hosts[host_id].copies
        if copy in held:
            return True
        same = [c for c in held if (c.job, c.rank, c.tier) == (copy.job, copy.rank, copy.tier)]
        slots = [SlotView(i, SlotState.COMMITTED, c.generation, c.step, c.size_bytes, i) for i, c in enumerate(same)]
        slots += [SlotView(i, SlotState.EMPTY, -1, -1, 0, i) for i in range(len(same), MIN_SLOTS)]
        chosen = choose_slot(slots, world_step, lineage, abandoned)
        if chosen is None:
            return False
        if chosen.index < len(same):
            held.remove(same[chosen.index])
        held.append(copy)
        self.copies_changed += 1
        return True

    def forget_before(self, job: str, generation: int, step: int, hosts: Iterable[str]) -> None:
        """A step is replicated: older copies on these hosts may be overwritten, and here they are at once."""
        self.copies_changed += 1
        for name in sorted(hosts):
            host = self.hosts[name]
            host.copies[:] = [c for c in host.copies if c.job != job or (c.generation, c.step) >= (generation, step)]

    def free(self, job: str, host_id: str) -> None:
        """The job ended: an engine frees its slots."""
        copies = self.hosts[host_id].copies
        if any(c.job == job for c in copies):
            copies[:] = [c for c in copies if c.job != job]
            self.memories_lost += 1
            self.copies_changed += 1

    def can_copy(self, source: str, target: str) -> bool:
        """Whether the engines of two hosts reach each other."""
        ends = (self.hosts[source], self.hosts[target])
        return all(end.is_up and end.is_engine_up and not end.is_paused for end in ends) and self.network.are_joined(
            source, target
        )

    def can_fetch(self, worker: SimulatedWorker, job: str, source: ShardSource, step: int) -> bool:
        """Whether a rank's host can fetch the bytes from a source now."""
        if source.tier is Tier.PERSISTENT:
            has_it = self.store is not None and self.store.has(source, step)
            return has_it and self.network.are_joined(worker.host_id, STORE)
        holder = self.hosts.get(source.host_id)
        if holder is None or not self.can_copy(source.host_id, worker.host_id):
            return False
        wanted = (job, source.generation, step, source.rank, source.tier)
        return any((c.job, c.generation, c.step, c.rank, c.tier) == wanted for c in holder.copies)

    # --- workers -----------------------------------------------------------------------------------------------------

    def group(self, placement: Placement) -> SimulatedGeneration:
        """The generation that this placement starts."""
        known = self.groups.get(placement.generation)
        if known is None:
            known = self.groups[placement.generation] = SimulatedGeneration(self, placement, self.rng)
        return known

    def begin(self, placement: Placement, host_id: str, rank: int, pid: int) -> SimulatedWorker:
        """Start a rank's process."""
        self.note(WorkerBegan(self.now, host_id, placement.job, placement.generation, rank))
        group = self.group(placement)
        group.parts[host_id] = placement
        self.hosts[host_id].engine.begin(group, host_id)
        return group.start(host_id, rank, pid)

    def exit(self, group: SimulatedGeneration, worker: SimulatedWorker, ending: ProcessEnd) -> None:
        """End a rank's process; its daemon, if it runs, notices."""
        if group.workers.get(worker.rank) is not worker:
            return
        why = ending.message or (EXPECTED if ending.is_expected else f"signal {ending.signal_number}")
        self.note(WorkerEnded(self.now, worker.host_id, group.job, group.generation, worker.rank, why))
        group.left(worker)
        self.hosts[worker.host_id].worker_ended(group, worker, ending)

    # --- machines ----------------------------------------------------------------------------------------------------

    def take_down(self, host_id: str) -> None:
        """Switch a machine off: processes and memory are gone at once, and nobody is notified."""
        host = self.hosts[host_id]
        if not host.is_up:
            return
        self.note(HostSwitched(self.now, host_id, False))
        workers = list(host.workers.values())
        host.go_down()
        self.memories_lost += 1
        self.copies_changed += 1
        for group in self.groups.values():
            group.beacons.pop(host_id, None)
        for group, worker in workers:
            self.note(WorkerEnded(self.now, host_id, group.job, group.generation, worker.rank, HOST_LOST))
            group.left(worker)

    def bring_up(self, host_id: str) -> None:
        """Boot a machine: its disk is unchanged, its memory empty."""
        host = self.hosts[host_id]
        if not host.is_up:
            self.note(HostSwitched(self.now, host_id, True))
            host.come_up()


# --- the network -----------------------------------------------------------------------------------------------------

LONGEST_DELAY_S = 20.0


class Network:
    """Delivers messages, possibly out of order. A machine always reaches itself."""

    def __init__(self, timeline: EventQueue, rng: Random) -> None:
        self._timeline = timeline
        self._rng = rng
        self._cut: dict[tuple[str, str], float] = {}  # pair -> when it was cut
        self.healed_at = timeline.now  # the latest end of a cut
        self.loss = 0.0  # fraction of all messages
        self.repetition = 0.01
        self.delay_s = 0.004  # of most messages, on average
        self.stuck_fraction = 0.003  # of messages, in a connection that stands still for a while
        self.slow_fraction = 0.01  # of messages, delayed a hundredfold

    def cut(self, source: str, target: str) -> None:
        """Lose everything from `source` to `target`."""
        self._cut.setdefault((source, target), self._timeline.now)

    def heal(self, source: str, target: str) -> None:
        """End a cut."""
        if self._cut.pop((source, target), None) is not None:
            self.healed_at = self._timeline.now

    def is_open(self, source: str, target: str) -> bool:
        """Whether a message would arrive, apart from random loss."""
        return (source, target) not in self._cut

    def are_joined(self, one: str, other: str) -> bool:
        """Whether a connection between the two lives."""
        return self.is_open(one, other) and self.is_open(other, one)

    def cut_for_s(self, one: str, other: str) -> float:
        """For how long a connection between the two has been impossible."""
        began = [at for pair in ((one, other), (other, one)) if (at := self._cut.get(pair)) is not None]
        return self._timeline.now - min(began) if began else 0.0

    def send(self, source: str, target: str, arrival: Happening) -> None:
        """Deliver `arrival` at the target: once, never, or twice."""
        if not self.is_open(source, target) or (self.loss and self._rng.random() < self.loss):
            return
        self._timeline.after(self._delay_s(), arrival)
        if self._rng.random() < self.repetition:
            self._timeline.after(self._delay_s(), arrival)

    def _delay_s(self) -> float:
        if self._rng.random() < self.stuck_fraction:
            return self._rng.uniform(1.0, LONGEST_DELAY_S)
        slow = 100.0 if self._rng.random() < self.slow_fraction else 1.0
        return self.delay_s * slow * (0.5 + self._rng.random())
