"""Stacks for each module of these tests, and the uninterrupted runs that their jobs are compared with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from support.jobs.recovered import Reference
from support.servers.stack import Stack


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    own = tmp_path_factory.getbasetemp()
    root = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "reference"
    root.mkdir(exist_ok=True)
    reference = Reference(root)
    yield reference
    reference.end()


@pytest.fixture(scope="module")
def make_stack() -> Iterator[Callable[..., Stack]]:
    made: list[Stack] = []

    def make(**settings: str) -> Stack:
        made.append(Stack(**settings))
        return made[-1]

    yield make
    for stack in made:
        stack.end()
