"""Command-line options that several commands share."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Collection
from typing import Annotated, Any

import typer

from flyball.cli.reach.sources import SupervisorChoice

SupervisorOption = Annotated[
    str,
    typer.Option("--supervisor", help="supervisor's address (default: FLYBALL_SUPERVISOR, or the one running here)"),
]
TokenFileOption = Annotated[
    str, typer.Option("--token-file", help="file with the supervisor's token (default: FLYBALL_TOKEN, or found here)")
]
StateDirOption = Annotated[str, typer.Option("--state-dir", help="supervisor's state folder, if it is on this machine")]
CaFileOption = Annotated[
    str,
    typer.Option(
        "--ca-file", help="PEM file of the CA that signed the supervisor's certificate (default: FLYBALL_CA_FILE)"
    ),
]
ClientCertOption = Annotated[
    str,
    typer.Option("--client-cert-file", help="PEM file of the client certificate (default: FLYBALL_CLIENT_CERT_FILE)"),
]
ClientKeyOption = Annotated[
    str, typer.Option("--client-key-file", help="PEM file of the client's key (default: FLYBALL_CLIENT_KEY_FILE)")
]
DatabaseOption = Annotated[
    str, typer.Option("--database-url", help="read a supervisor's database directly, without the supervisor")
]
JobOption = Annotated[str, typer.Option("--job", help="only this job")]


def variable(name: str, **given: Any) -> Any:  # noqa: ANN401 - typer's
    """An option whose default the setting's variable replaces."""
    return typer.Option(f"--{name.replace('_', '-')}", envvar=f"FLYBALL_{name.upper()}", show_envvar=False, **given)


_WRAPPER = textwrap.TextWrapper(width=74, break_long_words=False, break_on_hyphens=False)  # fits into 80 columns

Command = Callable[..., Any]


def command_help(text: str, *lines: str) -> dict[str, Any]:
    """A command's help and examples, as arguments for typer. Lists of commands show only the first sentence."""
    return {"help": text, "short_help": text.partition(". ")[0].rstrip(".") + ".", "epilog": examples(*lines)}


def examples(*lines: str) -> str:
    """The examples at the end of a command's help. Long ones are wrapped so that a shell still accepts them."""
    return "\n".join(("Examples:", *(" \\\n    ".join(_WRAPPER.wrap(line)) for line in lines)))


def expand(parameter: str, build: Callable[..., Any], *, without: Collection[str] = ()) -> Callable[[Command], Command]:
    """Give a command the options of `build` (except `without`) in place of `parameter`, which gets what it returns.

    typer reads options off a function's signature, so the decorated command gets a new one.
    """
    shared = [p for p in inspect.signature(build, eval_str=True).parameters.values() if p.name not in without]

    def decorate(command: Command) -> Command:
        def expanded(**given: Any) -> Any:  # noqa: ANN401 - parsed by typer
            value = build(**{option.name: given.pop(option.name) for option in shared})
            return command(**{parameter: value}, **given)

        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name != parameter]
        expanded.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
        expanded.__name__, expanded.__doc__ = command.__name__, command.__doc__
        return expanded

    return decorate


def with_supervisor(*, without: Collection[str] = ("database_url",)) -> Callable[[Command], Command]:
    """Give a command with a parameter `choice` the options that choose a supervisor."""
    return expand("choice", _choice, without=without)


def _choice(
    *,
    supervisor: SupervisorOption = "",
    token_file: TokenFileOption = "",
    state_dir: StateDirOption = "",
    database_url: DatabaseOption = "",
) -> SupervisorChoice:
    return SupervisorChoice(supervisor, token_file, state_dir, database_url)
