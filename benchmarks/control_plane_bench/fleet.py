"""The simulated hosts of the load generator: reports encoded once as bytes, with slots for the changing values.

A report covers eight ranks that train at a step per second: sent each second, it has one step of every rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from flyball.contracts.checkpoints import ShardCopy, Tier
from flyball.contracts.cluster import HostFacts, HostRanks, Phase, RankStatus
from flyball.contracts.credentials import host_credential
from flyball.contracts.reports.rank_columns import RankSteps, in_columns, steps_together
from flyball.contracts.reports.signals import EngineStatus, Report
from flyball.contracts.wire import WIRE_VERSION, encode

RANKS_PER_HOST = 8
INTERVAL_S = 1.0
STEP_S = 1.0

# Values that occur nowhere else in a report; each marks a slot.
_SENT_AT, _SEQ, _STEP, _DONE_AT = 7_770_000_001.5, 777_000_002, 777_000_003, 7_770_000_004.5
_SLOTS = {encode(value): number for number, value in enumerate((_SENT_AT, _SEQ, _STEP, _DONE_AT))}
_SLOT = re.compile(b"(" + b"|".join(map(re.escape, _SLOTS)) + b")")


class Template:
    """An encoded report with slots to fill in."""

    __slots__ = ("parts", "slots")

    def __init__(self, encoded: bytes) -> None:
        self.parts = _SLOT.split(encoded)
        self.slots = [_SLOTS[name] for name in self.parts[1::2]]

    def fill(self, values: Sequence[bytes]) -> bytes:
        """Return the report with `values`: sent_at, seq, step, done_at."""
        self.parts[1::2] = [values[slot] for slot in self.slots]
        return b"".join(self.parts)


class FakeHost:
    """One host of the fleet: its request head and its three kinds of body."""

    __slots__ = ("free", "head", "host_id", "idle", "seq", "stepping")

    def __init__(self, host_id: str, head: bytes, free: Template, stepping: Template, idle: Template) -> None:
        self.host_id = host_id
        self.head = head
        self.free = free  # without ranks
        self.stepping = stepping  # every rank has completed a step since the last report
        self.idle = idle
        self.seq = 0

    def request(self, now: float, step: int, *, has_ranks: bool, has_stepped: bool) -> bytes:
        """Return the next report as an HTTP request."""
        self.seq += 1
        template = self.free if not has_ranks else self.stepping if has_stepped else self.idle
        body = template.fill((b"%.6f" % now, b"%d" % self.seq, b"%d" % step, b"%.6f" % (now - 0.25)))
        return b"%b%d\r\n\r\n%b" % (self.head, len(body), body)


def host_ids(count: int) -> list[str]:
    return [f"node-{number:05d}.rack-{number // 32:03d}" for number in range(count)]


def placed(hosts: Sequence[str]) -> tuple[HostRanks, ...]:
    """Place ranks on these hosts, in order."""
    return tuple(
        HostRanks(host_id, "10.0.0.1", "10.0.0.1:7000", tuple(range(n * RANKS_PER_HOST, (n + 1) * RANKS_PER_HOST)))
        for n, host_id in enumerate(hosts)
    )


def make_host(host_id: str, first_rank: int, job: str, generation: int, secret: str, *, tag: str) -> FakeHost:
    """Make a host that runs the ranks from `first_rank` on. `tag` distinguishes its incarnation."""
    ranks = range(first_rank, first_rank + RANKS_PER_HOST)
    workers, progress = in_columns(
        RankStatus(job, generation, rank, 10_000 + rank, Phase.STEP, _STEP, 0.25) for rank in ranks
    )
    report = Report(
        version=WIRE_VERSION,
        incarnation=f"{host_id}-{tag}",
        sent_at=_SENT_AT,
        interval_s=INTERVAL_S,
        facts=HostFacts(host_id, "10.0.0.1", host_id.partition(".")[2], "10.0.0.1:7000", 29_500, "0.1.0", 4_242),
        engine=EngineStatus(alive=True, counters={"peer_bytes_sent": 1 << 40, "disk_bytes_written": 1 << 40}),
        workers=workers,
        progress=progress,
        copies=tuple(ShardCopy(job, generation, 10, rank, Tier.MEMORY, host_id, 1 << 34, "0" * 32) for rank in ranks),
        seq=_SEQ,
    )
    steps = (RankSteps(job, generation, rank, _STEP, (_DONE_AT,)) for rank in ranks)
    stepping = msgspec.structs.replace(report, completed=steps_together(steps))
    free = msgspec.structs.replace(report, workers=(), progress=(), copies=())
    return FakeHost(
        host_id,
        request_head(host_credential(secret, host_id).token),
        Template(encode(free)),
        Template(encode(stepping)),
        Template(encode(report)),
    )


def request_head(token: str) -> bytes:
    """Return the head as the daemons' HTTP client writes it, up to the number after Content-Length."""
    return (
        "POST /v1/reports HTTP/1.1\r\nHost: 127.0.0.1:7370\r\nAccept: */*\r\nAccept-Encoding: gzip, deflate\r\n"
        "Connection: keep-alive\r\nUser-Agent: python-httpx/0.28.1\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {token}\r\nContent-Length: "
    ).encode()
