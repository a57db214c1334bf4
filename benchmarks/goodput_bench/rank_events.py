"""What a rank under torchrun tells of itself, as events of Flyball's schema, appended to a file of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from flyball.contracts.clock import SystemClock
from flyball.contracts.events import Event, EventKind
from flyball.contracts.wire import encode


class RankEvents:
    """Each event is handed to the kernel at once: a rank that is killed loses none."""

    def __init__(self, path: Path, *, job: str, generation: int, rank: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._clock = SystemClock()
        self._job, self._generation, self._rank = job, generation, rank
        self._marks: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """This moment, as `attached_at`, `restore_began_at`, `restored_at` or `first_step_at`."""
        self._marks[name] = self._clock.wall_s()
        self._write(EventKind.RANK_MARKS, dict(self._marks))

    def blocked(self, total_s: float) -> None:
        """The step loop has waited this long in saves since it began."""
        self._marks["save_blocked_s"] = total_s
        self._write(EventKind.RANK_MARKS, dict(self._marks))

    def restored(self, step: int, seconds: float) -> None:
        self._write(EventKind.RESTORED, {"step": step, "source_tier": "disk", "seconds": seconds})

    def save_failed(self, step: int, error: BaseException) -> None:
        """As Flyball's event log has it; the reason goes to the launcher's output."""
        print(f"rank {self._rank}: the save of step {step} failed: {error}", file=sys.stderr, flush=True)
        self._write(EventKind.SIGNAL, {"kind": "save_failed", "source": f"rank {self._rank}"})

    def step(self, step: int) -> None:
        """Optimizer step `step` is complete."""
        self._write(EventKind.STEPS, {"first_step": step, "completed_at": [self._clock.wall_s()]})

    def _write(
        self, kind: EventKind, data: dict[str, str | int | float | bool | list[int | float | str] | None]
    ) -> None:
        event = Event(
            at=self._clock.wall_s(), kind=kind, job=self._job, generation=self._generation, rank=self._rank, data=data
        )
        os.write(self._file, encode(event) + b"\n")
