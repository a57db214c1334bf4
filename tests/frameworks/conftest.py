"""Every test here needs the frameworks themselves: `make test-integrations`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
pytest.register_assert_rewrite("framework_runs")

from framework_runs import Place  # noqa: E402 - found by the path above
from support.commands.own_processes import processes_of  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.frameworks)


@pytest.fixture
def place() -> Iterator[Place]:
    """Afterwards no process of it is left."""
    with tempfile.TemporaryDirectory(prefix="fb-") as name:  # short: it contains sockets
        yield Place(Path(name))
        left = processes_of(Path(name))
        for process in left:
            process.kill()
        assert left == []
