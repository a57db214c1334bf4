"""A small job with its shard in every tier, to be damaged by tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stores.damaged_site import DamagedSite


@pytest.fixture
def site(tmp_path: Path) -> Iterator[DamagedSite]:
    made = DamagedSite(tmp_path)
    yield made
    made.close()
