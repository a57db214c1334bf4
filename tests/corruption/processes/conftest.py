"""Two hosts with engines and trainers as processes: for all tests of a module, or with small disks for one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.hosts.forked_site import ForkedSite, made_site


@pytest.fixture(scope="module")
def site() -> Iterator[ForkedSite]:
    with made_site() as made:
        yield made


@pytest.fixture
def site_with_small_disks() -> Iterator[ForkedSite]:
    with made_site({"disk": "4m", "store": "4m"}) as made:
        yield made
