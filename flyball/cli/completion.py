"""Shell completion. The scripts of `--install-completion` call `flyball` at every Tab, so it must be fast.

Importing all commands takes most of a second. The command tree is therefore read from them once and cached in a file,
whose name is a hash of these sources' timestamps. Job names are looked up each time.

zsh loads the installed script at the first Tab, as the function that completes. So the script has to complete at once;
the one that typer generates does not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from enum import EnumType
from pathlib import Path
from typing import Any, get_args

from flyball.contracts.errors import UsageError

VARIABLE = "_FLYBALL_COMPLETE"  # set by the scripts that typer's installer writes
SHELLS = ("bash", "zsh", "fish")
JOB_WORDS = ("job", "--job")  # arguments and options that take a job's name
_ZSH_LOADED = (
    "compdef _flyball_completion flyball",
    """if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  _flyball_completion "$@"
else
  compdef _flyball_completion flyball
fi""",
)
DEFAULT_COMMANDS = {"goodput": "report"}  # the command a group runs when none is given

# {"help", "options": {spelling: {"help", "value", "choices"}}, "arguments": [{"name", "choices", "many"}], "commands"}
Tree = Mapping[str, Any]
Found = list[tuple[str, str]]  # (word, help)
LoadCommands = Callable[[], Any]  # imports all commands and returns them as one click group


def script(shell: str) -> str:
    """The completion script for a shell, as typer generates it. Raises UsageError for an unknown shell."""
    from typer._completion_shared import get_completion_script

    text = str(get_completion_script(prog_name="flyball", complete_var=VARIABLE, shell=_known(shell)))
    return text.replace(*_ZSH_LOADED) if shell == "zsh" else text


def install_script(shell: str) -> Path:
    """Install the completion script for a shell and return its path. Raises UsageError for an unknown shell."""
    from typer._completion_shared import install

    _, path = install(shell=_known(shell), prog_name="flyball", complete_var=VARIABLE)
    if shell == "zsh":
        Path(path).write_text(script(shell))
    return Path(path)


def _known(shell: str) -> str:
    if shell not in SHELLS:
        raise UsageError(f"There is no completion for {shell}.", hint=f"choose one of: {', '.join(SHELLS)}")
    return shell


def answer(environ: Mapping[str, str], load_commands: LoadCommands) -> tuple[str, int]:
    """Answer a shell's completion script: the text to print, and the exit code."""
    shell = environ[VARIABLE].removeprefix("complete_")
    words, incomplete = _line(shell, environ)
    found = candidates(words, incomplete, environ, load_commands)
    if shell == "fish":
        if environ.get("_TYPER_COMPLETE_FISH_ACTION") == "is-args":
            return "", 0 if found else 1  # with 1 the shell offers files
        return "\n".join(f"{word}\t{_one_line(text)}" if text else word for word, text in found), 0
    if shell == "zsh":
        entries = "\n".join(
            f'"{_zsh(word)}":"{_zsh(_one_line(text))}"' if text else f'"{_zsh(word)}"' for word, text in found
        )
        return f"_arguments '*: :(({entries}))'" if found else "_files", 0
    return "\n".join(word for word, _ in found), 0


def candidates(words: Sequence[str], incomplete: str, environ: Mapping[str, str], load_commands: LoadCommands) -> Found:
    """The words that may complete `incomplete` after `words`. Empty if a file or anything else is expected."""
    if words[:1] == ["run"]:
        return _run_candidates(words[1:], incomplete, environ)
    node = _tree(load_commands)
    place = 0  # index of the next argument
    option: Mapping[str, Any] | None = None
    for position, word in enumerate(words):
        if option is not None:
            option = None
        elif word.startswith("-"):
            node = _default(node, words[:position])
            option = _with_value(node, word)
        elif word in node["commands"]:
            node = node["commands"][word]
        else:
            node = _default(node, words[:position])
            place += 1
    if option is not None:
        return _values(words[-1], option, incomplete, environ)
    if incomplete.startswith("-"):
        node = _default(node, words)
        return _matching(((name, str(o["help"])) for name, o in node["options"].items()), incomplete)
    if node["commands"] and not place:
        return _matching(((name, str(sub["help"])) for name, sub in node["commands"].items()), incomplete)
    arguments = node["arguments"]
    if arguments and arguments[-1]["many"]:
        place = min(place, len(arguments) - 1)
    return _values(arguments[place]["name"], arguments[place], incomplete, environ) if place < len(arguments) else []


def _run_candidates(words: Sequence[str], incomplete: str, environ: Mapping[str, str]) -> Found:
    """Complete `flyball run`, which has torchrun's grammar: flags first, and the script owns all words after it."""
    from flyball.launch.launch_flags import ALL_FLAGS, FlagKind, Use

    flags = {name: flag for flag in ALL_FLAGS for name in flag.spellings}
    takes = None
    for word in words:
        if takes is not None:
            takes = None
        elif not word.startswith("-"):
            return []
        elif word in flags and flags[word].kind is not FlagKind.SWITCH:
            takes = flags[word]
    if takes is not None:
        option = {"choices": takes.choices}
        return _values(takes.names[-1], option, incomplete, environ)
    if words[-1:] == ["--resume"] and not incomplete.startswith("-"):
        return _jobs(incomplete, environ)
    if not incomplete.startswith("-"):
        return []
    named = ((name, flag.about) for flag in ALL_FLAGS if flag.use is not Use.REFUSED for name in flag.names)
    return _matching((*named, ("--help", "show all flags")), incomplete)


def _default(node: Tree, before: Sequence[str]) -> Tree:
    """The group's default command, if the group was named without a command."""
    name = DEFAULT_COMMANDS.get(before[-1]) if before and node["commands"] else None
    found: Tree = node["commands"][name] if name else node
    return found


def _with_value(node: Tree, word: str) -> Mapping[str, Any] | None:
    option: Mapping[str, Any] | None = node["options"].get(word)
    return option if option and option["value"] else None


def _values(name: str, option: Mapping[str, Any], incomplete: str, environ: Mapping[str, str]) -> Found:
    if name in JOB_WORDS:
        return _jobs(incomplete, environ)
    return _matching(((choice, "") for choice in option["choices"]), incomplete)


def _jobs(incomplete: str, environ: Mapping[str, str]) -> Found:
    from flyball.cli.reach.local_runs import find_runs

    newest: dict[str, str] = {}
    with contextlib.suppress(OSError):  # unreadable folder: do not print errors into a prompt
        for run in find_runs(environ):
            newest.setdefault(run.job, run.state)
    return _matching(newest.items(), incomplete)


def _matching(found: Any, incomplete: str) -> Found:  # noqa: ANN401 - any iterable of pairs
    return [(word, text) for word, text in found if word and word.startswith(incomplete)]


def _line(shell: str, environ: Mapping[str, str]) -> tuple[list[str], str]:
    """The complete words after `flyball`, and the incomplete one. Bash splits `--flag=value` into three words."""
    if shell == "bash":
        words, at = _split(environ.get("COMP_WORDS", "")), int(environ.get("COMP_CWORD", "0"))
        done, incomplete = words[1:at], words[at] if at < len(words) else ""
        incomplete = "" if incomplete == "=" else incomplete
        return [word for word in done if word != "="], incomplete
    line = environ.get("_TYPER_COMPLETE_ARGS", "")
    words = _split(line)[1:]
    return (words[:-1], words[-1]) if words and not line.endswith(" ") else (words, "")


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # unclosed quote
        return line.split()


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _zsh(text: str) -> str:
    for letter, written in (('"', '""'), ("'", "''"), ("$", "\\$"), ("`", "\\`"), (":", r"\\:")):
        text = text.replace(letter, written)
    return text


# --- the command tree -------------------------------------------------------------------------------------------------


def _tree(load_commands: LoadCommands) -> Tree:
    """All commands with their options, from the cache if possible."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    state = hashlib.sha256(str([(file.name, file.stat().st_mtime_ns) for file in sources]).encode()).hexdigest()[:16]
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cached = Path(base) / "flyball" / f"completion-{state}.json"
    with contextlib.suppress(OSError, ValueError):
        known: Tree = json.loads(cached.read_text())
        return known
    found = _described(load_commands(), _words())
    with contextlib.suppress(OSError):  # cannot be cached: correct, only slower
        _write_cache(cached, json.dumps(found))
    return found


def _write_cache(file: Path, text: str) -> None:
    from flyball.state_folder import write_private

    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for old in file.parent.glob("completion-*.json"):
        old.unlink(missing_ok=True)
    write_private(file, text.encode(), durable=False)  # only a cache


def _words() -> dict[str, list[str]]:
    """What arguments can be that are words by themselves, by command and argument."""
    from flyball.cli.doctor.checks import CHECKS
    from flyball.cli.look.kinds import NAMES
    from simulator.fleet.scenario import shipped
    from simulator.inject.kinds.catalog import KINDS

    scenarios = {f"simulate {command} name": shipped() for command in ("run", "describe", "sweep", "optimize")}
    compared = {f"simulate compare {side}": shipped() for side in ("a", "b")}
    kinds = {f"{command} kind": list(NAMES) for command in ("get", "describe")}
    checks = list(dict.fromkeys(check.subject for check in CHECKS))
    return {**scenarios, **compared, **kinds, "inject fault name": list(KINDS), "doctor subjects": checks}


def _described(command: Any, words: Mapping[str, list[str]], path: str = "") -> Tree:  # noqa: ANN401 - see `commands`
    params = [param for param in command.params if not getattr(param, "hidden", False)]
    options = [param for param in params if param.param_type_name == "option"]
    return {
        "help": (command.get_short_help_str(100) if command.name else ""),
        "options": {
            name: {
                "help": param.help or "",
                "value": not (param.is_flag or param.count),
                "choices": _choices(param),
            }
            for param in options
            for name in (*param.opts, *param.secondary_opts)
        }
        | {"--help": {"help": "show all options", "value": False, "choices": []}},
        "arguments": [
            {
                "name": param.name,
                "choices": words.get(f"{path}{param.name}") or _choices(param),
                "many": param.nargs == -1,
            }
            for param in params
            if param.param_type_name == "argument"
        ],
        "commands": {
            name: _described(sub, words, f"{path}{name} ")
            for name, sub in getattr(command, "commands", {}).items()
            if not sub.hidden
        },
    }


def _choices(param: Any) -> list[str]:  # noqa: ANN401 - see above
    """The allowed words of an option. Where typer keeps them depends on its release."""
    given = getattr(getattr(param, "type", None), "choices", None)
    if given is None:
        annotation = getattr(getattr(param, "type_descriptor", None), "annotation", None)
        for kind in get_args(annotation) or (annotation,):
            if isinstance(kind, EnumType):
                given = list(kind.__members__.values())
    return [str(getattr(choice, "value", choice)) for choice in given or ()]
