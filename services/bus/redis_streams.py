"""The signal stream in Redis, for sensors and controllers on several machines.

All state is in one key. An entry's id is `<incarnation>-<position>`, and the stream remembers the last id that it gave
out, even while it is empty. If the key is lost, all of it is lost, and the stream starts again under a greater
incarnation: ids only grow, so no cursor hides later entries.

An incarnation is its start time by Redis' clock, plus digits from the server's run id. After a restart or a failover
the stream may have lost its newest entries, and would give out their positions a second time. The next publication
sees another run id, and starts a new incarnation after the remaining entries.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import structlog

from flyball.contracts.errors import InvalidMessage, TooBusy, Unreachable
from flyball.contracts.reports.signals import Signal
from flyball.contracts.wire import encode
from services.bus.redis_client import RedisServer
from services.rules.stream import Cursor, Delivered
from services.rules.unreadable import read_signal

MAX_LENGTH = 20_000
RETRY_AFTER_S = 1.0
MAX_LATER_ENTRIES = 1_000  # of other publishers, when searching for entries that may have been stored

_INCARNATION = re.compile(r"\d{19}")  # milliseconds since the epoch (13 digits), and 6 of the server's run id
_FIELD = b"signal"
_Page = list[tuple[bytes, list[bytes]]]
_log = structlog.get_logger(__name__)

# Incarnation, position and length of the stream; '', 0 and 0 without a stream. Incarnations have a fixed length and are
# compared as text, because Lua's numbers have 53 bits.
_LUA_LAST = """
local function last_of(key)
  if redis.call('EXISTS', key) == 0 then return '', 0, 0 end
  local about, found = redis.call('XINFO', 'STREAM', key), {}
  for i = 1, #about, 2 do found[about[i]] = about[i + 1] end
  local incarnation, position = string.match(found['last-generated-id'], '^(%d+)%-(%d+)$')
  return incarnation, tonumber(position), found['length']
end
"""

_LUA_PUBLISH = (
    _LUA_LAST
    + """
local incarnation, position, length = last_of(KEYS[1])
local bound = tonumber(ARGV[1])
if length + #ARGV - 1 > bound then return {0, length} end
local run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
local tag = string.format('%06d', tonumber(string.sub(run_id, 1, 8), 16) % 1000000)
if #incarnation ~= 19 or string.sub(incarnation, 14) ~= tag then
  local now = redis.call('TIME')
  local began = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
  if #incarnation == 19 then began = math.max(began, tonumber(string.sub(incarnation, 1, 13)) + 1) end
  -- A stream that starts twice in one millisecond, as after a DEL, continues at a greater position.
  incarnation, position = string.format('%013.0f', began) .. tag, tonumber(now[2]) % 1000 * 1e9
end
for i = 2, #ARGV do
  position = position + 1
  redis.call('XADD', KEYS[1], incarnation .. '-' .. string.format('%.0f', position), 'signal', ARGV[i])
end
return {1, length + #ARGV - 1}
"""
)

# Reads from after the cursor. From the beginning if the cursor belongs to another stream or is ahead of this one, as
# after an older Redis came back.
_LUA_READ = (
    _LUA_LAST
    + """
local incarnation, position = last_of(KEYS[1])
local from, at = ARGV[1], tonumber(ARGV[2])
if incarnation == '' then return {} end
local first = ARGV[4]
if from ~= '' and #incarnation == 19 and (from < incarnation or (from == incarnation and at <= position)) then
  first = from .. '-' .. string.format('%.0f', at + 1)
end
return redis.call('XRANGE', KEYS[1], first, '+', 'COUNT', ARGV[3])
"""
)

_LUA_TRIM = (
    _LUA_LAST
    + """
local incarnation, position = last_of(KEYS[1])
local from, at = ARGV[1], tonumber(ARGV[2])
if from < incarnation or (from == incarnation and at <= position) then
  return redis.call('XTRIM', KEYS[1], 'MINID', '=', from .. '-' .. string.format('%.0f', at + 1))
end
return 0
"""
)

# Whether all documents, ARGV[2] and following, are among the newest ARGV[1] entries. Runs in Redis: transferring the
# entries would take too long.
_LUA_ARE_THERE = """
local there = {}
for _, entry in ipairs(redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', ARGV[1])) do
  for place = 2, #entry[2], 2 do there[entry[2][place]] = true end
end
for number = 2, #ARGV do
  if not there[ARGV[number]] then return 0 end
end
return 1
"""


class RedisBus:
    """A `SignalBus`. Thread-safe. May lose signals: hosts send them again until the database has them."""

    def __init__(self, server: RedisServer, *, prefix: str, max_length: int = MAX_LENGTH) -> None:
        self._server = server
        self._key = f"{prefix}:signals"
        self._max_length = max_length
        self._is_unsure = False  # whether it is unknown if the last publication was stored
        self._publish = server.client.register_script(_LUA_PUBLISH)
        self._read = server.client.register_script(_LUA_READ)
        self._search = server.client.register_script(_LUA_ARE_THERE)
        self._trim = server.client.register_script(_LUA_TRIM)

    def publish(self, signals: Sequence[Signal]) -> None:
        """Append all signals or none. Raises TooBusy if the stream would exceed its bound.

        After a lost reply, the next call first searches for the signals: a slow Redis stores every attempt in the end,
        and would fill up with copies of one signal.
        """
        if not signals:
            return
        documents = [encode(signal) for signal in signals]
        if self._is_unsure and self._are_there(documents):
            return
        try:
            with self._server.translated():
                is_taken, length = self._publish(keys=[self._key], args=[self._max_length, *documents])
        except Unreachable:
            self._is_unsure = True
            raise
        if not is_taken:
            raise TooBusy(
                f"{length} of at most {self._max_length} signals wait for the controller.",
                retry_after_s=RETRY_AFTER_S,
                hint="check that a controller runs and reaches the database; nothing is lost meanwhile",
            )

    def _are_there(self, documents: Sequence[bytes]) -> bool:
        """Return whether these are among the newest entries. Raises Unreachable if Redis does not answer."""
        with self._server.translated():
            are_there = self._search(keys=[self._key], args=[len(documents) + MAX_LATER_ENTRIES, *documents])
        self._is_unsure = False
        return bool(are_there)

    def read(self, after: Cursor | None, *, limit: int) -> list[Delivered]:
        """Return up to `limit` signals after a cursor, oldest first."""
        stream, position = _ours(after)
        first = "-"
        while True:
            with self._server.translated():
                page = cast("_Page", self._read(keys=[self._key], args=[stream, position, limit, first]))
            delivered = [found for entry in page if (found := _delivered(*entry)) is not None]
            if delivered or not page:
                return delivered
            stream, first = "", f"({page[-1][0].decode()}"  # a page of unreadable entries is not the end

    def trim(self, upto: Cursor) -> None:
        """Remove the signals up to and including `upto`. Ignores a cursor of another stream."""
        stream, position = _ours(upto)
        if stream:
            with self._server.translated():
                self._trim(keys=[self._key], args=[stream, position])

    def length(self) -> int:
        """Return the number of signals in the stream."""
        with self._server.translated():
            return int(cast("Any", self._server.client.xlen(self._key)))


def _ours(cursor: Cursor | None) -> tuple[str, int]:
    if cursor is None or not _INCARNATION.fullmatch(cursor.stream):
        return "", 0
    return cursor.stream, cursor.position


def _cursor(entry_id: bytes) -> Cursor:
    stream, _, position = entry_id.decode().partition("-")
    return Cursor(stream, int(position))


def _delivered(entry_id: bytes, fields: Sequence[bytes]) -> Delivered | None:
    cursor = _cursor(entry_id)
    try:
        document = dict(zip(fields[::2], fields[1::2], strict=True)).get(_FIELD, b"")
        return Delivered(cursor, read_signal(document))
    except InvalidMessage as error:  # stopping here would block all later signals for ever; its sender still has it
        _log.error("entry_skipped", position=cursor.position, error=str(error))
        return None
