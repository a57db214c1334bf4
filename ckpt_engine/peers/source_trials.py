"""Tries the sources of a restore step in turn, and an unreachable store again for a while."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import structlog

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.counters import Counters
from ckpt_engine.rules.fetch_order import FetchStep
from ckpt_engine.tiers.shard_store import ShardStore
from flyball.contracts.checkpoints import RestorePlan, Tier
from flyball.contracts.errors import CorruptShard, FlyballError, RestoreFailed, StaleCommand, Unreachable
from flyball.contracts.recovery import Origin

log = structlog.get_logger()

_STORE_AWAY_S = 60.0  # how long an unreachable store is tried again
_LOOK_AGAIN_S = 1.0

T = TypeVar("T")


class SourceTrials:
    """For one generation's restore step on one host. Thread-safe."""

    def __init__(
        self,
        generation: HostGeneration,
        plan: RestorePlan,
        *,
        disks: Mapping[Tier, ShardStore],
        counters: Counters,
    ) -> None:
        self._generation = generation
        self._plan = plan
        self._disks = disks
        self._counters = counters

    def first(
        self,
        rank: int,
        steps: Callable[[], Iterable[FetchStep]],
        attempt: Callable[[FetchStep], T],
        reasons: list[str],
    ) -> T:
        """What `attempt` returns for the first source with which it raises no FlyballError or OSError. `steps` are the
        sources of the rank's shard, asked for again in each round. Raises RestoreFailed with the reasons of all
        sources, after those in `reasons`; StaleCommand if the generation ends."""
        patience_s = min(_STORE_AWAY_S, self._generation.configure.spec.restore_timeout_s / 2)
        deadline_s = time.monotonic() + patience_s
        earlier = len(reasons)
        looks_again, was_away = True, False
        while looks_again:
            del reasons[earlier:]
            is_away = False
            for step in steps():
                try:
                    return attempt(step)
                except StaleCommand:
                    raise
                except (FlyballError, OSError) as error:
                    self.demote(rank, f"{step.source.tier} of {step.source.host_id or 'the store'}", error, reasons)
                    is_away = is_away or (step.origin is Origin.PERSISTENT and self._is_away(error))
            # A store that came back between the read and the look at it was not there to be read.
            looks_again = (is_away or was_away) and time.monotonic() < deadline_s
            was_away = is_away
            if looks_again and self._generation.ended.wait(_LOOK_AGAIN_S):
                self.check_wanted()
        raise RestoreFailed(
            f"No source has step {self._plan.step} of rank {rank}. "
            + (" ".join(reasons) or "The restore plan names none."),
            hint="nothing to do: the controller chooses an older recovery point",
        )

    def check_wanted(self) -> None:
        """Raise StaleCommand if the generation has ended."""
        if self._generation.ended.is_set():
            raise StaleCommand("The restore was given up: a newer generation began.")

    def demote(self, rank: int, where: str, error: FlyballError | OSError, reasons: list[str]) -> None:
        """Note why a source was not used."""
        reasons.append(f"{where}: {error.message if isinstance(error, FlyballError) else error}")
        self._counters.add("corrupt_copies" if isinstance(error, CorruptShard) else "restore_sources_skipped")
        log.warning("restore_source_skipped", rank=rank, step=self._plan.step, reason=reasons[-1])

    def _is_away(self, error: FlyballError | OSError) -> bool:
        """Whether the store is merely unreachable, and may have the step. A share that is not mounted looks like an
        empty folder."""
        if not isinstance(error, FileNotFoundError):
            return isinstance(error, OSError | Unreachable)
        try:
            return self._disks[Tier.PERSISTENT].is_empty()
        except (FlyballError, OSError):
            return True
