"""Progress bars for long work, on stderr and only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from ckpt_engine.rules.memory_plan import readable_size

COUNT_SHOWN_EVERY = 1000
SHARE_SHOWN_EVERY = 0.01  # of the whole
T = TypeVar("T")


class _Speed(ProgressColumn):
    """Transfer speed, in the units of the sizes next to it."""

    def render(self, task: Task) -> Text:
        return Text(f"{readable_size(task.finished_speed or task.speed or 0.0)}/s", style="progress.data.speed")


@contextmanager
def bytes_bar(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a bar, and yield a function that advances it by a number of bytes. Callable from any thread."""
    console = Console(file=sys.stderr)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        _Speed(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total_bytes)
        yield lambda size_bytes: progress.advance(task, size_bytes)


@contextmanager
def count_bar(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show a bar, without a known total the count and the time so far; yield a function that advances it."""
    console = Console(file=sys.stderr)
    count = TextColumn("{task.description} {task.completed:,.0f}")
    columns = (
        (SpinnerColumn(), count, TimeElapsedColumn())
        if total is None
        else (count, BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda n: progress.advance(task, n)


@contextmanager
def share_bar(what: str, total: float) -> Iterator[Callable[[float], None]]:
    """Show a bar, and yield a function that is told how much of `total` is done. It may be called very often."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        shown = 0.0

        def reached(done: float) -> None:
            nonlocal shown
            if done - shown >= SHARE_SHOWN_EVERY * total:
                shown = done
                progress.update(task, completed=done)

        yield reached


@contextmanager
def tally(what: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """Show a bar of `total` items, and yield a function that advances it and says how it goes."""
    console = Console(file=sys.stderr)
    columns = (
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} {task.description}"),
        BarColumn(),
        TextColumn("{task.fields[so_far]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total, so_far="")
        yield lambda number, so_far: progress.update(task, advance=number, so_far=so_far)


def counted(what: str, items: Iterable[T]) -> Iterator[T]:
    """Pass `items` through while showing how many there were so far. Their total is not known in advance."""
    console = Console(file=sys.stderr)
    columns = (SpinnerColumn(), TextColumn("{task.description} {task.completed:,.0f}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        for number, item in enumerate(items, 1):
            if not number % COUNT_SHOWN_EVERY:
                progress.update(task, completed=number)
            yield item
