"""What the world outside does to a job: a stack for each module, and for each test a folder for its commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands.run_folders import run_folder
from support.servers.stack_fixtures import make_stack, reference

__all__ = ["make_stack", "reference"]


@pytest.fixture
def place() -> Iterator[Path]:
    with run_folder() as folder:
        yield folder
