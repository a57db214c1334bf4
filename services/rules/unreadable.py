"""What stands for a signal that cannot be read or stored, for example one of another release. Pure.

Its seq counts as told: else nothing of its sender would be committed any more, and the sender would keep, and send
again, all that came after it. Of what does not even tell whose it is nothing can stand here: that is a gap, and its
sender, which still has it, sends it again.
"""

from __future__ import annotations

import msgspec

from flyball.contracts.errors import InvalidMessage
from flyball.contracts.identity import Incarnation, Seq
from flyball.contracts.reports.signals import Signal, SignalUnreadable
from flyball.contracts.wire import decode

KEPT_CHARACTERS = 4_000  # of the document, for whoever looks into it
_LATEST = 1e11  # the bound of a moment


class _Head(msgspec.Struct, frozen=True):
    """As much of a signal as every release has."""

    source: str
    incarnation: Incarnation
    seq: Seq
    at: float = 0.0
    body: msgspec.Raw = msgspec.Raw(b"{}")


class _Body(msgspec.Struct, frozen=True):
    type: str = ""


def read_signal(document: bytes | str) -> Signal:
    """A signal as a bus has it, or what stands for it. Raises InvalidMessage if it does not tell whose it is."""
    try:
        return decode(document, Signal)
    except InvalidMessage as error:
        head = decode(document, _Head)
        text = document if isinstance(document, str) else document.decode()
        return _stand_in(head, _kind(head.body), error.message, text)


def unstorable(signal: Signal, reason: str) -> Signal:
    """What stands for a signal with values that have no place in the store."""
    head = _Head(signal.source, signal.incarnation, signal.seq, signal.at)
    return _stand_in(head, str(type(signal.body).__struct_config__.tag), reason, str(signal.body))


def _stand_in(head: _Head, kind: str, reason: str, document: str) -> Signal:
    body = SignalUnreadable(kind=kind[:100], reason=reason[:1_000], document=document[:KEPT_CHARACTERS])
    at = min(max(head.at, 0.0), _LATEST)
    return Signal(source=head.source, incarnation=head.incarnation, seq=head.seq, at=at, body=body)


def _kind(body: msgspec.Raw) -> str:
    try:
        return decode(bytes(body), _Body).type
    except InvalidMessage:
        return ""
