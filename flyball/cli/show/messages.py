"""Messages on stderr, and JSON on stdout. Light to import, so that `flyball run` starts fast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import msgspec

from flyball.cli.show.times import exact_clock
from flyball.contracts.errors import FlyballError


def json_text(value: object) -> str:
    """A value as indented JSON, with a line break at its end."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"


def printable(text: str) -> str:
    """Show control characters as text, because names, messages and the ends of logs may come from anybody: on a
    terminal they could set its clipboard, hide a line, or turn the direction of writing. See `unescaped`."""
    if _unescaped:
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


@contextmanager
def unescaped(raw: bool) -> Iterator[None]:
    """While entered, and if `raw`, `printable` changes nothing: for --raw."""
    _unescaped.extend([raw] * raw)
    try:
        yield
    finally:
        del _unescaped[len(_unescaped) - raw :]


_unescaped: list[bool] = []


_line_guards: list[Callable[[], AbstractContextManager[None]]] = []


@contextmanager
def announce_within(own_line: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """While entered, print messages inside `own_line`, because the ranks write to the same terminal."""
    _line_guards.append(own_line)
    try:
        yield
    finally:
        _line_guards.remove(own_line)


def announce(message: str) -> None:
    """Print one line about Flyball itself on stderr. stdout is for results and the script's output."""
    with _line_guards[-1]() if _line_guards else nullcontext():
        sys.stderr.write(f"flyball: {printable(message)}\n")
        sys.stderr.flush()


def announce_decision(decision: Mapping[str, Any]) -> None:
    """Print a decision of the supervisor, with its time: who reads it later compares it with other logs."""
    what = f"{decision['decision_id']} {decision['kind']} at {exact_clock(decision['at'])}"
    announce(f"{what}: {decision['reason']}")


def print_error(error: FlyballError) -> None:
    """Print an error's cause and next step on stderr."""
    sys.stderr.write(f"error: {printable(error.message)}\n")
    if error.hint:
        sys.stderr.write(f"Next step: {printable(error.hint)}\n")
    sys.stderr.flush()
