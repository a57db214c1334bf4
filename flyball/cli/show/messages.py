"""What the command line says of itself, on stderr, and JSON on stdout. Light to import: `flyball run` waits for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import msgspec

from flyball.contracts.errors import FlyballError


def print_json(value: Any) -> None:  # noqa: ANN401 - whatever the API answered
    """One JSON value on stdout, indented, with a line end."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")
    sys.stdout.flush()


def printable(text: str) -> str:
    """`text` without what a terminal would obey, or could not show: names of files and tensors may be anybody's."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


_beside: list[Callable[[], AbstractContextManager[None]]] = []


@contextmanager
def beside_output(own_line: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """While entered, what is said is said inside `own_line`: somebody else writes to this terminal too."""
    _beside.append(own_line)
    try:
        yield
    finally:
        _beside.remove(own_line)


def say(message: str) -> None:
    """One line about what Flyball does, on stderr, so that stdout stays the script's and the results'."""
    with _beside[-1]() if _beside else nullcontext():
        sys.stderr.write(f"flyball: {printable(message)}\n")
        sys.stderr.flush()


def say_error(error: FlyballError) -> None:
    """Cause and next step, on stderr."""
    sys.stderr.write(f"error: {printable(error.message)}\n")
    if error.hint:
        sys.stderr.write(f"Next step: {printable(error.hint)}\n")
    sys.stderr.flush()
