"""Every test here needs the frameworks themselves: `make test-integrations`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands.framework_runs import Place
from support.commands.run_folders import run_folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.frameworks)


@pytest.fixture
def place() -> Iterator[Place]:
    """Afterwards no process of it is left."""
    with run_folder() as folder:
        yield Place(folder)
