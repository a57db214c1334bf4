"""Reads of what a worker may have put on a file system that hangs."""

from __future__ import annotations

import asyncio
import threading

import pytest

from host_daemon.kernel.worker_reads import NotReadable, WorkerReads

LONG_S = 60.0


def test_what_is_read_comes_back_and_what_it_raises_too() -> None:
    def fails() -> int:
        raise TimeoutError(110, "of the file system")

    async def scenario() -> None:
        reads = WorkerReads()
        assert await reads.read("a", lambda: 7, timeout_s=LONG_S) == 7
        with pytest.raises(TimeoutError, match="of the file system"):
            await reads.read("a", fails, timeout_s=LONG_S)
        assert not reads._reading

    asyncio.run(scenario())


def test_reads_that_hang_keep_one_thread_each_and_few_in_all() -> None:
    free, began = threading.Event(), list[str]()

    def hangs(name: str) -> None:
        began.append(name)
        free.wait(LONG_S)

    async def scenario() -> None:
        reads = WorkerReads(2)
        for _ in range(3):  # of one worker
            with pytest.raises(NotReadable):
                await reads.read("a", lambda: hangs("a"), timeout_s=0.05)
        assert began == ["a"]
        assert await reads.read("b", lambda: 7, timeout_s=LONG_S) == 7  # another's
        with pytest.raises(NotReadable):
            await reads.read("b", lambda: hangs("b"), timeout_s=0.05)
        with pytest.raises(NotReadable):
            await reads.read("c", lambda: hangs("c"), timeout_s=0.05)
        assert began == ["a", "b"]
        assert await asyncio.to_thread(lambda: 7) == 7  # the loop's own threads are free
        waiting = [asyncio.create_task(reads.read("c", lambda: 8, timeout_s=LONG_S)) for _ in range(5)]
        await asyncio.sleep(0)
        free.set()
        assert await asyncio.gather(*waiting) == [8] * 5
        waiting[0].cancel()

    asyncio.run(scenario())


def test_a_read_that_hangs_does_not_hold_up_the_end_of_the_loop() -> None:
    free = threading.Event()

    async def scenario() -> None:
        with pytest.raises(NotReadable):
            await WorkerReads().read("a", lambda: free.wait(LONG_S), timeout_s=0.01)

    asyncio.run(scenario())
    assert not free.is_set()
    free.set()


def test_without_a_thread_it_is_not_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def scenario() -> None:
        reads = WorkerReads()
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(NotReadable, match="thread"):
            await reads.read("a", lambda: 7, timeout_s=LONG_S)
        monkeypatch.undo()
        assert await reads.read("a", lambda: 7, timeout_s=LONG_S) == 7

    asyncio.run(scenario())
