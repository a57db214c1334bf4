"""A simulated job as it truly runs: ranks in lock step, saves with their replicas, and the consequences of failures.

One `SimulatedGeneration` is one generation that hosts were ordered to start. It trains while every rank lives on hosts
that reach each other; it does not know what the supervisor believes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from ckpt_engine.contracts.peer_plan import coordinator_host
from flyball.contracts.checkpoints import ShardCopy, ShardSource, Tier
from flyball.contracts.cluster import Activity, Phase, Placement, restores_another_world
from flyball.contracts.errors import RestoreFailed
from flyball.contracts.reports.signals import SavesFailing, SavesRecovered
from simulator.checks.history import NO_SOURCE, Parked, Restored, Saved
from simulator.world.events import Happening
from simulator.world.store import STORE
from simulator.world.storing import Storing

if TYPE_CHECKING:
    from simulator.world.world import World

SIGKILL = 9
RENDEZVOUS_TIMEOUT_S = 60.0
COLLECTIVE_TIMEOUT_S = 45.0
REPLICA_WAIT_S = 10.0  # then the world goes on without the missing replicas
SHARD_SIZE_BYTES = 1000
FAILING_AFTER_S = 60.0  # as in the engine
STANDS_AFTER_S = 2.5  # longer than any step
RESUME_LOOK_S = 0.25
STORE_PATIENCE_S, STORE_LOOK_S = 60.0, 1.0  # of a restore, as in the engine


class ProcessEnd(NamedTuple):
    """How a rank's process ended. Without an exit code or signal nobody saw it."""

    exit_code: int | None = None
    signal_number: int | None = None
    message: str = ""
    is_expected: bool = False


class SimulatedWorker:
    """One rank's process."""

    def __init__(self, host_id: str, rank: int, pid: int, at: float) -> None:
        self.host_id, self.rank, self.pid = host_id, rank, pid
        self.phase = Phase.STARTING
        self.step = -1
        self.began_at = self.moved_at = at
        self.is_hung = False
        self.busy_with = Activity.IDLE  # while it stands
        self.new_steps: list[tuple[int, float]] = []  # not reported yet

    def doing(self, now: float) -> tuple[Activity, float, str]:
        """The activity that a daemon sees, how long it has lasted, and the system call."""
        stands_s = now - self.moved_at
        if stands_s < STANDS_AFTER_S:
            return Activity.UNKNOWN, 0.0, ""
        if self.is_hung:
            return Activity.STOPPED, stands_s, ""
        return self.busy_with, stands_s, "futex" if self.busy_with is Activity.IDLE else ""


class SimulatedGeneration:
    """One generation of a job. Each host knows only its own part of the placement."""

    def __init__(self, world: World, placement: Placement, rng: Random) -> None:
        self.world, self.placement, self._rng = world, placement, rng
        self.parts: dict[str, Placement] = {}
        self.workers: dict[int, SimulatedWorker] = {}
        self.step_s = world.step_s
        self.beacons: dict[str, dict[int, int]] = {}  # host -> rank -> newest step, also of dead ranks
        self.parks_at: dict[str, int] = {}  # host -> step at which its ranks park
        self._failing: dict[str, tuple[float, int]] = {}  # host -> when its saves began to fail, and how many did
        self._reported_failing: set[str] = set()
        self._has_restored = False
        self._waits_for_store_since: float | None = None
        self.storing: Storing | None = None  # in the persistent tier
        self._is_stepping = False
        self._stuck_since: float | None = None
        self._parked_since: float | None = None
        self._pauses_until = 0.0
        self._committed = self._replicated = -1
        self._given_up: dict[int, set[str]] = {}  # step -> hosts of the ranks that found no slot for it
        self._began_saving_at = 0.0
        world.after(RENDEZVOUS_TIMEOUT_S, self._check_rendezvous)

    @property
    def job(self) -> str:
        return self.placement.job

    @property
    def generation(self) -> int:
        return self.placement.generation

    def start(self, host_id: str, rank: int, pid: int) -> SimulatedWorker:
        """A rank's process begins."""
        worker = self.workers[rank] = SimulatedWorker(host_id, rank, pid, self.world.now)
        self.beacons.setdefault(host_id, {})[rank] = -1
        self.world.after(self._rng.uniform(0.5, 2.5), lambda: self._attached(worker))
        return worker

    def left(self, worker: SimulatedWorker) -> None:
        """A rank's process is gone. The others lose their connections once they notice."""
        if self.workers.get(worker.rank) is worker:
            del self.workers[worker.rank]
            self._note_parked()
        for other in list(self.workers.values()):
            if self.world.network.are_joined(worker.host_id, other.host_id) and self.world.is_up(worker.host_id):
                self._fail_soon(other, "Connection closed by peer")

    def park(self, host_id: str, step: int) -> bool:
        """Arm an emergency save; False if one of the host's ranks has passed the step."""
        mine = [worker for worker in self.workers.values() if worker.host_id == host_id]
        if any(worker.step >= step for worker in mine):
            return False
        self.parks_at[host_id] = step
        return True

    def release(self, host_id: str) -> None:
        """Cancel an emergency save."""
        if self.parks_at.pop(host_id, None) is not None:
            for worker in self.workers.values():
                if worker.host_id == host_id and worker.phase is Phase.PARKED:
                    worker.phase = Phase.STEP
                    worker.moved_at = self.world.now
            self._note_parked()

    def pause(self, phase: Phase, doing: Sequence[Activity], seconds: float) -> None:
        """All ranks make an ordinary pause, each doing what `doing` has in turn. Phase STEP: their script does not say
        that it pauses."""
        self._pauses_until = self.world.now + seconds
        for number, worker in enumerate(self.workers.values()):
            if worker.phase is Phase.STEP:
                worker.phase, worker.busy_with = phase, doing[number % len(doing)]

    def _goes_on(self) -> bool:
        """Whether no pause keeps the ranks. One that is over ends."""
        if self.world.now < self._pauses_until:
            return False
        if self._pauses_until:
            self._pauses_until = 0.0
            for worker in self.workers.values():
                worker.busy_with = Activity.IDLE
                if worker.phase in (Phase.EVAL, Phase.CHECKPOINT, Phase.DATA):
                    worker.phase = Phase.STEP
        return True

    def has_saved(self, step: int) -> bool:
        """Whether every rank's bytes of `step` are committed and replicated."""
        return self._replicated >= step

    # --- start-up ----------------------------------------------------------------------------------------------------

    def _is_alive(self, worker: SimulatedWorker) -> bool:
        return self.workers.get(worker.rank) is worker

    def _put_off(self, workers: Iterable[SimulatedWorker], happening: Happening) -> bool:
        """If the machine of one of these ranks is paused, postpone the event and return True."""
        is_paused = any(self.world.hosts[worker.host_id].is_paused for worker in workers)
        if is_paused:
            self.world.after(RESUME_LOOK_S, happening)
        return is_paused

    def _attached(self, worker: SimulatedWorker) -> None:
        if not self._is_alive(worker) or self._put_off([worker], lambda: self._attached(worker)):
            return
        worker.phase, worker.moved_at = Phase.RESTORING, self.world.now
        if self._is_whole() and all(other.phase is Phase.RESTORING for other in self.workers.values()):
            self.world.after(self._rng.uniform(0.1, 1.0), self._restore)

    def _is_whole(self) -> bool:
        """Whether all ranks are there, and every host reaches every other."""
        if len(self.workers) < self.placement.world_size:
            return False
        names = sorted({worker.host_id for worker in self.workers.values()})
        return all(self.world.network.are_joined(one, other) for i, one in enumerate(names) for other in names[i + 1 :])

    def _check_rendezvous(self) -> None:
        if self._waits_for_store_since is not None and self._is_whole():  # they have met
            self.world.after(RENDEZVOUS_TIMEOUT_S, self._check_rendezvous)
        elif not self._has_restored and not self._put_off(self.workers.values(), self._check_rendezvous):
            for worker in list(self.workers.values()):
                self._fail_soon(worker, "timed out waiting for the other ranks")

    def _restore(self) -> None:
        if self._has_restored or not self._is_whole() or self._put_off(self.workers.values(), self._restore):
            return
        loaded: set[tuple[int, int]] = set()  # step and the generation that saved it
        for worker in list(self.workers.values()):
            plan = self.parts[worker.host_id].restore
            if plan is None:
                loaded.add((-1, -1))
                continue
            is_resharded = restores_another_world(self.placement)  # then it needs a part of every shard
            for sources in plan.sources.values() if is_resharded else [plan.sources.get(str(worker.rank), ())]:
                found = [source for source in sources if self.world.can_fetch(worker, self.job, source, plan.step)]
                if not found and self._waits_for_store(worker, sources):
                    self.world.after(STORE_LOOK_S, self._restore)
                    return
                if not found:
                    self.world.exit(self, worker, ProcessEnd(exit_code=RestoreFailed.exit_code, message=NO_SOURCE))
                    return
                loaded.add((plan.step, found[0].generation))
        self._has_restored = True
        step, source = min(loaded)
        held, newest = self.world.truth.held_before(self)
        if not self.world.truth.was_overtaken(self):
            self.world.note(
                Restored(self.world.now, self.job, self.generation, step, source, held, newest, len(loaded) == 1)
            )
            self.world.truth.branched(self, step, source)
        for worker in self.workers.values():
            worker.phase, worker.moved_at = Phase.STEP, self.world.now
            worker.step = step
            self.beacons[worker.host_id][worker.rank] = worker.step
        # As in the engine, older steps' slots are free from now on. Else two of them may keep both, and none is saved.
        self._committed = self._replicated = step
        if self.world.store is not None:
            self.storing = Storing(self, self.world.store, step)
        self._begin_step()

    def _waits_for_store(self, worker: SimulatedWorker, sources: Sequence[ShardSource]) -> bool:
        """Whether a store that does not answer may have the shard: the rank's engine asks again for a while."""
        is_away = not self.world.network.are_joined(worker.host_id, STORE)
        if not is_away or not any(source.tier is Tier.PERSISTENT for source in sources):
            return False
        if self._waits_for_store_since is None:
            self._waits_for_store_since = self.world.now
        return self.world.now - self._waits_for_store_since < STORE_PATIENCE_S

    # --- steps -------------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        if not self._is_stepping:
            self._is_stepping = True
            self.world.after(self.step_s * self._rng.uniform(0.9, 1.1), self._end_step)

    def _end_step(self) -> None:
        self._is_stepping = False
        if not self.workers:
            return
        is_paused = all(self.world.hosts[worker.host_id].is_paused for worker in self.workers.values())
        if is_paused or not self._goes_on():
            self._begin_step()
            return
        can_step = self._is_whole() and not any(map(self._stands, self.workers.values()))
        if not can_step:
            self._wait_for_the_others()
            return
        self._stuck_since = None
        now = self.world.now
        for worker in self.workers.values():
            worker.step += 1
            worker.moved_at = now
            worker.new_steps.append((worker.step, now))
            self.beacons[worker.host_id][worker.rank] = worker.step
        step = next(iter(self.workers.values())).step
        self.world.truth.completed(self, step)
        self._save(step)
        for worker in self.workers.values():
            if self.parks_at.get(worker.host_id) == step:
                worker.phase = Phase.PARKED
        self._note_parked()
        self._begin_step()

    def _stands(self, worker: SimulatedWorker) -> bool:
        return worker.is_hung or worker.phase is not Phase.STEP or self.world.hosts[worker.host_id].is_paused

    def _note_parked(self) -> None:
        now, is_parked = self.world.now, any(worker.phase is Phase.PARKED for worker in self.workers.values())
        if is_parked and self._parked_since is None:
            self._parked_since = now
        elif not is_parked and self._parked_since is not None:
            self.world.note(Parked(now, self.generation, now - self._parked_since))
            self._parked_since = None

    def _wait_for_the_others(self) -> None:
        """A collective that cannot finish fails after its timeout."""
        now = self.world.now
        if self._stuck_since is None:
            self._stuck_since = now
        if any(worker.phase is Phase.PARKED for worker in self.workers.values()):
            self._stuck_since = now
        if now - self._stuck_since > COLLECTIVE_TIMEOUT_S:
            for worker in list(self.workers.values()):
                if not worker.is_hung:
                    self._fail_soon(worker, "Watchdog caught collective operation timeout")
            return
        self._is_stepping = True
        self.world.after(0.5, self._end_step)

    def _fail_soon(self, worker: SimulatedWorker, message: str) -> None:
        def fail() -> None:
            if self._is_alive(worker) and not worker.is_hung and not self._put_off([worker], fail):
                self.world.exit(self, worker, ProcessEnd(exit_code=1, message=message))

        self.world.after(self._rng.uniform(0.02, 0.6), fail)

    # --- saves -------------------------------------------------------------------------------------------------------

    def _save(self, step: int) -> None:
        """Save a step, unless some rank has no slot for it: while the previous one lacks replicas that can still
        arrive. Then that rank gives the step up."""
        if not self._can_save(step):
            return
        if self._committed > self._replicated and self.world.now - self._began_saving_at >= REPLICA_WAIT_S:
            self._replicated = self._committed
            self.world.replicas_given_up += 1
        copies = [self._copy(worker, step, Tier.MEMORY, worker.host_id) for worker in self.workers.values()]
        without = {copy.host_id for copy in copies if not self._hold(copy)}
        if without:
            self._given_up = {given_up: at for given_up, at in self._given_up.items() if given_up > self._replicated}
            self._given_up[step] = without
            return
        if self._committed <= self._replicated:  # else the wait for its replicas goes on
            self._began_saving_at = self.world.now
        self._committed = step
        self.world.note(Saved(self.world.now, self.job, self.generation, step))
        if self.storing is not None:
            self.storing.offer(step)
        self.world.after(self._rng.uniform(0.02, 0.3), lambda: self._replicate(step))

    def _hold(self, copy: ShardCopy) -> bool:
        abandoned = self._abandoned(copy.host_id)
        return self.world.hold(copy.host_id, copy, self.placement.lineage, self._replicated, abandoned)

    def _abandoned(self, host_id: str) -> set[int]:
        """The steps whose slots this host may use again because some rank never has them. As in production: the trainer
        notes what it gave up (`ControlSegment.note_aborted`), its engine reports that (`RankPipeline.fail`), and rank
        0's engine tells all (`Coordinator.failed`). So all three engines have to be there."""
        teller, reaches = coordinator_host(self.placement), self.world.can_copy
        if not self._given_up or not reaches(teller, host_id):
            return set()
        return {step for step, hosts in self._given_up.items() if any(reaches(giver, teller) for giver in hosts)}

    def _can_save(self, step: int) -> bool:
        """Whether every host can save. A host reports when its saves have failed for long, and when they recover."""
        can_all = True
        for host_id in sorted({worker.host_id for worker in self.workers.values()}):
            host = self.world.hosts[host_id]
            if not host.keeps_saves:
                can_all = False
                since, count = self._failing.get(host_id, (self.world.now, 0))
                self._failing[host_id] = since, count + 1
                is_long = self.world.now - since >= FAILING_AFTER_S
                if is_long and host.is_daemon_up and host_id not in self._reported_failing:
                    self._reported_failing.add(host_id)
                    ranks = tuple(w.rank for w in self.workers.values() if w.host_id == host_id)
                    host.put(SavesFailing(self.job, self.generation, ranks, since, count + 1, step, "No slot."))
                continue
            self._failing.pop(host_id, None)
            if host.is_daemon_up and host_id in self._reported_failing:
                self._reported_failing.discard(host_id)
                host.put(SavesRecovered(self.job, self.generation))
        return can_all

    def _copy(self, worker: SimulatedWorker, step: int, tier: Tier, host_id: str) -> ShardCopy:
        digest = f"{self.generation}.{step}.{worker.rank}"
        return ShardCopy(self.job, self.generation, step, worker.rank, tier, host_id, SHARD_SIZE_BYTES, digest)

    def _replicate(self, step: int) -> None:
        if self._committed != step or self._replicated >= step or not self.workers:
            return
        if self._put_off(self.workers.values(), lambda: self._replicate(step)):
            return
        are_all_there = True
        for worker in self.workers.values():
            for peer in self.parts[worker.host_id].peers.get(worker.host_id, ()):
                is_there = self.world.can_copy(worker.host_id, peer) and self._hold(
                    self._copy(worker, step, Tier.PEER, peer)
                )
                are_all_there = are_all_there and is_there
        if are_all_there and len(self.workers) == self.placement.world_size:
            self._replicated = step
            self.world.forget_before(self.job, self.generation, step, {w.host_id for w in self.workers.values()})
        else:
            self.world.after(0.5, lambda: self._replicate(step))
