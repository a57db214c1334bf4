"""Tests of a user's first hour, with a marker and a simulated user's machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands.users_machine import Installation, User, install_once, new_home


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.first_hour)


@pytest.fixture(scope="session")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The user's environment with the wheel in it, made once for all test processes."""
    root = tmp_path_factory.getbasetemp()
    return install_once(root.parent if root.name.startswith("popen-") else root)


@pytest.fixture
def user(installation: Installation) -> Iterator[User]:
    """A user with an own home folder. Nothing may be left running, and no shared memory."""
    with new_home() as home:
        somebody = User(installation, home)
        try:
            yield somebody
        finally:
            left = somebody.end_all()
        assert left == []
        assert somebody.shared_memory() == []
