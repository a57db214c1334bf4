"""The commands as typer knows them, each in a module of its own; heavy imports wait until one is run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from flyball import __version__
from flyball.cli import database, drain, explain, host, inject, ls, replay, status, stop, tokens, up
from flyball.cli.ckpt import command as ckpt
from flyball.cli.completion import VARIABLE
from flyball.cli.demo import command as demo
from flyball.cli.goodput import command as goodput
from flyball.cli.logs import command as logs
from flyball.cli.show.output import say
from flyball.contracts.errors import UsageError

# typer's own exceptions have moved between packages; this one is a base of a public one.
UsageProblem: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="flyball",
    help="Supervise PyTorch training: detect every fault, act on it, lose no progress.",
    epilog="First steps:  flyball demo  |  flyball run train.py  |  flyball status",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(
    "run",
    help="Run a training script under supervision, in place of torchrun.",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def _run(arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> int:
    """Listed in the help; main() hands the words on before typer sees them, since torchrun's grammar is argparse's."""
    from flyball.cli.run.command import run

    return run(arguments or [])


app.command("demo", **demo.COMMAND)(demo.command)
app.command("up", **up.COMMAND)(up.command)
app.command("drain", **drain.COMMAND)(drain.command)
app.command("ls", **ls.COMMAND)(ls.command)
app.command("stop", **stop.COMMAND)(stop.command)
app.command("status", **status.COMMAND)(status.command)
app.command("logs", **logs.COMMAND)(logs.command)
app.command("explain", **explain.COMMAND)(explain.command)
app.command("replay", **replay.COMMAND)(replay.command)
app.add_typer(host.app, name="host")
app.add_typer(goodput.app, name="goodput")
app.add_typer(ckpt.app, name="ckpt")
app.add_typer(inject.app, name="inject")
app.add_typer(tokens.app, name="token")
app.add_typer(database.app, name="db")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"flyball {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="show the version"),
) -> None:
    pass


def as_click() -> Any:  # noqa: ANN401 - click's classes move between packages, see above
    """All commands, for who looks through them."""
    return typer.main.get_command(app)


SHELLS = ("bash", "zsh", "fish")


def _completion_for(flag: str, shell: str) -> int:
    """As typer's own flags do for the shell that they are called from. Raises UsageError."""
    from typer._completion_shared import get_completion_script, install

    if shell not in SHELLS:
        raise UsageError(f"There is no completion for {shell}.", hint=f"{flag} {' | '.join(SHELLS)}")
    if flag == "--show-completion":
        typer.echo(get_completion_script(prog_name="flyball", complete_var=VARIABLE, shell=shell))
    else:
        _, path = install(shell=shell, prog_name="flyball", complete_var=VARIABLE)
        say(f"{shell} completion is installed in {path}; it works in the next shell")
    return 0


def dispatch(arguments: Sequence[str]) -> int:
    """The exit code of a command line. Raises UsageError, and what the command does."""
    if len(arguments) == 2 and arguments[0] in ("--show-completion", "--install-completion"):
        return _completion_for(*arguments)
    if arguments[:1] == ["goodput"]:
        arguments = ["goodput", *goodput.in_full(arguments[1:])]
    try:
        result = app(list(arguments), prog_name="flyball", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except UsageProblem as error:
        message = str(error.format_message() if hasattr(error, "format_message") else error)
        if not message.strip():  # no command at all: the help has been printed
            return UsageError.exit_code
        context = getattr(error, "ctx", None)
        raise UsageError(message, hint=f"{context.command_path if context else 'flyball'} --help") from error
    return result if isinstance(result, int) else 0
