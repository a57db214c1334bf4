"""The controller's lease: one row with an epoch that only grows, timed by the database's clock.

Safety comes from the epoch: every commit checks it in its own transaction. The time to live only keeps two healthy
controllers from taking the lease from each other in turns.
"""

from __future__ import annotations

from uuid import uuid4

import msgspec
from sqlalchemy import Connection, select, text, update

from flyball.contracts.clock import Clock
from flyball.contracts.errors import StaleEpoch
from services.record.lease_terms import MARGIN, Held, Issuer, Renewals, epoch_for
from services.rules.stream import LeaseGrant
from services.store.sql.tables import lease

CONTROLLER = "controller"

_NOW = {
    "sqlite": text("SELECT (julianday('now') - 2440587.5) * 86400.0"),
    "mysql": text("SELECT UNIX_TIMESTAMP(SYSDATE(6))"),
}


class Acquired(msgspec.Struct, frozen=True):
    grant: LeaseGrant
    is_new: bool  # whether a new epoch began


class ControllerLease:
    """One process's hold on the lease.

    Holders are named "name#incarnation". A holder with the same name and another incarnation is this controller's dead
    predecessor, and is replaced at once. A holder that was replaced that way must wait like any other:
    otherwise two live processes of one name would keep replacing each other.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._has_held = False
        self._renewals = Renewals()

    def acquire(self, connection: Connection, holder: str, ttl_s: float) -> Acquired | None:
        """Take or renew the lease. Return None while another holds it. Needs a write transaction."""
        began_s = self._clock.monotonic_s()  # before the request: a slow reply must shorten our time, not theirs
        row = connection.execute(select(lease).where(lease.c.name == CONTROLLER).with_for_update()).one()
        now = database_now(connection)
        held = Held(row.holder, row.epoch, row.expires_at)
        is_over = self._renewals.is_over(held, began_s, ttl_s)
        epoch = epoch_for(holder, held, now, has_held=self._has_held, is_over=is_over)
        if epoch is None:
            return None
        is_new = epoch != row.epoch
        values = {"holder": holder, "epoch": epoch, "expires_at": now + ttl_s}
        if is_new:
            values["incarnation"] = new_incarnation()
        connection.execute(update(lease).where(lease.c.name == CONTROLLER).values(values))
        self._has_held = True
        return Acquired(LeaseGrant(epoch, began_s + ttl_s * (1.0 - MARGIN)), is_new=is_new)


def release(connection: Connection, holder: str) -> None:
    """Let another controller take over at once. The epoch grows only with the next holder."""
    connection.execute(update(lease).where(lease.c.name == CONTROLLER, lease.c.holder == holder).values(expires_at=0.0))


def new_incarnation() -> str:
    """Return a random name for the database under a new epoch: a copy that begins the same epoch gets another name."""
    return uuid4().hex[:8]


def raise_epoch(connection: Connection, above: int) -> None:
    """Begin an epoch above `above`, which hosts have obeyed, unless the present one is. The holder of the lease then
    takes it again."""
    connection.execute(
        update(lease)
        .where(lease.c.name == CONTROLLER, lease.c.epoch <= above)
        .values(epoch=above + 1, incarnation=new_incarnation())
    )


def current(connection: Connection) -> Issuer:
    """Return the issuer that commands written in this transaction must carry. No new epoch begins until it ends."""
    return _issuer(connection, is_shared=True)


def check_epoch(connection: Connection, epoch: int) -> Issuer:
    """Raise StaleEpoch unless `epoch` is the present one. It stays the present one until the transaction ends."""
    present = _issuer(connection, is_shared=False)
    if present.epoch != epoch:
        raise StaleEpoch(
            f"This controller's epoch is {epoch}, but {present.epoch} has begun.",
            hint="nothing to do: another controller leads now",
        )
    return present


def current_epoch(connection: Connection) -> int:
    """Return the present epoch, without a lock."""
    return int(connection.scalar(select(lease.c.epoch).where(lease.c.name == CONTROLLER)) or 0)


def _issuer(connection: Connection, *, is_shared: bool) -> Issuer:
    query = select(lease.c.epoch, lease.c.incarnation).where(lease.c.name == CONTROLLER)
    row = connection.execute(query.with_for_update(read=is_shared)).one()
    return Issuer(row.epoch, row.incarnation)


def database_now(connection: Connection) -> float:
    """Return seconds since the Unix epoch by the database's clock."""
    return float(connection.execute(_NOW["sqlite" if connection.dialect.name == "sqlite" else "mysql"]).scalar_one())


def leader(connection: Connection) -> str | None:
    """Return the present holder of the lease, None if there is none."""
    row = connection.execute(select(lease).where(lease.c.name == CONTROLLER)).one_or_none()
    return str(row.holder) if row is not None and row.expires_at > database_now(connection) else None
