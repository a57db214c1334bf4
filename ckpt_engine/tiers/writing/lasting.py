"""Threads that must not end before their time: what is thrown in one is told, and its work goes on."""

from __future__ import annotations

from collections.abc import Callable

from flyball.contracts.errors import FlyballError


def run_lasting(work: Callable[[], None], *, tell: Callable[[Exception], None], pause: Callable[[], bool]) -> None:
    """Call `work` until it returns. What it raises goes to `tell`; then `pause` is called, which is True when all is to
    end. A machine out of memory may have none for telling, so that telling is tried again as well."""
    raised: Exception | None = None
    while True:
        try:
            if raised is not None:
                tell(raised)
                raised = None
                if pause():
                    return
            work()
            return
        except Exception as error:  # noqa: BLE001 - told at once
            if raised is not None and pause():
                return
            raised = error


def said(error: Exception) -> str:
    """In words: of an expected error its own, of another one its name too, which may be all that there is."""
    return str(error) if isinstance(error, FlyballError | OSError) else repr(error)
