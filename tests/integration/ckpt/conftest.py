"""Checkpoints of a job on hosts, and the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.stores.checkpoint_site import CheckpointSite


@pytest.fixture
def site(tmp_path: Path) -> CheckpointSite:
    """Two hosts with one rank each, nothing saved yet."""
    return CheckpointSite(tmp_path)
