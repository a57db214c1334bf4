"""What a trainer tells the engine beside it: datagrams on state_dir/notify.sock, JSON, one notice each.

A notice is only a hint that saves the engine from waiting. A lost `Captured` delays a commit until the engine's next
scan; a lost `SaveAborted` delays what it tells until the rank has saved a newer step, which says the same; a lost
`SaveWaited` is not counted.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from flyball.contracts.identity import JobName, Rank

MAX_NOTICE_BYTES = 4096
LATE_S: Final = 0.1  # a copy beside the steps makes them wait for some milliseconds; this is seen in their times
REPORT_FROM_S: Final = 0.03  # waits of a save from here on are told: how often steps are saved depends on them
MAX_MESSAGE_CHARS = 600  # six bytes each at the most, in JSON


class Captured(msgspec.Struct, frozen=True, tag="captured"):
    """A slot holds a whole shard: hash it, commit it, replicate it."""

    job: JobName
    rank: Rank
    generation: int
    step: int
    slot: int


class SaveAborted(msgspec.Struct, frozen=True, tag="save_aborted"):
    """This rank will never have `step`: the world must not wait for it."""

    job: JobName
    rank: Rank
    generation: int
    step: int
    message: str


class SaveWaited(msgspec.Struct, frozen=True, tag="save_waited"):
    """Training waited for the save of `step`: for a slot, or for a copy. Told again once it has waited for LATE_S."""

    job: JobName
    rank: Rank
    generation: int
    step: int
    waited_s: float


Notice: TypeAlias = Captured | SaveAborted | SaveWaited
