"""Replies about hosts, operators' orders and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from flyball.contracts.checkpoints import PeerTransport
from flyball.contracts.cluster import HostState
from flyball.contracts.orders import OrderKind, OrderState
from flyball.contracts.reports.conditions import Severity
from flyball.contracts.reports.host_checks import CheckState
from services.api.replies.fields import (
    Cursor,
    HostId,
    JobOrEmpty,
    Message,
    SizeBytes,
    WallClock,
    WallClockOrNull,
)

Evidence = Mapping[str, str | int | float | bool | None]


class DrainReply(msgspec.Struct, frozen=True):
    """An operator's request to drain a host. `drained`: its ranks train elsewhere."""

    state: Literal["requested", "refused", "cancelled", "drained"]
    requested_at: WallClock
    deadline_at: WallClock
    reason: Message
    message: Annotated[str, msgspec.Meta(description="Why it was refused.", examples=[""])]


class ConditionReply(msgspec.Struct, frozen=True):
    """One condition that stands on a host."""

    kind: Annotated[str, msgspec.Meta(examples=["xid"])]
    severity: Severity
    message: Annotated[str, msgspec.Meta(examples=["GPU 3 reported XID 48"])]
    source: Annotated[str, msgspec.Meta(description="Who reported it.", examples=["api:operator"])]
    since: WallClock
    subject: Annotated[str, msgspec.Meta(description="The part of the host; '': the host.", examples=["gpu-3"])]
    evidence: Evidence
    until: WallClockOrNull
    is_overruled: Annotated[bool, msgspec.Meta(description="An operator gave the host work all the same.")]


class CheckReply(msgspec.Struct, frozen=True):
    """The newest check of a host."""

    state: CheckState
    at: Annotated[WallClock, msgspec.Meta(description="When it began or, if it is over, ended, seconds since 1970.")]
    action_id: Annotated[str, msgspec.Meta(examples=["act-17"])]
    devices: Annotated[int, msgspec.Meta(description="GPUs, or 1 for the CPU.", examples=[8])]
    matmul_s: Annotated[float, msgspec.Meta(description="Of its slowest device; 0.0: not measured.", examples=[0.002])]
    all_reduce_s: Annotated[float, msgspec.Meta(description="The shortest of its groups.", examples=[0.003])]
    message: Annotated[str, msgspec.Meta(description="Why it did not pass.", examples=[""])]


class HostReply(msgspec.Struct, frozen=True):
    """A host, and the job that has ranks on it."""

    host_id: HostId
    state: HostState
    since: WallClock
    reason: Message
    job: JobOrEmpty
    ranks: Annotated[tuple[int, ...], msgspec.Meta(description="Ranks of `job` on it.")]
    address: Annotated[str, msgspec.Meta(description="IP address for other hosts.", examples=["10.0.0.11"])]
    failure_domain: Annotated[str, msgspec.Meta(examples=["rack-1"])]
    fabric: Annotated[str, msgspec.Meta(description="Spares come from the others' fabric first.", examples=["ib-1"])]
    memory_bytes: Annotated[int, msgspec.Meta(description="For its ranks; 0: unknown.", examples=[274877906944])]
    daemon_version: Annotated[str, msgspec.Meta(examples=["0.1.0"])]
    daemon_pid: Annotated[int, msgspec.Meta(examples=[812])]
    joined_at: WallClock
    left_at: WallClockOrNull
    last_report_at: WallClock
    report_interval_s: Annotated[float, msgspec.Meta(description="Seconds between reports.", examples=[1.0])]
    preempt_deadline_at: WallClockOrNull
    engine_address: Annotated[str, msgspec.Meta(description="ip:port; '': it is away.", examples=["10.0.0.11:7371"])]
    engine_alive: bool
    unreachable_peers: tuple[str, ...]
    transports: Annotated[tuple[PeerTransport, ...], msgspec.Meta(description="What carries shards to its peers.")]
    counters: Annotated[Mapping[str, int | float], msgspec.Meta(description="Of its engine, since it started.")]
    copies: Annotated[int, msgspec.Meta(description="Number of verified copies on it.", examples=[4])]
    copies_size_bytes: SizeBytes
    drain: DrainReply | None
    conditions: tuple[ConditionReply, ...]
    check: CheckReply | None


class HostPage(msgspec.Struct, frozen=True):
    """Hosts by name."""

    items: tuple[HostReply, ...]
    next_before: Cursor


class DomainHosts(msgspec.Struct, frozen=True):
    """The hosts of one failure domain: the n-th item of each list is about the n-th host."""

    failure_domain: Annotated[str, msgspec.Meta(description="'': not known.", examples=["rack-1"])]
    host_ids: Annotated[tuple[str, ...], msgspec.Meta(examples=[["host-a"]])]
    states: tuple[HostState, ...]
    jobs: Annotated[tuple[str, ...], msgspec.Meta(description="The job with ranks on it; '': none.")]
    marks: Annotated[
        tuple[Literal["", "critical", "notice", "warning", "drain"], ...],
        msgspec.Meta(description="Why its ranks should leave: a condition, a preemption notice, a drain; '': nothing."),
    ]


class HostMapReply(msgspec.Struct, frozen=True):
    """All hosts in short."""

    states: Annotated[Mapping[HostState, int], msgspec.Meta(description="Number of hosts in each state.")]
    items: tuple[DomainHosts, ...]


class OrderReply(msgspec.Struct, frozen=True):
    """An operator's order that stands or was refused."""

    kind: OrderKind
    target: Annotated[
        str, msgspec.Meta(description='A host, "domain:NAME", an incident, or a job.', examples=["host-a"])
    ]
    requested_at: WallClock
    reason: Message
    until: Annotated[
        float,
        msgspec.Meta(
            description="When a silence is over, or a refused order is forgotten, seconds since 1970; 0.0: it stands.",
            examples=[0.0],
        ),
    ]
    state: OrderState
    message: Annotated[str, msgspec.Meta(description="Why it was refused.", examples=[""])]
    awaited: Annotated[
        str,
        msgspec.Meta(
            description="An approval: the kind of action. A check: 'uncordon' if a host that passes gets work.",
            examples=[""],
        ),
    ]
    action_id: Annotated[str, msgspec.Meta(description="An approval: the incident's last action.", examples=[""])]


class OrderPage(msgspec.Struct, frozen=True):
    """Operators' orders, by kind and target."""

    items: tuple[OrderReply, ...]
    next_before: Cursor


class ChecksReply(msgspec.Struct, frozen=True):
    """The orders to check hosts, one per host."""

    items: tuple[OrderReply, ...]


class HostTokenReply(msgspec.Struct, frozen=True):
    """The content of a daemon's token file. Keep it secret."""

    host_id: HostId
    epoch: Annotated[int, msgspec.Meta(description="Epoch of the token; 0: the first.", examples=[0])]
    token_file: Annotated[str, msgspec.Meta(examples=["flyball-host.host-a.SECRET SECRET"])]


class ReaderTokenReply(msgspec.Struct, frozen=True):
    """A token that reads everything and changes nothing."""

    token: Annotated[str, msgspec.Meta(examples=["flyball-reader.SECRET"])]
