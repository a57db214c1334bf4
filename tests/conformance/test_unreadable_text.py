"""Text in the database that is no text: SQLite stores any bytes, and its driver raises for the whole query."""

from __future__ import annotations

import pytest
from support.servers.api_here import ApiHere
from support.servers.whole_replies import problems
from support.stores.poisoned import broken_text, decoded_columns, fill


@pytest.fixture
def full(stores):  # type: ignore[no-untyped-def]
    fill(stores)
    return stores


@pytest.mark.parametrize("table", decoded_columns())
def test_text_that_is_no_text_breaks_no_reply(full, tmp_path, table) -> None:  # type: ignore[no-untyped-def]
    api = ApiHere(full, tmp_path)
    for column in decoded_columns()[table]:
        with broken_text(full, table, column):
            assert problems(api, table) == {}, column
