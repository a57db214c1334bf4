"""Ports of the controller's loop to its environment; the adapters are in `services.store` and `services.bus`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from flyball.contracts.reports.signals import Signal
from services.actuator.ports import PlaybookStep
from services.controller.replay import RoundInputs
from services.controller.round.focus import Focus
from services.controller.round.view import Outcome, View
from services.rules.stream import Cursor, LeaseGrant


class BrokenOff(Exception):
    """A read was broken off, because something else is more urgent."""


class DecisionStore(Protocol):
    """The controller's side of the database."""

    def acquire_lease(self, holder: str, ttl_s: float) -> LeaseGrant | None:
        """Take or renew the controller's lease by the database's clock; None while another holder has it."""
        ...

    def release_lease(self, holder: str) -> None: ...

    def went_back(self, holder: str) -> None:
        """Release the lease and drop all caches: the database was set back."""
        ...

    def cursor(self) -> Cursor | None: ...

    def revision(self) -> int:
        """A number that changes whenever `load_view` might return something else."""
        ...

    def load_view(
        self, focus: Focus | None = None, *, anew: bool = True, yields: Callable[[], bool] | None = None
    ) -> View:
        """Everything that the policy needs, in one consistent read; with a focus, as `focused` restricts it. Without
        `anew`, what no transaction of ours changed need not be read again. Raises BrokenOff once `yields` says that
        something else is more urgent."""
        ...

    def running_jobs(self) -> Sequence[tuple[str, int]]:
        """The jobs with ranks, and how many each has, as of the last view."""
        ...

    def unseen(self, signals: Sequence[Signal]) -> list[Signal]:
        """The signals whose (source, incarnation, seq) is not committed yet."""
        ...

    def commit(
        self,
        *,
        epoch: int,
        now: float,
        signals: Sequence[Signal],
        cursor: Cursor | None,
        outcome: Outcome,
        first_steps: Mapping[str, PlaybookStep],
        inputs: RoundInputs | None = None,
    ) -> None:
        """Commit a round in one transaction: signals, position, incidents, decisions, actions, generations, outbox,
        events.

        `first_steps[action_id]` is the first move of each new action ("act-" and the number of its decision), so that a
        decision and its first commands are stored together. `inputs` are stored for replays. Raises StaleEpoch, and
        stores nothing, if `epoch` is not the lease's current one."""
        ...

    def keep_round(self, inputs: RoundInputs, signals: Sequence[Signal], *, epoch: int, now: float) -> None:
        """Store the inputs of a committed round in a transaction of its own: those of a large job take longer to write
        than its decision may wait."""
        ...
