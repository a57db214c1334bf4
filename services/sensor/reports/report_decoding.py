"""Decodes reports for less than their size: what a daemon repeats is decoded once.

Of a report most bytes are what seldom changes: who sends it, the host's facts, its engine and workers, the copies that
it holds. A daemon writes these first. Where a report begins with the very bytes with which the one before it from this
host began, they mean what they did, and only the rest is decoded.
"""

from __future__ import annotations

from typing import Any

import msgspec

from flyball.contracts.errors import InvalidMessage
from flyball.contracts.reports.signals import Report
from flyball.contracts.wire import MALFORMED, MAX_MESSAGE_BYTES, check_version, decode, decoder_of

MAX_HOSTS = 20_000
MAX_REPEATED_BYTES = 256 << 10  # of what is remembered of a host

_FIRST_NEW = "sent_at"
# Inside a string a quote has a backslash before it: where these bytes are, a key begins, the report's or one within it.
_BORDER = b',"%b":' % _FIRST_NEW.encode()


def _part(name: str, fields: tuple[msgspec.structs.FieldInfo, ...]) -> msgspec.json.Decoder[Any]:
    described: list[Any] = [
        (field.name, field.type) if field.required else (field.name, field.type, field.default) for field in fields
    ]
    kind = msgspec.defstruct(name, described, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True)
    return decoder_of(kind)


_FIELDS = msgspec.structs.fields(Report)
_AT = next(index for index, field in enumerate(_FIELDS) if field.name == _FIRST_NEW)
_REPEATED = _part("RepeatedPart", _FIELDS[:_AT])
_NEW = _part("NewPart", _FIELDS[_AT:])


class _Sender(msgspec.Struct):
    version: int


class _Said(msgspec.Struct, frozen=True, gc=False):
    """What a host's report began with, as bytes and as values."""

    beginning: bytes
    part: Any


class ReportDecoder:
    """Not thread-safe: one loop feeds it."""

    def __init__(self, max_hosts: int = MAX_HOSTS) -> None:
        self._max_hosts = max_hosts
        self._said: dict[str, _Said] = {}

    def decode(self, body: bytes, host_id: str) -> Report:
        """The report in `body`, which came with the token of `host_id`. Raises InvalidMessage."""
        said = self._said.get(host_id)
        try:
            if said is None or not body.startswith(said.beginning):
                said = self._begin(body, host_id)
            new = _NEW.decode(b"{" + body[len(said.beginning) :])
        except MALFORMED:
            return decode_report(body)  # says what is wrong, and where; or it is right, and written in another order
        part = said.part
        return Report(
            version=part.version,
            incarnation=part.incarnation,
            interval_s=part.interval_s,
            facts=part.facts,
            engine=part.engine,
            workers=part.workers,
            copies=part.copies,
            succeeds=part.succeeds,
            sent_at=new.sent_at,
            seq=new.seq,
            progress=new.progress,
            completed=new.completed,
            lagged_s=new.lagged_s,
            signals=new.signals,
            marks=new.marks,
            restores=new.restores,
            leaves=new.leaves,
            losses=new.losses,
        )

    def _begin(self, body: bytes, host_id: str) -> _Said:
        """Decode what `body` begins with, and remember it. Raises what msgspec does. A beginning that is an object when
        it is closed, before a rest that is one when it is opened: so the border is between two keys of the report."""
        at = body.find(_BORDER)
        if at < 0 or len(body) > MAX_MESSAGE_BYTES:
            raise msgspec.DecodeError
        part = _REPEATED.decode(body[:at] + b"}")
        before = self._said.pop(host_id, None)
        if before is not None:
            part = _as_before(part, before.part)
        said = _Said(body[: at + 1], part)
        if len(said.beginning) <= MAX_REPEATED_BYTES:
            while len(self._said) >= self._max_hosts:
                del self._said[next(iter(self._said))]
            self._said[host_id] = said
        return said


def decode_report(body: bytes) -> Report:
    """A whole report. Raises InvalidMessage: of a sender of another version says that first, as the rest follows."""
    try:
        return decode(body, Report)
    except InvalidMessage:
        _check_sender(body)
        raise


def _check_sender(body: bytes) -> None:
    try:
        sender = decode(body, _Sender)
    except InvalidMessage:
        return  # no such thing as a report
    check_version(sender.version)


def _as_before(part: Any, before: Any) -> Any:  # noqa: ANN401 - a RepeatedPart
    """The same, with what is equal as the very objects that it was: others compare them by identity."""
    equal = {name: value for name in part.__struct_fields__ if (value := getattr(before, name)) == getattr(part, name)}
    return msgspec.structs.replace(part, **equal)
