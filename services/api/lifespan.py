"""What lives as long as the event loop that serves the requests: a bell to wait on, and background coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import cast

import msgspec
import structlog
from fastapi import FastAPI, Request

from flyball.contracts.clock import Clock
from services.runtime.lifecycle import RESTART_PAUSE_S, CrashBudget
from services.runtime.notify import AsyncWakeup, Subscribable

log = structlog.get_logger()


class Wakeups(msgspec.Struct, frozen=True):
    """Rung by the threads of this process, and by other processes, when there is something new."""

    events: AsyncWakeup


Background = Callable[[Wakeups], Awaitable[None]]


def bells_of(request: Request) -> Wakeups:
    return cast("Wakeups", request.app.state.bells)


@asynccontextmanager
async def running(
    app: FastAPI,
    wakeup: Subscribable,
    background: Mapping[str, Background],
    clock: Clock,
    on_given_up: Callable[[str], None],
) -> AsyncIterator[None]:
    """The application's lifespan. `on_given_up` is told the name of a task that keeps crashing."""
    bells = Wakeups(events=AsyncWakeup(wakeup, "events"))
    app.state.bells = bells
    tasks = [
        asyncio.create_task(_kept_running(name, body, bells, clock, on_given_up), name=name)
        for name, body in background.items()
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        bells.events.close()


async def _kept_running(
    name: str, body: Background, bells: Wakeups, clock: Clock, on_given_up: Callable[[str], None]
) -> None:
    """A coroutine that crashes is started anew a bounded number of times: nothing but it would notice."""
    budget = CrashBudget(clock)
    while True:
        try:
            await body(bells)
            return
        except Exception:  # the task's outermost frame: logged, and bounded by the budget
            log.exception("a background task crashed", task=name)
        if not budget.allows_another():
            log.error("a background task keeps crashing and is given up", task=name)
            on_given_up(name)
            return
        await asyncio.sleep(RESTART_PAUSE_S)
