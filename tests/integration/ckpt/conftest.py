"""Checkpoints of a job on hosts, and the command line beside them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # tests are no packages: the module beside this one is found by path
pytest.register_assert_rewrite("ckpt_sites")

from ckpt_sites import Site  # noqa: E402 - found by the path above


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Two hosts of one rank each, with nothing saved yet."""
    return Site(tmp_path)
