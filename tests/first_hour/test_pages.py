"""The tutorials and how-tos of the documentation, followed from their first line to their last."""

from __future__ import annotations

from pathlib import Path

import pytest
from first_hour.page_runner import fences_of, follow
from support.commands.users_machine import ROOT, User
from support.servers.own_servers import free_port

PAGES = sorted([*(ROOT / "docs" / "tutorial").glob("*.md"), *(ROOT / "docs" / "how-to").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_everything_that_the_page_says_happens(page: Path, user: User) -> None:
    if not any(fence.language == "console" for fence in fences_of(page)):
        pytest.skip("the page has no commands to type")
    follow(page, user, variables={"7370": str(free_port())})
