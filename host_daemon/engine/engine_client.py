"""A client of the checkpoint engine beside the daemon, over `flyball.contracts.on_host.engine_wire`."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path

from flyball.contracts import wire
from flyball.contracts.errors import FlyballError, InvalidMessage, Unreachable
from flyball.contracts.on_host.engine_wire import MAX_ENGINE_FRAME_BYTES, EngineReply, EngineRequest

DEFAULT_TIMEOUT_S = 5.0
_HEADER = struct.Struct("<I")


class EngineRefused(FlyballError):
    """The engine refused a request; `code` is the engine's own."""

    def __init__(self, reply: EngineReply) -> None:
        super().__init__(reply.message or "The checkpoint engine refused.", hint="see engine.log")
        self.code = reply.code or "engine"
        self.reply = reply


class EngineClient:
    """Opens one short-lived connection per request, so that a long wait never blocks another request."""

    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path

    async def ask(self, request: EngineRequest, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> EngineReply:
        """Send one request. Raises Unreachable if the engine is away or silent, EngineRefused if it refuses."""
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._exchange(request)
        except TimeoutError:
            raise Unreachable(
                f"The checkpoint engine did not answer {type(request).__name__} within {timeout_s:.1f} s.",
                hint="see engine.log",
            ) from None
        except (OSError, asyncio.IncompleteReadError, InvalidMessage) as error:
            raise Unreachable(
                f"The checkpoint engine cannot be reached: {error}.", hint="the daemon restarts it; see engine.log"
            ) from error
        if not reply.ok:
            raise EngineRefused(reply)
        return reply

    async def _exchange(self, request: EngineRequest) -> EngineReply:
        reader, writer = await asyncio.open_unix_connection(str(self._path))
        try:
            body = wire.encode(request)
            writer.write(_HEADER.pack(len(body)) + body)
            await writer.drain()
            (length,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
            if length > MAX_ENGINE_FRAME_BYTES:
                raise InvalidMessage(f"The engine announces a reply of {length} bytes.", hint="run the same release")
            return wire.decode(await reader.readexactly(length), EngineReply, max_bytes=MAX_ENGINE_FRAME_BYTES)
        finally:
            writer.close()
