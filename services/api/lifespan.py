"""Runs as long as the server's event loop: a wake-up for new events, and background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import cast

import structlog
from fastapi import FastAPI, Request

from flyball.contracts.clock import Clock
from services.runtime.loops import RESTART_PAUSE_S, CrashBudget
from services.runtime.wakeup import AsyncWakeup, Subscribable

log = structlog.get_logger()

Background = Callable[[AsyncWakeup], Awaitable[None]]  # takes the wake-up for new events


def new_events(request: Request) -> AsyncWakeup:
    """Return the wake-up for new events, notified by this process and by others."""
    return cast("AsyncWakeup", request.app.state.new_events)


@asynccontextmanager
async def running(
    app: FastAPI,
    wakeup: Subscribable,
    background: Mapping[str, Background],
    clock: Clock,
    on_given_up: Callable[[str], None],
) -> AsyncIterator[None]:
    """The application's lifespan. `on_given_up` receives the name of a task that keeps crashing."""
    app.state.new_events = events = AsyncWakeup(wakeup, "events")
    tasks = [
        asyncio.create_task(_kept_running(name, body, events, clock, on_given_up), name=name)
        for name, body in background.items()
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        events.close()


async def _kept_running(
    name: str, body: Background, events: AsyncWakeup, clock: Clock, on_given_up: Callable[[str], None]
) -> None:
    """Restart a crashed task a bounded number of times; nobody else would notice the crash."""
    budget = CrashBudget(clock)
    while True:
        try:
            await body(events)
            return
        except Exception:  # the task's outermost frame: logged, and bounded by the budget
            log.exception("a background task crashed", task=name)
        if not budget.allows_another():
            log.error("a background task keeps crashing and is given up", task=name)
            on_given_up(name)
            return
        await asyncio.sleep(RESTART_PAUSE_S)
