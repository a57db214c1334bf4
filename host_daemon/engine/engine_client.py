"""A client of the checkpoint engine beside the daemon, over `flyball.contracts.on_host.engine_wire`."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from typing import Any

import msgspec

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


def read_reply(data: bytes) -> tuple[EngineReply, str]:
    """The reply, and what of it cannot be read, '' for nothing. Those parts are left out: a reply speaks for all jobs
    of the host, and one that is odd must not hide the others. Raises InvalidMessage if it is no reply at all. Pure."""
    try:
        return wire.decode(data, EngineReply, max_bytes=MAX_ENGINE_FRAME_BYTES), ""
    except InvalidMessage as error:
        said = error.message
        found: dict[str, Any] = wire.decode(data, dict[str, Any], max_bytes=MAX_ENGINE_FRAME_BYTES)
        kinds = {field.name: field.type for field in msgspec.structs.fields(EngineReply)}
        parts = {name: _readable(value, kinds[name]) for name, value in found.items() if name in kinds}
        try:
            return wire.convert({name: part for name, part in parts.items() if part is not None}, EngineReply), said
        except msgspec.ValidationError:
            raise error from None


def _readable(value: Any, kind: Any) -> Any:  # noqa: ANN401 - the value of any field
    """What of a field's value is of its type; None for nothing."""

    def fits(part: Any) -> bool:  # noqa: ANN401
        try:
            wire.convert(part, kind)
        except msgspec.ValidationError:
            return False
        return True

    if not fits(value) and isinstance(value, list):
        value = [item for item in value if fits([item])]
    elif not fits(value) and isinstance(value, dict):
        value = {key: item for key, item in value.items() if fits({key: item})}
    return value if fits(value) else None


class EngineClient:
    """Opens one short-lived connection per request, so that a long wait never blocks another request."""

    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path
        self.unreadable = ""  # what could not be read of the newest reply, '' for nothing

    async def ask(self, request: EngineRequest, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> EngineReply:
        """Send one request. Raises Unreachable if the engine is away or silent, EngineRefused if it refuses,
        InvalidMessage if it answers what is no reply."""
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._exchange(request)
        except TimeoutError:
            raise Unreachable(
                f"The checkpoint engine did not answer {type(request).__name__} within {timeout_s:.1f} s.",
                hint="see engine.log",
            ) from None
        except (OSError, asyncio.IncompleteReadError) as error:
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
            reply, self.unreadable = read_reply(await reader.readexactly(length))
            return reply
        finally:
            writer.close()
