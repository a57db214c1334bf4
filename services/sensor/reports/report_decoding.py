"""Decodes reports at less than full cost: what a daemon repeats is decoded once.

Most bytes of a report seldom change: the sender, the host's facts, its engine and workers, the copies that it holds. A
daemon writes these first. If a report begins with the same bytes as the last one from this host, only the rest is
decoded.
"""

from __future__ import annotations

from typing import Any

import msgspec

from flyball.contracts.errors import InvalidMessage
from flyball.contracts.reports.signals import Report
from flyball.contracts.wire import MALFORMED, MAX_MESSAGE_BYTES, check_version, decode, decoder_of

MAX_HOSTS = 20_000
MAX_REPEATED_BYTES = 256 << 10  # remembered per host

_FIRST_NEW = "sent_at"
# In a JSON string, quotes are escaped. So at these bytes a key begins, of the report or of an object in it.
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


class _Beginning(msgspec.Struct, frozen=True, gc=False):
    """The beginning of a host's report, as bytes and as values."""

    body: bytes
    part: Any


class ReportDecoder:
    """Not thread-safe: one loop feeds it."""

    def __init__(self, max_hosts: int = MAX_HOSTS) -> None:
        self._max_hosts = max_hosts
        self._known: dict[str, _Beginning] = {}

    def decode(self, body: bytes, host_id: str) -> Report:
        """Decode a report that came with the token of `host_id`. Raises InvalidMessage."""
        known = self._known.get(host_id)
        try:
            if known is None or not body.startswith(known.body):
                known = self._begin(body, host_id)
            new = _NEW.decode(b"{" + body[len(known.body) :])
        except MALFORMED:
            return decode_report(body)  # says what is wrong, or succeeds: the fields may come in another order
        part = known.part
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
            computes=new.computes,
        )

    def _begin(self, body: bytes, host_id: str) -> _Beginning:
        """Decode the beginning of `body`, and remember it. Raises what msgspec raises.

        The beginning is an object once it is closed, and the rest is one once it is opened. So the border lies between
        two keys of the report itself."""
        at = body.find(_BORDER)
        if at < 0 or len(body) > MAX_MESSAGE_BYTES:
            raise msgspec.DecodeError
        part = _REPEATED.decode(body[:at] + b"}")
        before = self._known.pop(host_id, None)
        if before is not None:
            part = _as_before(part, before.part)
        known = _Beginning(body[: at + 1], part)
        if len(known.body) <= MAX_REPEATED_BYTES:
            while len(self._known) >= self._max_hosts:
                del self._known[next(iter(self._known))]
            self._known[host_id] = known
        return known


def decode_report(body: bytes) -> Report:
    """Decode a whole report. Raises InvalidMessage, which names a differing wire version first: it explains the
    rest."""
    try:
        return decode(body, Report)
    except InvalidMessage:
        _check_sender(body)
        raise


def _check_sender(body: bytes) -> None:
    try:
        sender = decode(body, _Sender)
    except InvalidMessage:
        return  # not a report at all
    check_version(sender.version)


def _as_before(part: Any, before: Any) -> Any:  # noqa: ANN401 - a RepeatedPart
    """`part` with the objects of `before` where they are equal: others compare them by identity."""
    equal = {name: value for name in part.__struct_fields__ if (value := getattr(before, name)) == getattr(part, name)}
    return msgspec.structs.replace(part, **equal)
