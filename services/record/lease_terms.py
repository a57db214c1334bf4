"""Decides which controller may lead, and under which epoch, by the lease row and two clocks. Pure."""

from __future__ import annotations

import msgspec

MARGIN = 0.2  # of the time to live: the holder stops this much early, since clocks may run at different speeds


class Issuer(msgspec.Struct, frozen=True):
    """The epoch of new commands, and the database incarnation that began with it."""

    epoch: int
    incarnation: str


class Held(msgspec.Struct, frozen=True):
    """The lease row."""

    holder: str = ""
    epoch: int = 0
    expires_at: float = 0.0


class Renewals:
    """Watches by this process's own clock whether the holder of a lease renews it.

    The database's clock may be set back by an hour or a year: then the lease of a dead holder would not run out for as
    long. A live holder renews several times within the time to live, so a lease that did not change for longer is over.
    """

    def __init__(self) -> None:
        self._seen = Held()
        self._since_s = 0.0

    def is_over(self, held: Held, now_s: float, ttl_s: float) -> bool:
        """Note the current row; returns whether it has not changed for longer than its holder may lead. `now_s`:
        monotonic clock. All controllers of a cluster have the same `ttl_s`."""
        if held != self._seen:
            self._seen, self._since_s = held, now_s
        return now_s - self._since_s > ttl_s * (1.0 + MARGIN)


def epoch_for(holder: str, held: Held, now: float, *, has_held: bool, is_over: bool) -> int | None:
    """The epoch under which `holder` may lead from now on; None if it may not. Pure. `has_held`: this process led
    before, see `ControllerLease`. `is_over`: the lease was not renewed in time, whatever the database's clock says."""
    has_run_out = held.expires_at <= now or is_over
    if held.holder == holder and not has_run_out:
        return held.epoch
    is_successor = not has_held and _name(held.holder) == _name(holder)
    return held.epoch + 1 if is_successor or has_run_out else None


def _name(holder: str) -> str:
    return holder.partition("#")[0]
