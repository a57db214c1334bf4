"""The ranks of one replay meet in the store of their process group: they say whether they saw a difference, and pass on
what another rank is to compute. No collective is used, so a rank that does not come cannot hang the others: each wait
has a deadline."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Protocol

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.0005, 0.05  # between looks: a wait inside the store would block its other users
MAX_PART_BYTES = 4 << 20  # of a value; torch's store takes 8 MiB
MAX_CASES = 8  # differing ranks of one replay that are looked into


class Store(Protocol):
    """A store of torch.distributed."""

    def set(self, key: str, value: str | bytes, /) -> object: ...

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...

    def delete_key(self, key: str, /) -> bool: ...


def case_of(rank: int) -> str:
    """The name of what a differing rank puts for its peer."""
    return f"case/{rank}"


def judgement_of(rank: int) -> str:
    """The name of what its peer answers."""
    return f"judgement/{rank}"


class Meeting:
    """One replay, as one rank sees it. All ranks give the same `number`. Raises what the store raises."""

    def __init__(self, store: Store, *, number: int, ranks: int, timeout_s: float) -> None:
        self._store = store
        self._prefix = f"flyball/replay/{number}/"
        self._ranks = ranks
        self._timeout_s = timeout_s

    def find_differing(self, rank: int, *, differs: bool) -> tuple[int, tuple[int, ...]] | None:
        """Wait until all ranks have said whether they saw a difference. Returns how many did, and the first MAX_CASES
        of them; None at the deadline."""
        if differs:
            place = self._store.add(self._key("differing"), 1)
            if place <= MAX_CASES:
                self._set(f"differing/{place}", str(rank).encode())
        if self._store.add(self._key("here"), 1) == self._ranks:
            self._store.set(self._key("all"), str(self._store.add(self._key("differing"), 0)))
        if not self._wait("all"):
            return None
        count = int(self._store.get(self._key("all")))
        places = range(1, min(count, MAX_CASES) + 1)
        return count, tuple(sorted(int(self._store.get(self._key(f"differing/{place}"))) for place in places))

    def put(self, name: str, data: bytes) -> None:
        """Pass something on, in parts."""
        parts = range(0, max(len(data), 1), MAX_PART_BYTES)
        for part, start in enumerate(parts):
            self._set(f"{name}/{part}", data[start : start + MAX_PART_BYTES])
        self._set(name, str(len(parts)).encode())

    def take(self, name: str) -> bytes | None:
        """Wait for what another rank puts; None at the deadline."""
        if not self._wait(name):
            return None
        parts = int(self._store.get(self._key(name)))
        return b"".join(self._store.get(self._key(f"{name}/{part}")) for part in range(parts))

    def leave(self) -> None:
        """The last to leave removes what all have put. Nobody removes anything earlier, since another rank may be
        reading it: that would wait for a removed part as long as the store does. Each rank that came leaves, at a
        deadline too. So if one never comes, only what the others said stays, some hundred bytes: nothing is put before
        all have come."""
        if self._store.add(self._key("left"), 1) < self._ranks:
            return
        count = int(self._store.add(self._key("differing"), 0))
        for place in range(1, min(count, MAX_CASES) + 1):
            rank = int(self._store.get(self._key(f"differing/{place}")))
            self._remove(case_of(rank))
            self._remove(judgement_of(rank))
            self._store.delete_key(self._key(f"differing/{place}"))
        for name in ("all", "here", "differing", "left"):
            self._store.delete_key(self._key(name))

    def _remove(self, name: str) -> None:
        """Remove what a rank put under this name, if it did."""
        if not self._store.check([self._key(name)]):
            return
        parts = int(self._store.get(self._key(name)))
        for key in (name, *(f"{name}/{part}" for part in range(parts))):
            self._store.delete_key(self._key(key))

    def _set(self, name: str, data: bytes) -> None:
        self._store.set(self._key(name), data)

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _wait(self, name: str) -> bool:
        deadline_s, pause_s = time.monotonic() + self._timeout_s, FIRST_PAUSE_S
        while not self._store.check([self._key(name)]):
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return True


def choose_peers(differing: Collection[int], *, ranks: int, ranks_per_host: int) -> dict[int, int]:
    """For each differing rank another one that saw no difference, to compute the same; on another host if there is one.
    Those that are none's peer yet come first. Empty if all differ."""
    others = [rank for rank in range(ranks) if rank not in differing]
    chosen: dict[int, int] = {}
    for rank in sorted(differing) if others else ():

        def preference(other: int, rank: int = rank) -> tuple[bool, int, int]:
            is_beside = other // ranks_per_host == rank // ranks_per_host
            return is_beside, list(chosen.values()).count(other), (other - rank) % ranks

        chosen[rank] = min(others, key=preference)
    return chosen
