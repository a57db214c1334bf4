"""What a piece of a job's elapsed time can be. docs/goodput.md tells how each is found."""

from __future__ import annotations

from enum import StrEnum


class Category(StrEnum):
    USEFUL = "useful"  # step time of steps that were kept
    RECOMPUTED = "recomputed"  # step time of steps that a later generation did again, or that were cut off by a fault
    EVALUATION = "evaluation"
    CHECKPOINT_BLOCKED = "checkpoint_blocked"  # inside save, or parked for an emergency checkpoint
    SCHEDULING = "scheduling"  # submitted, not yet started
    DETECTION = "detection"  # from the fault to the incident
    DECISION = "decision"  # from the incident to the decision that ends it
    CONTROL_PLANE_AWAY = "control_plane_away"  # a fault was observed, and no controller was there to hear of it
    STOP = "stop"  # from the decision until the old workers are gone
    RESTART = "restart"  # process start, import, rendezvous, the script's own set-up
    RESTORE = "restore"
    WARM_UP = "warm_up"  # the first step of a generation, beyond what a step takes
    SHUTDOWN = "shutdown"  # after the last step of a job that ended
    UNKNOWN = "unknown"  # the log does not say


# A category of time in which the job went forward by its own program: Meta's "productive runtime".
PRODUCTIVE = (Category.USEFUL, Category.EVALUATION, Category.CHECKPOINT_BLOCKED)
# Time in which the workers ran, whether or not their work was kept.
RUNNING = (*PRODUCTIVE, Category.RECOMPUTED)
