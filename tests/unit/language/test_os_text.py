"""Paths and arguments have any bytes, and come back as they were from what JSON and databases take."""

from __future__ import annotations

import os

from hypothesis import example, given
from hypothesis import strategies as st

from flyball.contracts.on_host.os_text import from_text, to_text


@given(st.binary(max_size=20) | st.text().map(os.fsencode))
@example("\U0010ffe4 is no byte".encode())
@example(b"\xf4\x8f\xbf")
def test_any_bytes_come_back_and_are_valid_unicode_meanwhile(name: bytes) -> None:
    system = os.fsdecode(name)
    text = to_text(system)
    text.encode()
    assert from_text(text) == system


@given(st.text(st.characters(max_codepoint=0x10FF7F, exclude_categories=["Cs"])))
def test_what_is_valid_stays_as_it_is(name: str) -> None:
    assert to_text(name) == from_text(name) == name
