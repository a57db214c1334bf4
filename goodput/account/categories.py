"""What a piece of a job's elapsed time can be. docs/goodput.md tells how each is found."""

from __future__ import annotations

from enum import StrEnum


class Category(StrEnum):
    USEFUL = "useful"  # step time of steps that were kept
    RECOMPUTED = "recomputed"  # step time of steps that a later generation did again, or that were cut off by a fault
    EVALUATION = "evaluation"
    CHECKPOINT_BLOCKED = "checkpoint_blocked"  # inside save, or parked for an emergency checkpoint
    DATA_WAIT = "data_wait"  # the rank that waited longest for its data
    STRAGGLER = "straggler"  # the median rank had completed the step, the last had not
    REDUCED_CAPACITY = "reduced_capacity"  # the share of the ranks that a shrunk job lacks, of its useful time
    SCHEDULING = "scheduling"  # submitted, not yet started: the cluster's queue
    DETECTION = "detection"  # from the fault to the incident
    DECISION = "decision"  # from the incident to the decision that ends it
    CONTROL_PLANE_AWAY = "control_plane_away"  # a fault was observed, and no controller was there to hear of it
    IDLE_NO_HOSTS = "idle_no_hosts"  # stopped, and held until there is a host
    STOP = "stop"  # from the decision until the old workers are gone
    RESTART = "restart"  # process start, import, rendezvous, the script's own set-up
    RESTORE = "restore"
    WARM_UP = "warm_up"  # the first steps of a generation, beyond what a step takes
    SHUTDOWN = "shutdown"  # after the last step of a job that ended
    UNKNOWN = "unknown"  # the log does not say


# A category of time in which the job went forward by its own program: Meta's "productive runtime".
PRODUCTIVE = (
    Category.USEFUL,
    Category.EVALUATION,
    Category.CHECKPOINT_BLOCKED,
    Category.DATA_WAIT,
    Category.STRAGGLER,
)
# Time in which the workers ran, whether or not their work was kept.
RUNNING = (*PRODUCTIVE, Category.RECOMPUTED, Category.REDUCED_CAPACITY)
# Time in which the job did not have the hosts that it needs: what Google's scheduling goodput counts.
WITHOUT_HOSTS = (Category.SCHEDULING, Category.IDLE_NO_HOSTS, Category.REDUCED_CAPACITY)
