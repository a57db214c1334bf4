"""A browser for each test, where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers.browser import Browser


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()
