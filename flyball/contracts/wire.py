"""The versioned wire: strict JSON by msgspec, with size limits. Nothing is ever unpickled."""

from __future__ import annotations

import threading
from typing import Any, TypeVar, overload

import msgspec

from flyball.contracts.errors import InvalidMessage

WIRE_VERSION = 2
MAX_MESSAGE_BYTES = 4 << 20

# What msgspec raises for malformed JSON; RecursionError for endless nesting.
MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

T = TypeVar("T")


class OtherVersion(InvalidMessage):
    """The sender speaks another wire version. Reported to the sender like any InvalidMessage."""


_encoder = msgspec.json.Encoder()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_making = threading.Lock()


def encode(message: object) -> bytes:
    """JSON bytes of a contract type."""
    return _encoder.encode(message)


def sendable(text: str, most_chars: int) -> str:
    """A text of any making as a message can carry it: not endless, and nothing that UTF-8 has no bytes for."""
    return text[:most_chars].encode(errors="replace").decode()


def decode(data: bytes | memoryview | str, kind: type[T], *, max_bytes: int = MAX_MESSAGE_BYTES) -> T:
    """Decode a contract type from JSON bytes; raises InvalidMessage with the error and its place."""
    if len(data) > max_bytes:
        raise InvalidMessage(
            f"A message of {len(data)} bytes exceeds the limit of {max_bytes}.", hint="send less at once"
        )
    try:
        return decoder_of(kind).decode(data)
    except MALFORMED as error:
        name = getattr(kind, "__name__", str(kind))  # a union has none
        raise InvalidMessage(f"Not a valid {name}: {error}.", hint="check the sender's version") from error


@overload
def decoder_of(kind: type[T]) -> msgspec.json.Decoder[T]: ...
@overload
def decoder_of(kind: Any) -> msgspec.json.Decoder[Any]: ...  # noqa: ANN401 - a union is no type
def decoder_of(kind: Any) -> msgspec.json.Decoder[Any]:
    """A decoder for JSON that Flyball itself wrote; use `decode` for anything else.

    This must stay the only place that makes decoders, one thread at a time. msgspec exposes a type's information before
    it is complete, and decoding that type at that moment crashes the process. A test checks that there is no other
    place.
    """
    if kind not in _decoders:
        with _making:
            if kind not in _decoders:
                _decoders[kind] = msgspec.json.Decoder(kind)
    return _decoders[kind]


def convert(value: object, kind: type[T], *, strict: bool = True) -> T:
    """Build a value of this type from dicts, lists and numbers; raises msgspec.ValidationError."""
    decoder_of(kind)  # registers the type with msgspec
    return msgspec.convert(value, kind, strict=strict)


def unpack(data: bytes, kind: type[T]) -> T:
    """Decode MessagePack; raises msgspec.MsgspecError."""
    decoder_of(kind)
    return msgspec.msgpack.decode(data, type=kind)


def check_version(version: int) -> None:
    """Raise OtherVersion unless the sender speaks this wire version."""
    if version != WIRE_VERSION:
        raise OtherVersion(
            f"The sender speaks wire version {version}, this process speaks {WIRE_VERSION}.",
            hint="run the same release of Flyball on both sides",
        )
