"""The trainer's notices to the engine beside it: JSON datagrams on state_dir/notify.sock, one notice each.

A notice is a hint that saves the engine from waiting. If a `Captured` is lost, the commit happens at the engine's next
scan. If a `SaveAborted` is lost, the engine finds out when the rank has saved a newer step. A lost `SaveWaited` is not
counted. If a `RestoreMoved` is lost, the engine finds out at its next scan. A `ReplayEqual` is followed by others; a
`ReplayDiffered` that nobody takes is sent again.

A script may send anything. Its types keep out of the engine's replies what their receivers would refuse as a whole.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from flyball.contracts.identity import Duration, Generation, JobName, Rank, Step
from flyball.contracts.reports.training_health import ReplayDiffers

MAX_NOTICE_BYTES = 4096
LATE_S: Final = 0.1  # a save is late if training waited this long; copies in the background cost it milliseconds
REPORT_FROM_S: Final = 0.03  # shorter waits are not sent; longer ones affect how often steps are saved
MAX_MESSAGE_CHARS = 600  # in JSON a character takes up to six bytes


class Captured(msgspec.Struct, frozen=True, tag="captured"):
    """A slot holds a whole shard, ready to be hashed, committed and replicated. Training stood for `copied_s`."""

    job: JobName
    rank: Rank
    generation: Generation
    step: Step
    slot: Annotated[int, msgspec.Meta(ge=0, le=63)]
    copied_s: Duration = 0.0


class SaveAborted(msgspec.Struct, frozen=True, tag="save_aborted"):
    """This rank will never have `step`. The world must not wait for it."""

    job: JobName
    rank: Rank
    generation: Generation
    step: Step
    message: str


class SaveWaited(msgspec.Struct, frozen=True, tag="save_waited"):
    """Training waited for the save of `step`, for a slot or for the transfer before it."""

    job: JobName
    rank: Rank
    generation: Generation
    step: Step
    waited_s: Duration


class RestoreMoved(msgspec.Struct, frozen=True, tag="restore_moved"):
    """The rank's restore waits for the engine, or is done."""

    job: JobName
    rank: Rank
    generation: Generation


class ReplayEqual(msgspec.Struct, frozen=True, tag="replay_equal"):
    """All ranks replayed at this step, and none saw a difference. Sent by rank 0."""

    job: JobName
    rank: Rank
    generation: Generation
    step: Step


class ReplayDiffered(msgspec.Struct, frozen=True, tag="replay_differed"):
    """This rank's replay differed; `found` is for the supervisor."""

    job: JobName
    rank: Rank
    generation: Generation
    found: ReplayDiffers


Notice: TypeAlias = Captured | SaveAborted | SaveWaited | RestoreMoved | ReplayEqual | ReplayDiffered
