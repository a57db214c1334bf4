"""The trainer's notices to the engine beside it: JSON datagrams on state_dir/notify.sock, one notice each.

A notice is a hint that saves the engine from waiting. If a `Captured` is lost, the commit happens at the engine's next
scan. If a `SaveAborted` is lost, the engine finds out when the rank has saved a newer step. A lost `SaveWaited` is not
counted. If a `RestoreMoved` is lost, the engine finds out at its next scan. A `ReplayEqual` is followed by others; a
`ReplayDiffered` that nobody takes is sent again.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from flyball.contracts.identity import JobName, Rank
from flyball.contracts.reports.training_health import ReplayDiffers

MAX_NOTICE_BYTES = 4096
LATE_S: Final = 0.1  # a save is late if training waited this long; copies in the background cost it milliseconds
REPORT_FROM_S: Final = 0.03  # shorter waits are not sent; longer ones affect how often steps are saved
MAX_MESSAGE_CHARS = 600  # in JSON a character takes up to six bytes


class Captured(msgspec.Struct, frozen=True, tag="captured"):
    """A slot holds a whole shard, ready to be hashed, committed and replicated."""

    job: JobName
    rank: Rank
    generation: int
    step: int
    slot: int


class SaveAborted(msgspec.Struct, frozen=True, tag="save_aborted"):
    """This rank will never have `step`. The world must not wait for it."""

    job: JobName
    rank: Rank
    generation: int
    step: int
    message: str


class SaveWaited(msgspec.Struct, frozen=True, tag="save_waited"):
    """Training waited for the save of `step`, for a slot or for the copy. Sent again once that exceeds LATE_S."""

    job: JobName
    rank: Rank
    generation: int
    step: int
    waited_s: float


class RestoreMoved(msgspec.Struct, frozen=True, tag="restore_moved"):
    """The rank's restore waits for the engine, or is done."""

    job: JobName
    rank: Rank
    generation: int


class ReplayEqual(msgspec.Struct, frozen=True, tag="replay_equal"):
    """All ranks replayed at this step, and none saw a difference. Sent by rank 0."""

    job: JobName
    rank: Rank
    generation: int
    step: int


class ReplayDiffered(msgspec.Struct, frozen=True, tag="replay_differed"):
    """This rank's replay differed; `found` is for the supervisor."""

    job: JobName
    rank: Rank
    generation: int
    found: ReplayDiffers


Notice: TypeAlias = Captured | SaveAborted | SaveWaited | RestoreMoved | ReplayEqual | ReplayDiffered
