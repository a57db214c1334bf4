"""Checkpoints of a job on hosts, and the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # tests are not packages: the module is found by path
pytest.register_assert_rewrite("ckpt_sites")

from ckpt_sites import Site  # noqa: E402 - found by the path above


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Two hosts with one rank each, nothing saved yet."""
    return Site(tmp_path)
