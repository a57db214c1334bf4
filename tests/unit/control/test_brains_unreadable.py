"""The stand-in for a signal that cannot be read or stored."""

from __future__ import annotations

import json

import pytest

from flyball.contracts.errors import InvalidMessage
from flyball.contracts.reports.signals import EngineRestarted, Signal, SignalUnreadable
from flyball.contracts.wire import encode
from services.rules.unreadable import KEPT_CHARACTERS, read_signal, unstorable

GOOD = Signal("host-a", "i1", 7, 100.0, EngineRestarted("it was killed"))
NEWER = {"source": "host-a", "incarnation": "i1", "seq": 7, "at": 100.0, "body": {"type": "of_next_year", "n": 1}}


def test_a_readable_signal_is_read() -> None:
    assert read_signal(encode(GOOD)) == read_signal(encode(GOOD).decode()) == GOOD


@pytest.mark.parametrize("as_text", [False, True])
def test_the_stand_in_has_the_number_the_kind_the_reason_and_the_document(as_text: bool) -> None:
    text = json.dumps(NEWER)
    found = read_signal(text if as_text else text.encode())
    assert (found.source, found.incarnation, found.seq, found.at) == ("host-a", "i1", 7, 100.0)
    body = found.body
    assert isinstance(body, SignalUnreadable)
    assert (body.kind, body.document) == ("of_next_year", text)
    assert "of_next_year" in body.reason


@pytest.mark.parametrize(
    ("change", "at", "kind"),
    [
        ({"at": -5.0}, 0.0, "of_next_year"),
        ({"at": 1e300}, 1e11, "of_next_year"),
        ({"body": 17}, 100.0, ""),
        ({"body": {"type": "x" * 500}}, 100.0, "x" * 100),
    ],
)
def test_it_has_a_place_in_the_store_whatever_the_document_says(
    change: dict[str, object], at: float, kind: str
) -> None:
    found = read_signal(json.dumps(NEWER | change | {"more": "y" * 9_000}))
    body = found.body
    assert isinstance(body, SignalUnreadable)
    assert (found.at, body.kind, len(body.document)) == (at, kind, KEPT_CHARACTERS)


def test_what_a_document_leaves_out_has_a_default() -> None:
    found = read_signal(json.dumps({"source": "host-a", "incarnation": "i1", "seq": 7}))
    assert found.at == 0.0
    assert isinstance(found.body, SignalUnreadable) and found.body.kind == ""


@pytest.mark.parametrize("missing", ["source", "incarnation", "seq"])
def test_nothing_stands_for_a_signal_of_nobody(missing: str) -> None:
    with pytest.raises(InvalidMessage):
        read_signal(json.dumps({key: value for key, value in NEWER.items() if key != missing}))


def test_a_signal_that_fits_no_column_keeps_its_number_and_names_its_kind() -> None:
    found = unstorable(GOOD, "r" * 2_000)
    body = found.body
    assert (found.source, found.incarnation, found.seq, found.at) == ("host-a", "i1", 7, 100.0)
    assert isinstance(body, SignalUnreadable)
    assert (body.kind, body.reason) == ("engine_restarted", "r" * 1_000)
    assert "it was killed" in body.document
