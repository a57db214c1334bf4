"""The categories of a job's elapsed time. docs/reference/goodput/measures.md explains how each is found."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Category(StrEnum):
    USEFUL = "useful"  # step time of steps that were kept
    RECOMPUTED = "recomputed"  # step time of steps that a later generation recomputed, or that a fault cut off
    EVALUATION = "evaluation"
    CHECKPOINT_BLOCKED = "checkpoint_blocked"  # inside save, or parked for an emergency checkpoint
    DATA_WAIT = "data_wait"  # the rank that waited longest for its data
    STRAGGLER = "straggler"  # the median rank had completed the step, the last rank had not
    REDUCED_CAPACITY = "reduced_capacity"  # of a shrunk job's useful time, the missing ranks' share
    SCHEDULING = "scheduling"  # submitted, not started yet: the cluster's queue
    DETECTION = "detection"  # from the fault to the incident
    DECISION = "decision"  # from the incident to the decision that ends it
    CONTROL_PLANE_AWAY = "control_plane_away"  # a fault was observed, but no controller was there to receive it
    IDLE_NO_HOSTS = "idle_no_hosts"  # stopped, and on hold until a host is free
    STOP = "stop"  # from the decision until the old workers are gone
    RESTART = "restart"  # process start, imports, rendezvous, the script's own set-up
    RESTORE = "restore"
    WARM_UP = "warm_up"  # the first steps of a generation, beyond a normal step's time
    SHUTDOWN = "shutdown"  # after the last step of a job that ended
    UNKNOWN = "unknown"  # the log does not say


# Categories in which the job's own program advanced: Meta's "productive runtime".
PRODUCTIVE = (
    Category.USEFUL,
    Category.EVALUATION,
    Category.CHECKPOINT_BLOCKED,
    Category.DATA_WAIT,
    Category.STRAGGLER,
)
# Categories in which the workers ran, whether or not their work was kept.
RUNNING = (*PRODUCTIVE, Category.RECOMPUTED, Category.REDUCED_CAPACITY)
# Categories in which the job lacked hosts: excluded from Google's scheduling goodput.
WITHOUT_HOSTS = (Category.SCHEDULING, Category.IDLE_NO_HOSTS, Category.REDUCED_CAPACITY)


class TimeGroup(NamedTuple):
    """Categories that a picture shows as one."""

    name: str
    words: str
    categories: frozenset[Category]


# Eighteen categories cannot be distinguished by colour and pattern: each group has its own.
GROUPS = (
    TimeGroup("useful", "useful", frozenset({Category.USEFUL})),
    TimeGroup("recomputed", "recomputed", frozenset({Category.RECOMPUTED})),
    TimeGroup(
        "held",
        "saving, evaluating, waiting for data or stragglers",
        frozenset({Category.CHECKPOINT_BLOCKED, Category.EVALUATION, Category.DATA_WAIT, Category.STRAGGLER}),
    ),
    TimeGroup(
        "deciding",
        "detecting and deciding",
        frozenset({Category.DETECTION, Category.DECISION, Category.CONTROL_PLANE_AWAY}),
    ),
    TimeGroup(
        "restarting",
        "stopping, restarting, restoring",
        frozenset({Category.STOP, Category.RESTART, Category.RESTORE, Category.WARM_UP}),
    ),
    TimeGroup(
        "no-hosts",
        "without hosts, queued, ending",
        frozenset({Category.SCHEDULING, Category.IDLE_NO_HOSTS, Category.REDUCED_CAPACITY, Category.SHUTDOWN}),
    ),
    TimeGroup("unknown", "unknown", frozenset({Category.UNKNOWN})),
)
