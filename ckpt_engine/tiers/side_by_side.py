"""Many small requests of one kind, several at a time: each costs a round trip, and of that mostly waiting."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(ask: Callable[[Item], Result], items: Sequence[Item], *, threads: int) -> list[Result]:
    """What `ask` returns for each item, in their order, as if they were asked one by one: it raises what the first of
    them raised that failed, and begins no other after that. The first is asked alone: a store that is away is waited
    for once, and by one. Its threads are daemons, unlike an executor's: the process may end while a store hangs."""
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}
    lock = threading.Lock()
    begun = 1

    def work() -> None:
        nonlocal begun
        while True:
            with lock:
                index = begun
                if errors or index >= len(items):
                    return
                begun += 1
            try:
                results[index] = ask(items[index])
            except BaseException as error:  # noqa: BLE001 - raised below
                errors[index] = error

    if items:
        results[0] = ask(items[0])
    helpers: list[threading.Thread] = []
    with contextlib.suppress(RuntimeError):  # no more threads: with those that there are
        for _ in range(min(threads, len(items) - 1) - 1):
            helper = threading.Thread(target=work, name="flyball-ask", daemon=True)
            helper.start()
            helpers.append(helper)
    work()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[min(errors)]
    return [results[index] for index in range(len(items))]
