"""Replaces signals that cannot be read or stored, for example of another release. Pure.

The replacement keeps the seq. Otherwise no later signal of its sender could be committed, and the sender would send all
of them again and again. A signal without a readable sender cannot be replaced: it leaves a gap, and its sender sends it
again.
"""

from __future__ import annotations

import msgspec

from flyball.contracts.errors import InvalidMessage
from flyball.contracts.identity import Incarnation, Seq
from flyball.contracts.reports.signals import Signal, SignalUnreadable
from flyball.contracts.wire import decode

KEPT_CHARACTERS = 4_000  # of the document, for a person who investigates
_LATEST = 1e11  # the largest valid time


class _SignalHead(msgspec.Struct, frozen=True):
    """The fields of a signal that every release has."""

    source: str
    incarnation: Incarnation
    seq: Seq
    at: float = 0.0
    body: msgspec.Raw = msgspec.Raw(b"{}")


class _Body(msgspec.Struct, frozen=True):
    type: str = ""


def read_signal(document: bytes | str) -> Signal:
    """Decode a signal from a bus, or replace it. Raises InvalidMessage if its sender cannot be read."""
    try:
        return decode(document, Signal)
    except InvalidMessage as error:
        head = decode(document, _SignalHead)
        text = document if isinstance(document, str) else document.decode()
        return _stand_in(head, _kind(head.body), error.message, text)


def unstorable(signal: Signal, reason: str) -> Signal:
    """The replacement of a signal whose values do not fit into the store."""
    head = _SignalHead(signal.source, signal.incarnation, signal.seq, signal.at)
    return _stand_in(head, str(type(signal.body).__struct_config__.tag), reason, str(signal.body))


def _stand_in(head: _SignalHead, kind: str, reason: str, document: str) -> Signal:
    body = SignalUnreadable(kind=kind[:100], reason=reason[:1_000], document=document[:KEPT_CHARACTERS])
    at = min(max(head.at, 0.0), _LATEST)
    return Signal(source=head.source, incarnation=head.incarnation, seq=head.seq, at=at, body=body)


def _kind(body: msgspec.Raw) -> str:
    try:
        return decode(bytes(body), _Body).type
    except InvalidMessage:
        return ""
