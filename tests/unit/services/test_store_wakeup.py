"""Wake-ups reach all waiting threads and coroutines, and are never lost between two waits."""

from __future__ import annotations

import asyncio
import threading

import pytest

from services.runtime.wakeup import AsyncWakeup, LocalWakeup

DEADLINE_S = 60.0


def test_a_notification_before_the_wait_is_not_lost() -> None:
    wakeup = LocalWakeup()
    wakeup.notify("signals")
    assert wakeup.wait("signals", DEADLINE_S)
    assert not wakeup.wait("signals", 0.0)
    assert not wakeup.wait("actions", 0.0)


def test_every_waiting_thread_is_woken() -> None:
    wakeup = LocalWakeup()
    ready = threading.Barrier(4)
    woken: list[bool] = []

    def wait() -> None:
        ready.wait(DEADLINE_S)
        woken.append(wakeup.wait("commands", DEADLINE_S))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    ready.wait(DEADLINE_S)
    wakeup.notify("commands")
    for thread in threads:
        thread.join(DEADLINE_S)
    assert woken == [True] * 3


def test_a_listener_is_called_until_it_leaves() -> None:
    wakeup = LocalWakeup()
    received: list[str] = []
    leave = wakeup.subscribe("commands", lambda hosts: received.append("+".join(hosts) or "any"))
    wakeup.notify("commands")
    wakeup.notify("signals")
    wakeup.notify("commands", ["host-a", "host-b"])
    leave()
    leave()
    wakeup.notify("commands")
    assert received == ["any", "host-a+host-b"]


def test_coroutines_are_woken_from_threads() -> None:
    async def scenario() -> None:
        wakeup = LocalWakeup()
        commands = AsyncWakeup(wakeup, "commands")
        seen = commands.count
        waiters = [asyncio.create_task(commands.wait(seen, DEADLINE_S)) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.to_thread(wakeup.notify, "commands")
        assert await asyncio.gather(*waiters) == [seen + 1] * 3
        assert await commands.wait(seen, DEADLINE_S) == seen + 1  # notified since: returns at once
        assert await commands.wait(seen + 1, 0.0) == seen + 1  # nothing new: times out
        commands.close()
        wakeup.notify("commands")
        await asyncio.sleep(0)
        assert commands.count == seen + 1

    asyncio.run(scenario())


@pytest.mark.parametrize("later", range(6))
def test_a_wait_that_is_cancelled_while_it_is_woken_ends(later: int) -> None:
    """Whatever comes first: a loop around it must not go on. (`asyncio.wait_for` of Python 3.11 returns instead.)"""

    async def scenario() -> None:
        wakeup = LocalWakeup()
        commands = AsyncWakeup(wakeup, "commands")
        waiter = asyncio.create_task(commands.wait(commands.count, DEADLINE_S))
        await asyncio.sleep(0)
        wakeup.notify("commands")
        for _ in range(later):
            await asyncio.sleep(0)
        is_cancelled = waiter.cancel()
        await asyncio.wait([waiter])
        assert waiter.cancelled() is is_cancelled

    asyncio.run(scenario())


def test_a_notification_after_the_end_of_the_event_loop_is_harmless() -> None:
    wakeup = LocalWakeup()

    async def listen() -> None:
        AsyncWakeup(wakeup, "commands")

    asyncio.run(listen())
    wakeup.notify("commands")


def test_a_notification_after_the_event_loop_closed_reaches_nobody_and_harms_nobody() -> None:
    wakeup = LocalWakeup()

    async def listen() -> None:
        AsyncWakeup(wakeup, "events")

    asyncio.run(listen())
    wakeup.notify("events")
