"""What the controller's loop needs of the world; adapters live in `services.store` and `services.bus`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from flyball.contracts.reports.signals import Signal
from services.actuator.ports import PlaybookStep
from services.controller.focus import Focus
from services.controller.replay import RoundInputs
from services.controller.view import Outcome, View
from services.rules.stream import Cursor, LeaseGrant


class DecisionStore(Protocol):
    """The controller's side of the database."""

    def acquire_lease(self, holder: str, ttl_s: float) -> LeaseGrant | None:
        """Take or renew the controller's lease by the database's clock; None while another holds it."""
        ...

    def release_lease(self, holder: str) -> None: ...

    def went_back(self, holder: str) -> None:
        """Give the lease up, and forget what is kept of the database: it is older than it was."""
        ...

    def cursor(self) -> Cursor | None: ...

    def revision(self) -> int:
        """A number that changes whenever `load_view` might answer differently than before."""
        ...

    def load_view(self, focus: Focus | None = None) -> View:
        """All that the policy looks at, in one consistent read; with a focus what `focused` makes of that."""
        ...

    def running_jobs(self) -> Sequence[tuple[str, int]]:
        """Jobs that have ranks, each with its size in ranks, as the last view knew them."""
        ...

    def unseen(self, signals: Sequence[Signal]) -> list[Signal]:
        """Those whose (source, incarnation, seq) is not yet committed."""
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
        """One transaction: signals, position, incidents, decisions, actions, generations, outbox, events.
        `first_steps[action_id]` is the playbook's first move of each new action (action_id = "act-" + the number of its
        decision), so that a decision and its first outbox rows are stored together. `inputs` are kept for replays.
        Raises StaleEpoch, and stores nothing, if `epoch` is not the lease's present one."""
        ...

    def keep_round(self, inputs: RoundInputs, signals: Sequence[Signal], *, epoch: int, now: float) -> None:
        """Keep the inputs of a round that is stored already, in a transaction of its own: those of a large job take
        longer to write than its decision may."""
        ...
