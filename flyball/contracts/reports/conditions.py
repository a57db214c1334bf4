"""Conditions of a host: what is wrong with it, who says so, and for how long.

A condition is identified by (source, kind, subject). One that begins again while it stands replaces itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Final, TypeAlias

import msgspec

from flyball.contracts.identity import NAME_PATTERN, Moment

MAX_CONDITIONS: Final = 64  # that stand on one host
MAX_REQUEST_BYTES: Final = 16 << 10  # of one condition, in a request or in a file
MAX_TTL_S: Final = 30 * 86_400.0
EVENT: Final = "event"  # the key in the evidence of an event: it is seen once, and a later reading does not show it
BY_API: Final = "api:"  # begins the source of a condition that was reported at the API; the reporter follows
OPERATOR: Final = "operator"  # the reporter for whom only an operator's token speaks
BOOT: Final = "boot"  # the key in the evidence of what is remembered: the boot of the kernel under which it began

_WHOLE_NAME = NAME_PATTERN.removesuffix("$") + r"\Z"
ConditionKind = Annotated[str, msgspec.Meta(pattern=_WHOLE_NAME)]
Reporter = Annotated[str, msgspec.Meta(pattern=_WHOLE_NAME)]
Subject = Annotated[str, msgspec.Meta(max_length=100)]
Message = Annotated[str, msgspec.Meta(min_length=1, max_length=2_000)]
Evidence = Annotated[
    Mapping[
        Annotated[str, msgspec.Meta(max_length=64)],
        Annotated[str, msgspec.Meta(max_length=1_000)] | int | float | bool | None,
    ],
    msgspec.Meta(max_length=32),
]
ConditionSource = Annotated[str, msgspec.Meta(max_length=100)]
ConditionKey: TypeAlias = tuple[str, str, str]  # source, kind, subject


class Severity(StrEnum):
    """What a condition asks for."""

    INFO = "info"  # nothing: it is on record
    WARNING = "warning"  # the host's ranks should leave, but there is time to save
    CRITICAL = "critical"  # the host cannot train

    @property
    def rank(self) -> int:
        """0 for the least."""
        return list(Severity).index(self)


class HostCondition(msgspec.Struct, frozen=True):
    """One condition. Moments are the wall clock of the host, or of the API that took it."""

    kind: ConditionKind  # e.g. xid, disk-full, link-down
    severity: Severity
    message: Message  # for a person, one sentence
    source: Annotated[
        str, msgspec.Meta(min_length=1, max_length=100)
    ]  # "probe kernel-log", "file NAME", "api:REPORTER"
    since: Moment
    subject: Subject = ""  # the part of the host: a GPU, a device, a mount point; '': the host
    evidence: Evidence = {}
    until: Moment = 0.0  # ends by itself; 0.0: it stands until its source or an operator ends it

    @property
    def key(self) -> ConditionKey:
        return self.source, self.kind, self.subject

    @property
    def is_event(self) -> bool:
        return self.evidence.get(EVENT) is True

    @property
    def is_remembered(self) -> bool:
        """Whether a reading may not show it to a host whose memory is new: an event, or what is no longer there."""
        return self.is_event or BOOT in self.evidence

    @property
    def boot(self) -> str:
        """The boot of the kernel under which what is remembered began; '' if unknown."""
        return str(self.evidence.get(BOOT) or "")

    def says_the_same(self, other: HostCondition) -> bool:
        """Whether both ask for the same, until the same moment. The beginning may differ, and the evidence but for the
        boot."""
        return (self.key, self.severity, self.message, self.until, self.boot) == (
            other.key,
            other.severity,
            other.message,
            other.until,
            other.boot,
        )


class ConditionRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A condition as others report it, by HTTP or in a file."""

    kind: ConditionKind
    severity: Severity
    message: Message
    reporter: Reporter = OPERATOR  # who says so; in a file, the name of the file stands for it
    subject: Subject = ""
    evidence: Evidence = {}
    ttl_s: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_TTL_S)] = 0.0  # 0.0: it stands until it is ended

    def condition(self, source: str, since: float) -> HostCondition:
        """The condition that begins at `since` (wall clock)."""
        until = since + self.ttl_s if self.ttl_s else 0.0
        return HostCondition(self.kind, self.severity, self.message, source, since, self.subject, self.evidence, until)
