"""Copy the logs of ranks on other machines here, piece by piece, through the supervisor."""

from __future__ import annotations

import base64
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from flyball.cli.show.messages import announce
from flyball.contracts.errors import FlyballError, NotFound
from flyball.contracts.reports.rank_logs import MAX_PIECE_BYTES, NEWEST

if TYPE_CHECKING:
    from flyball.cli.reach.client import ApiClient  # imports httpx

ALL = -2  # as a generation: all, beginning with the oldest
INTERVAL_S = 0.5


class _Position(msgspec.Struct):
    generation: int
    offset: int


class LogMirror:
    """Keeps copies of a job's logs in a folder, laid out as on a host: one folder per generation, one file per rank."""

    def __init__(
        self,
        client: ApiClient,
        job: str,
        folder: Path,
        *,
        ranks: Sequence[int],
        generation: int = NEWEST,
        host: str = "",
        last_bytes: int = 0,
    ) -> None:
        """`generation`: a number (only that one), NEWEST (and later ones), or ALL. `last_bytes`: copy only about that
        much of each rank's first log; 0 for all of it."""
        self._client = client
        self._job = job
        self._folder = folder
        self._ranks = ranks
        self._generation = generation
        self._host = host
        self._last_bytes = last_bytes
        self._at: dict[int, _Position] = {}

    def update(self) -> bool:
        """Copy new output, and return whether there was any. Skips logs that do not exist yet.

        Raises FlyballError if the supervisor or a host does not answer.
        """
        found = False
        for rank in self._ranks:
            try:
                while self._copy(rank):
                    found = True
            except NotFound:
                continue
        return found

    def _copy(self, rank: int) -> bool:
        """Copy one piece, and return whether there was one."""
        at = self._at.get(rank)
        if at is None:
            at = self._at[rank] = self._begin(rank)
        piece = self._ask(rank, at.generation, at.offset)
        data = base64.b64decode(piece["data"])
        path = self._folder / f"g{at.generation}" / f"rank{rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as log:
            log.write(data)
        at.offset += len(data)
        later = [number for number in piece["generations"] if number > at.generation]
        if not data and later and self._generation < 0:
            self._at[rank] = _Position(min(later), 0)
            return True
        return bool(data)

    def _begin(self, rank: int) -> _Position:
        wanted = NEWEST if self._generation == ALL else self._generation
        piece = self._ask(rank, wanted, -self._last_bytes, limit=1)
        if self._generation == ALL:
            return _Position(min(piece["generations"]), 0)
        return _Position(piece["generation"], piece["offset"])

    def _ask(self, rank: int, generation: int, offset: int, *, limit: int = MAX_PIECE_BYTES) -> dict[str, Any]:
        found: dict[str, Any] = self._client.get(
            f"/v1/jobs/{self._job}/logs",
            rank=rank,
            generation=generation,
            offset=offset,
            limit=limit,
            host=self._host or None,
        )
        return found


class RankZeroElsewhere:
    """Copies rank 0's log if the job runs only on other hosts, for the command that launched it here."""

    def __init__(self, client: ApiClient, job: str, host_id: str, folder: Path) -> None:
        self._client = client
        self._job = job
        self._host_id = host_id
        self._mirror = LogMirror(client, job, folder, ranks=(0,))
        self._announced: tuple[str, ...] = ()  # hosts
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank 0", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop, after copying the rest."""
        self._stop.set()
        self._thread.join()
        self._update()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._update()

    def _update(self) -> None:
        try:
            ranks = self._client.get(f"/v1/jobs/{self._job}")["ranks"]
            hosts = tuple(sorted({one["host_id"] for one in ranks}))
            if not hosts or self._host_id in hosts:
                return
            if hosts != self._announced:
                self._announced = hosts
                announce(
                    f"the ranks are on {', '.join(hosts)}; showing rank 0 (`flyball logs {self._job} --rank R` shows "
                    "others)"
                )
            self._mirror.update()
        except FlyballError:  # the loop that waits for the job reports an unreachable supervisor
            return
