"""The command line: `flyball`. Each command lives in a module of its own; heavy imports wait until one is run."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback

import typer

from flyball import __version__
from flyball.cli.output import say_error
from flyball.cli.own_packages import prefer_own_packages
from flyball.contracts.errors import FlyballError, UsageError

prefer_own_packages()  # before the commands: some import what users have packages of the same names as

from flyball.cli import (  # noqa: E402 - see above
    ckpt,
    demo,
    drain,
    explain,
    goodput,
    host,
    inject,
    replay,
    run,
    status,
    tokens,
    up,
)

INTERRUPTED = 130
BUG = 70  # EX_SOFTWARE of sysexits.h

# typer's own exceptions have moved between packages; these two are bases of a public one.
UsageProblem: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="flyball",
    help="Supervise PyTorch training: detect every fault, act on it, lose no progress.",
    epilog="First steps:  flyball demo  |  flyball run train.py  |  flyball status",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run", **run.COMMAND)(run.command)
app.command("demo", **demo.COMMAND)(demo.command)
app.command("up", **up.COMMAND)(up.command)
app.command("host", **host.COMMAND)(host.command)
app.command("drain", **drain.COMMAND)(drain.command)
app.command("status", **status.COMMAND)(status.command)
app.command("explain", **explain.COMMAND)(explain.command)
app.command("replay", **replay.COMMAND)(replay.command)
app.add_typer(goodput.app, name="goodput")
app.add_typer(ckpt.app, name="ckpt")
app.add_typer(inject.app, name="inject")
app.add_typer(tokens.app, name="token")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"flyball {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="show the version"),
) -> None:
    pass


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(run_cli(sys.argv[1:]))


def run_cli(arguments: list[str]) -> int:
    """The exit code of a command line. Errors go to stderr as cause and next step, never as a traceback."""
    try:
        return _dispatch(arguments)
    except FlyballError as error:
        say_error(error)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:  # `flyball status | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001 - the outermost frame: a bug is told, with its traceback in a file
        say_error(_bug(error))
        return BUG


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["run"]:
        return run.run(arguments[1:])  # torchrun's grammar is argparse's: what follows the script is the script's
    if arguments[:1] == ["goodput"]:
        arguments = ["goodput", *goodput.in_full(arguments[1:])]
    try:
        result = app(arguments, prog_name="flyball", standalone_mode=False)
    except UsageProblem as error:
        message = str(error.format_message() if hasattr(error, "format_message") else error)
        if not message.strip():  # no command at all: the help has been printed
            return UsageError.exit_code
        context = getattr(error, "ctx", None)
        raise UsageError(message, hint=f"{context.command_path if context else 'flyball'} --help") from error
    return result if isinstance(result, int) else 0


def _bug(error: Exception) -> FlyballError:
    descriptor, path = tempfile.mkstemp(prefix="flyball-crash-", suffix=".txt")
    with os.fdopen(descriptor, "w") as file:
        file.write("".join(traceback.format_exception(error)))
    return FlyballError(
        f"Flyball met a bug of its own: {type(error).__name__}: {error}", hint=f"report it with the file {path}"
    )


if __name__ == "__main__":
    main()
