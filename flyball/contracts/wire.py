"""The versioned wire: JSON by msgspec, strict, with size limits. Nothing is ever unpickled."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from flyball.contracts.errors import InvalidMessage

WIRE_VERSION = 1
MAX_MESSAGE_BYTES = 4 << 20

# What msgspec raises for bytes that are no such JSON; the last for what is nested without end.
MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

T = TypeVar("T")

_encoder = msgspec.json.Encoder()


def encode(message: object) -> bytes:
    """JSON bytes of a contract type."""
    return _encoder.encode(message)


def decode(data: bytes | memoryview | str, kind: type[T], *, max_bytes: int = MAX_MESSAGE_BYTES) -> T:
    """A contract type from JSON bytes; raises InvalidMessage that says what is wrong, and where."""
    if len(data) > max_bytes:
        raise InvalidMessage(
            f"A message of {len(data)} bytes exceeds the limit of {max_bytes}.", hint="send less at once"
        )
    try:
        return msgspec.json.decode(data, type=kind)
    except MALFORMED as error:
        name = getattr(kind, "__name__", str(kind))  # a union has none
        raise InvalidMessage(f"Not a valid {name}: {error}.", hint="check the sender's version") from error


def check_version(version: int) -> None:
    """Raise InvalidMessage unless the sender speaks this wire version."""
    if version != WIRE_VERSION:
        raise InvalidMessage(
            f"The sender speaks wire version {version}, this process speaks {WIRE_VERSION}.",
            hint="run the same release of Flyball on both sides",
        )
