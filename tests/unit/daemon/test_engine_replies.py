"""What a daemon makes of its engine's replies, whatever is in them."""

from __future__ import annotations

import asyncio
import json
import struct
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.clocks.waits import until

from flyball.contracts import wire
from flyball.contracts.checkpoints import SaveInterval, ShardCopy, Tier
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import InvalidMessage
from flyball.contracts.on_host.engine_wire import EngineReply, GetStatus, SaveFailure
from host_daemon.engine import engine_process
from host_daemon.engine.engine_client import EngineClient, read_reply
from host_daemon.engine.engine_process import EngineKeeper

COPY = ShardCopy("job", 1, 7, 0, Tier.MEMORY, "host", 8, "d")
FAILURE = SaveFailure("other", 1, 0, 7, "no room", 1.0)
WHOLE = EngineReply(ok=True, pid=4711, copies=(COPY,), failures=(FAILURE,), positions={"0": 7}, counters={"commits": 1})


def odd(**changes: object) -> bytes:
    """`WHOLE`, with other values of fields."""
    return json.dumps(json.loads(wire.encode(WHOLE)) | changes).encode()


def test_a_reply_that_can_be_read_is_read() -> None:
    assert read_reply(wire.encode(WHOLE)) == (WHOLE, "")


def test_what_cannot_be_of_a_reply_hides_nothing_else() -> None:
    def other(value: object, **changes: object) -> object:
        return json.loads(wire.encode(value)) | changes

    data = odd(
        copies=[other(COPY, generation=2**31), other(COPY), "no copy"],
        failures=[other(FAILURE, step=2**60), other(FAILURE)],
        positions={"0": 7, "1": 2**63},
        intervals=[other(SaveInterval("job", 1, 1, 1, 0.0, 0.0), every_steps=2**60)],
        testimonies=[{"peer": f"host-{i}", "engine_s": 0.0, "daemon_s": None} for i in range(17)],
        late=7,
        address=None,
    )
    reply, said = read_reply(data)
    assert reply == WHOLE
    assert "EngineReply" in said


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", odd(ok="yes"), b"\xff", b"[" * 100_000])
def test_what_is_no_reply_is_named(data: bytes) -> None:
    with pytest.raises(InvalidMessage):
        read_reply(data)


@asynccontextmanager
async def answering(path: Path, answers: list[bytes]) -> AsyncIterator[None]:
    """An engine's socket, on which each request gets the newest answer."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (size_bytes,) = struct.unpack("<I", await reader.readexactly(4))
        await reader.readexactly(size_bytes)
        writer.write(struct.pack("<I", len(answers[-1])) + answers[-1])
        await writer.drain()
        writer.close()

    async with await asyncio.start_unix_server(answer, str(path)):
        yield


@pytest.mark.processes
@pytest.mark.parametrize("answer", [b"no reply", wire.encode(EngineReply(ok=False, code="error", message="crashed"))])
def test_an_engine_that_answers_what_cannot_be_read_is_not_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr(engine_process, "HANG_TIMEOUT_S", 0.05)
    monkeypatch.setattr(engine_process, "POLL_S", 0.01)
    process = subprocess.Popen(["sleep", "600"])  # stands in for the engine
    troubles: list[str] = []

    async def ignore(_: object) -> None:
        """Discards it."""

    async def note(trouble: str) -> None:
        troubles.append(trouble)

    async def scenario() -> None:
        parts: Any = None
        client, clock = EngineClient(tmp_path / "engine.sock"), SystemClock()
        answers = [answer]
        async with answering(tmp_path / "engine.sock", answers):
            keeper = EngineKeeper(parts, parts, client, clock, on_restart=ignore, on_status=ignore, on_trouble=note)
            keeper._pid = process.pid
            monkeypatch.setattr(keeper, "_is_engine", lambda pid: True)
            watching, began_s = asyncio.create_task(keeper._watch()), clock.monotonic_s()
            await asyncio.to_thread(until, lambda: bool(troubles) and clock.monotonic_s() - began_s > 0.5)
            assert not watching.done() and process.poll() is None and not keeper.alive
            answers.append(odd(copies=[{}]))
            await asyncio.to_thread(until, keeper._alive.is_set)
            assert keeper.status.copies == () and keeper.status.failures == (FAILURE,)
            answers.append(wire.encode(WHOLE))
            await asyncio.to_thread(until, lambda: keeper.status == WHOLE)
            process.kill()
            await asyncio.wait_for(watching, 60.0)

    try:
        asyncio.run(scenario())
    finally:
        process.kill()
        process.wait()
    assert [bool(trouble) for trouble in troubles] == [True, False]


def test_a_request_gets_what_can_be_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        client = EngineClient(tmp_path / "engine.sock")
        async with answering(tmp_path / "engine.sock", [odd(copies=[{}])]):
            assert (await client.ask(GetStatus())).failures == (FAILURE,)
            assert client.unreadable

    asyncio.run(scenario())
