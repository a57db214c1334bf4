"""Invalid messages of engines, daemons and trainers are refused, and their receivers go on."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_engine.contracts.notices import Notice
from ckpt_engine.contracts.peer_wire import Challenge, Hello, PeerRequest, Reply, ShardList, Welcome
from flyball.contracts import wire
from flyball.contracts.errors import InvalidMessage
from flyball.contracts.on_host.engine_wire import EngineReply, EngineRequest

FIELDS = (b"type", b"job", b"verdict", b"nonce", b"ok", b"copies")
DEEP = b"[" * 30_000 + b"]" * 30_000
BAD = {
    "nothing": b"",
    "null": b"null",
    "half": b'{"type":"ping"',
    "no UTF-8": b"{" + b",".join(b'"%s":"\xff"' % name for name in FIELDS) + b"}",
    "no UTF-8 in a place for more": b'{"copies":[{"job":"\xff"}],"ok":true,"verdict":"ok","message":"\xff"}',
    "deep": DEEP,
    "deep in a field that is not known": b'{"type":"ping","ok":true,"verdict":"ok","later":' + DEEP + b"}",
    "too long": b'"' + b"x" * (64 << 10) + b'"',
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize(
    "kind", [PeerRequest, Reply, ShardList, Challenge, Hello, Welcome, EngineRequest, EngineReply, Notice], ids=str
)
def test_what_is_no_message_is_refused(kind: Any, name: str) -> None:  # noqa: ANN401 - a type or a union
    with pytest.raises(InvalidMessage):
        wire.decode(BAD[name], kind, max_bytes=64 << 10)
