"""The controller's lease: one row, an epoch that only grows, time by the database's clock.

The epoch is what protects: every commit checks it in its own transaction. The time to live only keeps two healthy
controllers from taking the lease from each other in turns.
"""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection, select, text, update

from flyball.contracts.clock import Clock
from flyball.contracts.errors import StaleEpoch
from services.controller.ports import LeaseGrant
from services.store.tables import lease

CONTROLLER = "controller"
MARGIN = 0.2  # of the time to live: the holder stops that much early, for clocks that run at other speeds

_NOW = {
    "sqlite": text("SELECT (julianday('now') - 2440587.5) * 86400.0"),
    "mysql": text("SELECT UNIX_TIMESTAMP(SYSDATE(6))"),
}


class Acquired(msgspec.Struct, frozen=True):
    grant: LeaseGrant
    is_new: bool  # a new epoch began


class Held(msgspec.Struct, frozen=True):
    """The lease row."""

    holder: str = ""
    epoch: int = 0
    expires_at: float = 0.0


class Renewals:
    """Watches whether a lease that another one holds is renewed, on this process's own clock.

    The database's clock may be set back, by an hour or a year: then a lease whose holder died does not run out for as
    long. A live holder renews it several times in its time to live, so that one which stood still for longer is over.
    """

    def __init__(self) -> None:
        self._seen = Held()
        self._since_s = 0.0

    def is_over(self, held: Held, now_s: float, ttl_s: float) -> bool:
        """Note what the row says now; whether it has said so for longer than its holder may lead. `now_s` is a
        monotonic clock. All controllers of a cluster have the same `ttl_s`."""
        if held != self._seen:
            self._seen, self._since_s = held, now_s
        return now_s - self._since_s > ttl_s * (1.0 + MARGIN)


def epoch_for(holder: str, held: Held, now: float, *, has_held: bool, is_over: bool) -> int | None:
    """The epoch under which `holder` may lead from now on, None if it may not. Pure. `has_held`: this process led
    before, see `ControllerLease`. `is_over`: the lease was not renewed in time, whatever the database's clock says."""
    has_run_out = held.expires_at <= now or is_over
    if held.holder == holder and not has_run_out:
        return held.epoch
    is_successor = not has_held and _name(held.holder) == _name(holder)
    return held.epoch + 1 if is_successor or has_run_out else None


class ControllerLease:
    """One process's hold on the lease.

    Holders are called "name#incarnation". One of the same name and another incarnation is this controller's
    predecessor, which died: it is replaced at once, without waiting for its time to run out. Who was once replaced
    that way waits like any stranger, so that two live processes of one name do not push each other out for ever.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._has_held = False
        self._renewals = Renewals()

    def acquire(self, connection: Connection, holder: str, ttl_s: float) -> Acquired | None:
        """Take or renew; None while another one holds it. The caller's transaction must be a write."""
        began_s = self._clock.monotonic_s()  # before the request, so that a slow answer shortens our time, not theirs
        row = connection.execute(select(lease).where(lease.c.name == CONTROLLER).with_for_update()).one()
        now = database_now(connection)
        held = Held(row.holder, row.epoch, row.expires_at)
        is_over = self._renewals.is_over(held, began_s, ttl_s)
        epoch = epoch_for(holder, held, now, has_held=self._has_held, is_over=is_over)
        if epoch is None:
            return None
        connection.execute(
            update(lease).where(lease.c.name == CONTROLLER).values(holder=holder, epoch=epoch, expires_at=now + ttl_s)
        )
        self._has_held = True
        return Acquired(LeaseGrant(epoch, began_s + ttl_s * (1.0 - MARGIN)), is_new=epoch != row.epoch)


def release(connection: Connection, holder: str) -> None:
    """Let another controller take over at once. The epoch stays, and grows with the next holder."""
    connection.execute(update(lease).where(lease.c.name == CONTROLLER, lease.c.holder == holder).values(expires_at=0.0))


def current_epoch(connection: Connection) -> int:
    """The epoch that commands written in this transaction must carry; no other one begins before it ends."""
    query = select(lease.c.epoch).where(lease.c.name == CONTROLLER).with_for_update(read=True)
    return int(connection.execute(query).scalar_one())


def check_epoch(connection: Connection, epoch: int) -> None:
    """Raise StaleEpoch unless `epoch` is the present one; it then stays so until the transaction ends."""
    present = connection.execute(select(lease.c.epoch).where(lease.c.name == CONTROLLER).with_for_update()).scalar_one()
    if present != epoch:
        raise StaleEpoch(
            f"This controller's epoch is {epoch}, but {present} has begun.", hint="nothing to do: another one leads now"
        )


def database_now(connection: Connection) -> float:
    """Seconds since the Unix epoch, by the database's clock."""
    return float(connection.execute(_NOW["sqlite" if connection.dialect.name == "sqlite" else "mysql"]).scalar_one())


def leader(connection: Connection) -> str | None:
    """Who holds the lease now; None if nobody does."""
    row = connection.execute(select(lease).where(lease.c.name == CONTROLLER)).one_or_none()
    return str(row.holder) if row is not None and row.expires_at > database_now(connection) else None


def _name(holder: str) -> str:
    return holder.partition("#")[0]
