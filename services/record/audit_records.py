"""What goes on record about a request of an operator, and how long its answer is kept for repetitions."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

KEY_KEPT_S = 86_400.0  # an answer, for requests with the same Idempotency-Key
OPERATOR = "operator"  # in `Attempt.detail`: the name of who it was
IN_PROGRESS_S = 60.0  # a first request without an answer for this long is over: its process died


class Attempt(msgspec.Struct, frozen=True):
    """A request that is about to be carried out."""

    role: str
    token: str  # fingerprint
    client: str  # address
    operation: str
    target: str
    detail: str  # JSON
    key: str  # Idempotency-Key; '': none
    digest: str  # of method, path, query and body


class Noted(msgspec.Struct, frozen=True):
    """What a host said that changes what the controller does. No operator asked for it."""

    at: float
    operation: str
    target: str  # a host, or a job
    detail: Mapping[str, object]


class Answer(msgspec.Struct, frozen=True):
    """The response to the first request with a key."""

    status: int
    body: bytes


class Begun(msgspec.Struct, frozen=True):
    """The number of the record. `answer`: the request was answered before; None: carry it out."""

    number: int
    answer: Answer | None = None
