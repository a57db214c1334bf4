"""Facts that hosts know and the supervisor's database may have forgotten: their last command, and what they run.

A restored backup, a replica that lost its last seconds, an empty database: none of them can know that it is behind. The
hosts can (docs/decisions/0015).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from flyball.contracts.cluster import JobSpec, Placement
from flyball.contracts.decisions import Command
from flyball.contracts.identity import (
    CommandId,
    Duration,
    Epoch,
    Fence,
    Generation,
    HostId,
    Incarnation,
    JobName,
    Moment,
    Rank,
    Seq,
)
from flyball.contracts.reports.grant_seals import GrantSeal

MAX_CLUSTER_ID: Final = 32
MAX_DIGITS: Final = 18  # of a number
MAX_HELD: Final = 256  # jobs of one host
MAX_ENDED: Final = 4_096  # a daemon reports its newest 500

ClusterId = Annotated[str, msgspec.Meta(max_length=MAX_CLUSTER_ID)]


class LastObeyed(msgspec.Struct, frozen=True):
    """Whom a daemon obeyed, sent with each poll. A database that does not know the command is behind."""

    cluster: ClusterId = ""  # '': nobody yet, or a supervisor of a release without cluster ids
    epoch: Epoch = 0  # the highest
    command_id: CommandId = ""  # the newest

    def after(self, command: Command, cluster: str) -> LastObeyed:
        """The same, after one more command was obeyed."""
        return LastObeyed(cluster or self.cluster, max(self.epoch, command.fence.epoch), command.command_id)


class HeldJob(msgspec.Struct, frozen=True):
    """The newest generation of a job that a host was ordered to start: all that is needed to supervise it again."""

    spec: JobSpec
    placement: Placement  # the host's part; rank 0's host has all of it
    fence: Fence
    ranks: tuple[Rank, ...]  # those that run
    ran_s: Duration = 0.0  # the longest that one of its ranks has run, or ran until its end; 0.0: unknown
    seal: GrantSeal = GrantSeal()  # of the command


class HostStanding(msgspec.Struct, frozen=True):
    """A host's record for a supervisor whose database does not know what the host obeyed."""

    host_id: HostId
    incarnation: Incarnation
    at: Moment
    obeyed: LastObeyed
    unanswered_s: Duration = msgspec.field(name="unheard_s")  # since a supervisor of its cluster last answered
    jobs: Annotated[tuple[HeldJob, ...], msgspec.Meta(max_length=MAX_HELD)] = ()
    # Jobs that ended here, and the newest generation of each.
    ended: Annotated[Mapping[JobName, Generation], msgspec.Meta(max_length=MAX_ENDED)] = {}
    # Signals up to here were committed, and cannot be sent again.
    committed: Annotated[Mapping[Incarnation, Seq], msgspec.Meta(max_length=MAX_ENDED)] = {}
    # The seals of the jobs in `ended`: an end counts only from a host that was placed in the job.
    end_seals: Annotated[Mapping[JobName, GrantSeal], msgspec.Meta(max_length=MAX_ENDED)] = {}

    def __post_init__(self) -> None:
        """A job is told once: the seal of one part must not count for another. Raises ValueError."""
        if len({held.spec.job for held in self.jobs}) < len(self.jobs):
            raise ValueError("Each job is told once.")


def database_knows(obeyed: LastObeyed, *, cluster: str, epoch: int, is_command_known: bool) -> bool:
    """Whether a database of this cluster, under this epoch, is at least as new as what a host obeyed. Pure."""
    if obeyed.cluster and obeyed.cluster != cluster:
        return False
    return obeyed.epoch <= epoch and (is_command_known or not obeyed.command_id)


def decision_number(command_id: str) -> int:
    """17 for "act-3f9a01c2-17.stop.host-a.1"; 0 if it names none. Pure."""
    _, _, digits = command_id.partition(".")[0].rpartition("-")
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS else 0


def issued_id(draft_id: str, incarnation: str) -> str:
    """The command id that hosts see.

    Another copy of the database counts the same numbers, but under another incarnation, so a reply in an old journal is
    never mistaken for one to a new command. Pure.
    """
    return f"act-{incarnation}{draft_id.removeprefix('act')}" if incarnation else draft_id
