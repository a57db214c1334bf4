"""Follows a page of the documentation as its reader would: saves its files, types its commands, reads their output.

In a page,

    ```python title="train.py"      is a file that the reader saves; so are other languages with a title
    ```console                      are commands (`$ ...`) and what they print
    ```console title="terminal 2"   the same in a terminal of its own: its last command goes on in the background
    ^C                              in a console: press Ctrl-C there

A command without a terminal of its own must succeed. The lines shown below a command must appear in its output, in
that order. Numbers other than 0, ids, tables' lines and runs of spaces do not count, and `...` stands for any lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from support.commands.users_machine import Command, User

_FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_VARYING = re.compile(r"\b[0-9a-f]{6}\b|\b(?!0\b)\d[\d.,:]*")
_DRAWN = re.compile(r"[─━┏┓┗┛│┃╭╮╰╯#]+")


@dataclass(frozen=True)
class Fence:
    language: str
    title: str
    text: str


@dataclass
class Typed:
    """A command line, what the page shows of its output, and whether Ctrl-C follows."""

    command: str
    shown: list[str] = field(default_factory=list)
    interrupted: bool = False


def fences_of(page: Path) -> list[Fence]:
    return [Fence(language, title, text) for language, title, text in _FENCE.findall(page.read_text())]


def follow(page: Path, user: User, *, variables: dict[str, str] | None = None) -> None:
    """Do all that the page says. `variables` replace words of the page, such as a port that may be in use."""
    terminals: dict[str, Command] = {}
    try:
        for fence in fences_of(page):
            text = fence.text
            for word, value in (variables or {}).items():
                text = text.replace(word, value)
            if fence.language != "console":
                if fence.title:
                    user.script(fence.title, text)
                continue
            for typed in _commands(text):
                _type(typed, fence.title, user, terminals)
    finally:
        for command in reversed(terminals.values()):
            if command.process.poll() is None:
                command.interrupt()
                command.wait()


def _commands(text: str) -> Iterator[Typed]:
    typed: Typed | None = None
    for line in text.splitlines():
        if line.startswith("$ "):
            if typed:
                yield typed
            typed = Typed(line[2:])
        elif line == "^C":
            typed = typed or Typed("")
            typed.interrupted = True
        elif line.strip() and line.strip() != "..." and typed:
            typed.shown.append(line)
    if typed:
        yield typed


def _type(typed: Typed, terminal: str, user: User, terminals: dict[str, Command]) -> None:
    before = terminals.get(terminal) if terminal else None
    if not typed.command:
        assert before is not None, f"nothing runs in {terminal!r}"
        before.interrupt()
        before.wait()
        return
    if before is not None:
        before.wait()
    if typed.command.startswith("export "):
        user.more.update(word.split("=", 1) for word in typed.command.split()[1:])
        return
    command = user.start(typed.command)
    if terminal:
        terminals[terminal] = command
        command.until(lambda: _missing(typed.shown, command.text()) is None, f"all of {typed.shown}")
        if typed.interrupted:
            command.interrupt()
            command.wait()
        return
    command.wait()
    assert command.process.returncode == 0, f"$ {typed.command}\n{command.text()}"
    missing = _missing(typed.shown, command.text())
    assert missing is None, f"$ {typed.command}\ndoes not print {missing!r} there:\n{command.text()}"


def _missing(shown: list[str], output: str) -> str | None:
    """The first line that the page shows and the output does not have, in that order."""
    lines = iter([_plain(line) for line in output.splitlines()])
    return next((line for line in shown if not any(_plain(line) in printed for printed in lines)), None)


def _plain(text: str) -> str:
    return " ".join(_DRAWN.sub(" ", _VARYING.sub("N", text)).replace("_", " ").split())  # a log in a pipe is JSON
