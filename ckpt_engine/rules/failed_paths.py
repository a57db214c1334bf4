"""To which peers RDMA is not tried for a while, because it kept failing. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from flyball.backoff import pause_s

IN_A_ROW = 3  # one failure may be a transfer that the peer gave up
FIRST_PAUSE_S = 60.0  # a way that carries no RDMA costs every attempt a few seconds to find that out
LONGEST_PAUSE_S = 1800.0
_MOST_PEERS = 4096


@dataclass(slots=True)
class _Path:
    incarnation: str  # of the peer
    failures: int = 0  # since a shard arrived
    failed_s: float = float("-inf")  # the last time
    until_s: float = float("-inf")  # not tried until then
    reason: str = ""


class FailedPaths:
    """Counts by peer. After `IN_A_ROW` failures without a shard that arrived in between, RDMA is not tried for a while,
    and for longer after each further one. A restarted peer begins anew."""

    def __init__(self) -> None:
        self._paths: dict[str, _Path] = {}  # the newest last

    def met(self, peer: str, incarnation: str) -> None:
        """A connection with this incarnation of the peer was made."""
        known = self._paths.pop(peer, None)
        self._paths[peer] = known if known is not None and known.incarnation == incarnation else _Path(incarnation)
        while len(self._paths) > _MOST_PEERS:
            del self._paths[next(iter(self._paths))]

    def failed(
        self, peer: str, incarnation: str, reason: str, *, made_s: float, now_s: float, nothing_passes: bool = False
    ) -> bool:
        """A queue pair with the peer that was made at `made_s` broke. `nothing_passes`: not even a first message, so
        that one failure is enough. Returns whether RDMA is not tried any more from now on."""
        path = self._paths.get(peer)
        if path is None or path.incarnation != incarnation:
            return False  # of a peer that is another process by now
        if made_s <= path.failed_s:
            return False  # it broke together with others, which count as one
        path.failed_s = now_s
        path.failures = max(path.failures + 1, IN_A_ROW if nothing_passes else 0)
        if path.failures < IN_A_ROW:
            return False
        path.reason = reason if nothing_passes else f"RDMA failed {path.failures} times in a row: {reason}"
        pauses = path.failures - IN_A_ROW + 1
        path.until_s = now_s + pause_s(pauses, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
        return True

    def carried(self, peer: str, incarnation: str) -> None:
        """A shard arrived over RDMA."""
        path = self._paths.get(peer)
        if path is not None and path.incarnation == incarnation:
            path.failures, path.until_s = 0, float("-inf")

    def pause_left_s(self, peer: str, now_s: float) -> float:
        """How long RDMA is not tried with the peer; 0 if it is."""
        path = self._paths.get(peer)
        return max(0.0, path.until_s - now_s) if path is not None else 0.0

    def reason(self, peer: str) -> str:
        """Why it is not tried."""
        path = self._paths.get(peer)
        return path.reason if path is not None else ""
