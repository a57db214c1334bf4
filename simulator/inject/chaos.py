"""Faults at regular moments, drawn from a seed: `flyball inject chaos`.

Every host has an injector of its own, which reaches only that host's processes. All of them draw the same sequence, and
the host of the drawn rank acts, so they need not talk to each other.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from flyball.contracts.clock import Clock
from flyball.contracts.cluster import JobState
from flyball.contracts.decisions import IncidentState
from flyball.contracts.errors import FlyballError, Forbidden, NotFound
from simulator.inject.faults import Api, Injection, check_injectable, hang, kill

FAULTS = ("kill", "kill", "hang")  # as often as they are listed


class Turn(NamedTuple):
    """What happens at a moment that is a multiple of `every_s`."""

    number: int
    fault: str
    rank: int


def turn_at(now: float, *, every_s: float, seed: int, world_size: int) -> Turn:
    """The turn that began last before the wall-clock moment `now`: the same wherever the clock is right. Pure."""
    number = math.floor(now / every_s)
    draw = random.Random(f"{seed}:{number}")
    return Turn(number, draw.choice(FAULTS), draw.randrange(world_size))


def until_next_s(now: float, every_s: float) -> float:
    """Seconds until the next turn begins. Pure."""
    return (math.floor(now / every_s) + 1) * every_s - now


class Chaos:
    """Injects what the seed draws for ranks on one host. `announce` gets a line for each turn that concerns it."""

    def __init__(
        self,
        api: Api,
        *,
        job: str,
        host_id: str,
        every_s: float,
        seed: int,
        clock: Clock,
        announce: Callable[[str], None],
        state_dir: Path | None = None,
    ) -> None:
        self._api = api
        self._job = job
        self._host_id = host_id
        self._every_s = every_s
        self._seed = seed
        self._clock = clock
        self._announce = announce
        self._state_dir = state_dir

    def take_turn(self) -> Injection | None:
        """Inject the fault of this moment, if its rank is on this host and nothing is broken already. A supervisor that
        does not answer, or a rank that does not run, only skips the turn. Raises Forbidden if it may not break the
        job."""
        try:
            job = self._api.get(f"/v1/jobs/{self._job}")
            if JobState(job["state"]) is not JobState.RUNNING:
                self._announce(f"job {self._job} is {job['state']}: nothing to break")
                return None
            check_injectable([job])
            now = self._clock.wall_s()
            turn = turn_at(now, every_s=self._every_s, seed=self._seed, world_size=int(job["world_size"]))
            placed = {int(rank["rank"]): rank["host_id"] for rank in job["ranks"]}
            if placed.get(turn.rank) != self._host_id:
                return None
            if self._is_healing():
                self._announce(f"job {self._job} still heals: nothing is broken this time")
                return None
            inject = {"kill": kill, "hang": hang}[turn.fault]
            done = inject(self._api, job=self._job, rank=turn.rank, clock=self._clock, state_dir=self._state_dir)
        except Forbidden:
            raise
        except NotFound as error:
            self._announce(error.message)
        except FlyballError as error:
            self._announce(f"{error.message} Trying again at the next turn.")
        else:
            self._announce(f"turn {turn.number}: {turn.fault} {done.target} (generation {done.generation})")
            return done
        return None

    def _is_healing(self) -> bool:
        incidents = self._api.get("/v1/incidents", job=self._job)["items"]
        return any(not IncidentState(incident["state"]).closed for incident in incidents)
