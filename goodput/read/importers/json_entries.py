"""Logs of one JSON object per line, plain or wrapped in a Google Cloud Logging export. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from flyball.contracts.wire import MALFORMED, MAX_MESSAGE_BYTES, decoder_of
from goodput.read.importers.records import Unusable

_decoder = decoder_of(dict[str, object])


def entry_of(line: bytes) -> Mapping[str, object]:
    """A line's object, or the `jsonPayload` of an exported entry. Raises Unusable if it is not an object."""
    if len(line) > MAX_MESSAGE_BYTES:
        raise Unusable(f"a line of more than {MAX_MESSAGE_BYTES} bytes")
    try:
        entry = _decoder.decode(line)
    except MALFORMED as error:
        raise Unusable(f"not a JSON object: {error}") from None
    payload = entry.get("jsonPayload")
    return payload if isinstance(payload, dict) else entry


def has_any(line: bytes, keys: Collection[str]) -> bool:
    """Whether a line is an object with one of `keys`."""
    if not line.lstrip().startswith(b"{"):
        return False
    try:
        return any(key in entry_of(line) for key in keys)
    except Unusable:
        return False


def name_in(entry: Mapping[str, object], key: str) -> str:
    """A string of the entry; '' if it has none."""
    value = entry.get(key)
    return value if isinstance(value, str) else ""
