"""The profile "fixed" means what it says: examples do not depend on which tests ran before."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def test_examples_are_the_same_whatever_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if settings.get_current_profile_name() != "fixed":
        pytest.skip("another profile was asked for")
    drawn: list[object] = []

    @given(st.lists(st.integers(0, 10**6)), st.floats(0, 1e4), st.text(max_size=5))
    def draw(numbers: list[int], number: float, text: str) -> None:
        drawn.append((numbers, number, text))

    draw()
    before = drawn.copy()
    drawn.clear()
    (tmp_path / "full_of_constants.py").write_text(f"NUMBERS = {[*range(1000, 2400, 7)]}\nTEXTS = 'abc', 'xy'\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("full_of_constants")
    draw()
    assert drawn == before
