"""Replies to what operators do: a preview of it, and the record of who did it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from flyball.contracts.decisions import Alternative, DecisionKind
from services.api.replies.fields import Cursor, JobOrEmpty, WallClock, WallClockOrNull
from services.api.replies.history import Evidence


class PlannedDecision(msgspec.Struct, frozen=True):
    """What the controller would decide next."""

    kind: DecisionKind
    job: JobOrEmpty
    reason: str
    rule: Annotated[str, msgspec.Meta(examples=["drained_host"])]
    evidence: Evidence
    alternatives: tuple[Alternative, ...]
    hosts: Annotated[tuple[str, ...], msgspec.Meta(description="Where the next generation would run.")]


class DryRunReply(msgspec.Struct, frozen=True):
    """What a request would do. Nothing was changed."""

    dry_run: Literal[True]
    status: Annotated[int, msgspec.Meta(description="Status that the request would get.", examples=[202])]
    reply: Annotated[Mapping[str, Any], msgspec.Meta(description="The reply that it would get.")]
    decisions: tuple[PlannedDecision, ...]


class AuditEntry(msgspec.Struct, frozen=True):
    """One request that an operator made to change something."""

    audit_id: Annotated[str, msgspec.Meta(examples=["aud-3"])]
    at: WallClock
    ended_at: WallClockOrNull
    role: Annotated[str, msgspec.Meta(description="Of the token.", examples=["operator"])]
    operator: Annotated[str, msgspec.Meta(description="Whose token; '': the shared one.", examples=["alice"])]
    token: Annotated[str, msgspec.Meta(description="Fingerprint of the token.", examples=["3f9a01c2"])]
    client: Annotated[str, msgspec.Meta(description="Address it came from.", examples=["10.0.0.5"])]
    operation: Annotated[str, msgspec.Meta(examples=["drainHost"])]
    target: Annotated[str, msgspec.Meta(description="What it was about; '': see `detail`.", examples=["host-a"])]
    detail: Annotated[Mapping[str, Any], msgspec.Meta(description="Parameters and the main fields of the body.")]
    status: Annotated[int, msgspec.Meta(description="Of the response; 0: not known.", examples=[202])]
    code: Annotated[str, msgspec.Meta(description="Of the error; '': none.", examples=[""])]
    idempotency_key: Annotated[str, msgspec.Meta(examples=[""])]


class AuditPage(msgspec.Struct, frozen=True):
    """Requests in the order of their arrival."""

    items: tuple[AuditEntry, ...]
    next_before: Cursor
