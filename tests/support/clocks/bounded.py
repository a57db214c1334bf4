"""Scenarios of asyncio with an end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await scenario()

    asyncio.run(bounded())
