"""The grammar of `flyball run`, which is torchrun's: flags first; the first other word is the script, and every word
after it belongs to the script. Pure.

argparse cannot do this with Flyball's additional flags: it also looks for abbreviations among the script's arguments,
and calls `train.py --save` ambiguous. So this module parses the words itself; a property test compares the result with
torchrun's parser.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from flyball.contracts.errors import UsageError
from flyball.launch.launch_flags import ALL_FLAGS, Flag, FlagKind, FlagOrigin, Use

_TYPES = {FlagKind.TEXT: str, FlagKind.INTEGER: int, FlagKind.NUMBER: float, FlagKind.LIST: str}
_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
_HELP_HINT = "flyball run --help-all shows all flags"
_HELP = ("help", "help_all")
_BY_SPELLING = {spelling: flag for flag in ALL_FLAGS for spelling in flag.spellings}
_USAGE = "flyball run [flags] [-m] SCRIPT [arguments of the script]"
_COMMON = """--nproc-per-node --nnodes --job --resume --fresh --max-restarts --hang-timeout --ckpt-every --replicas
--local-ckpt-dir --persistent-ckpt-dir --supervisor --rdzv-endpoint --rdzv-id --spares --min-nodes -m --no-python
--log-dir --state-dir --injectable -h --help-all"""
_EPILOG = """examples:
  flyball run train.py --lr 3e-4
  flyball run --nproc-per-node 4 --max-restarts 3 train.py
  flyball run --nproc-per-node gpu -m my_package.train
  flyball run --nproc-per-node 2 --no-python ./train.sh
  flyball run --supervisor http://10.0.0.1:7370 --nnodes 2 --nproc-per-node 8 --job llama train.py
"""


class ParsedCommandLine(NamedTuple):
    """A parsed command line. `given` holds the values of the flags that were given, by `dest`."""

    given: Mapping[str, object]
    script: str = ""
    script_arguments: tuple[str, ...] = ()
    help: bool = False


def read_line(words: Sequence[str]) -> ParsedCommandLine:
    """Parse the words. Raises UsageError for a flag that is unknown, ambiguous, or lacks its value."""
    given: dict[str, object] = {}
    unknown: list[str] = []
    at = 0
    while at < len(words) and words[at] != "--" and _looks_like_a_flag(words[at]):
        word, following = words[at], words[at + 1 : at + 2]
        at += 1
        flag, value = _meaning(word)
        if flag is None:
            unknown.append(word)
            continue
        while flag.kind is FlagKind.SWITCH:
            if flag.dest in _HELP:
                return ParsedCommandLine({flag.dest: True}, help=True)
            given[flag.dest] = True
            if value is None:
                break
            flag, value = _next_of_cluster(word, flag, value)
        else:
            if value is None:
                if not following or _looks_like_a_flag(following[0]):
                    raise UsageError(f"{'/'.join(flag.names)} needs a value.", hint=_HELP_HINT)
                value, at = following[0], at + 1
            _keep(given, flag, value)
    if unknown:
        raise UsageError(f"Flyball has no flag {' and no flag '.join(unknown)}.", hint=_HELP_HINT)
    rest = list(words[at:])
    before = rest[:1] == ["--"]
    script = rest[int(before) :][:1]
    arguments = rest[int(before) + 1 :]
    if not before and arguments[:1] == ["--"]:  # argparse, and so torchrun, also drops the first `--` here
        del arguments[0]
    return ParsedCommandLine(given, script[0] if script else "", tuple(arguments))


def _keep(given: dict[str, object], flag: Flag, text: str) -> None:
    value = convert(flag, text, "/".join(flag.names))
    if flag.choices and value not in flag.choices:
        raise UsageError(
            f"{flag.names[-1]} {text} is not one of {', '.join(flag.choices)}.",
            hint=f"for example {flag.names[-1]} {flag.choices[0]}",
        )
    if flag.kind is FlagKind.LIST:
        kept = given.get(flag.dest, ())
        given[flag.dest] = (*(kept if isinstance(kept, tuple) else ()), value)
    else:
        given[flag.dest] = value


def convert(flag: Flag, text: str, shown: str) -> object:
    """Convert a flag's text to its value. Raises UsageError."""
    try:
        return bool(int(text)) if flag.kind is FlagKind.SWITCH else _TYPES[flag.kind](text)
    except ValueError:
        kind = "0 or 1" if flag.kind is FlagKind.SWITCH else flag.kind
        raise UsageError(
            f"{shown} is {text!r}, which is not a valid {kind}.", hint="correct it, or leave it out"
        ) from None


def _looks_like_a_flag(word: str) -> bool:
    """As argparse does: a single dash, a negative number, or an unknown word with a space is not a flag."""
    if not word.startswith("-") or word == "-":
        return False
    if word in _BY_SPELLING or word.partition("=")[0] in _BY_SPELLING or _candidates(word):
        return True
    return not _NEGATIVE_NUMBER.fullmatch(word) and " " not in word


def _meaning(word: str) -> tuple[Flag | None, str | None]:
    """The flag for a word, and the value after its `=` or short name. Raises UsageError if it is ambiguous."""
    if word in _BY_SPELLING:
        return _BY_SPELLING[word], None
    name, equals, value = word.partition("=")
    if equals and name in _BY_SPELLING:
        return _BY_SPELLING[name], value
    found = _candidates(word)
    flags = {_BY_SPELLING[spelling].dest for spelling in found}
    if len(flags) > 1:
        raise UsageError(f"{name} could be {', '.join(found)}.", hint="write the flag out; " + _HELP_HINT)
    if not found:
        return None, None
    if word.startswith("--"):
        return _BY_SPELLING[found[0]], value if equals else None
    return _BY_SPELLING[found[0]], word[2:]


def _candidates(word: str) -> list[str]:
    """The spellings that an abbreviation may stand for. If it fits torchrun's flags, ours do not count."""
    if not word.startswith("--"):
        return [word[:2]] if word[:2] in _BY_SPELLING else []
    prefix = word.partition("=")[0]
    found = [spelling for spelling in _BY_SPELLING if spelling.startswith(prefix)]
    theirs = [spelling for spelling in found if _is_torchruns(_BY_SPELLING[spelling])]
    return theirs or found


def _is_torchruns(flag: Flag) -> bool:
    return flag.origin is FlagOrigin.TORCHRUN or flag.dest == "help"


def _next_of_cluster(word: str, switch: Flag, rest: str) -> tuple[Flag, str | None]:
    """`-mt3` means `-m -t3`."""
    if word.startswith("--") or f"-{rest[:1]}" not in _BY_SPELLING:
        raise UsageError(f"{switch.names[-1]} takes no value, {word} gives it one.", hint=_HELP_HINT)
    return _BY_SPELLING[f"-{rest[0]}"], rest[1:].removeprefix("=") or None


def help_text(*, everything: bool) -> str:
    """The output of `flyball run --help-all`, or of --help: one screen."""
    parser = argparse.ArgumentParser(
        prog="flyball run",
        usage=_USAGE,
        add_help=False,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=28),
        description="Run a training script under supervision, in place of torchrun.",
        epilog=_EPILOG,
    )
    common = [flag for name in _COMMON.split() for flag in ALL_FLAGS if flag.names[0] == name]
    groups = {f"flags of {origin}": [f for f in ALL_FLAGS if f.origin is origin] for origin in FlagOrigin}
    for title, flags in (groups if everything else {"flags": common}).items():
        group = parser.add_argument_group(title)
        for flag in flags:
            about = flag.about.replace("%", "%%")
            if flag.use is Use.NOTED:
                about = f"accepted, but has no effect: {about}"
            if flag.use is Use.REFUSED:
                about = f"refused: {about}"
            names = flag.spellings if everything else flag.names
            if flag.kind is FlagKind.SWITCH:
                group.add_argument(*names, action="store_true", help=about)
            else:
                group.add_argument(*names, metavar=flag.metavar, choices=flag.choices or None, help=about)
    return parser.format_help()
