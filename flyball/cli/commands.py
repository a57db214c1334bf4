"""Registers the commands with typer. Each is a module of its own, and delays its heavy imports until it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from flyball import __version__
from flyball.cli import completion, config, database, host, tokens, up
from flyball.cli.act import check, drain, orders, stop
from flyball.cli.ckpt import command as ckpt
from flyball.cli.demo import command as demo
from flyball.cli.doctor import command as doctor
from flyball.cli.goodput import command as goodput
from flyball.cli.inject import command as inject
from flyball.cli.logs import command as logs
from flyball.cli.look import describe, explain, get, ls, status, watch
from flyball.cli.show.output import announce
from flyball.cli.simulate import command as simulate
from flyball.contracts.errors import UsageError

# The class has moved between typer's packages, so take it as the base of a public one.
UsageProblem: type[Exception] = typer.BadParameter.__mro__[1]

SHORTHANDS = {"--json": "--output=json", "--wide": "--output=wide"}

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
    """Only listed in the help: main() handles `run` before typer, because torchrun's grammar is argparse's."""
    from flyball.cli.run.command import run

    return run(arguments or [])


app.command("demo", **demo.COMMAND)(demo.command)
app.command("up", **up.COMMAND)(up.command)
app.command("drain", **drain.COMMAND)(drain.command)
app.command("cordon", **orders.CORDON)(orders.cordon)
app.command("uncordon", **orders.UNCORDON)(orders.uncordon)
app.command("check", **check.COMMAND)(check.command)
app.command("silence", **orders.SILENCE)(orders.silence)
app.command("approve", **orders.APPROVE)(orders.approve)
app.command("adopt", **orders.ADOPT)(orders.adopt)
app.command("doctor", **doctor.COMMAND)(doctor.command)
app.command("ls", **ls.COMMAND)(ls.command)
app.command("stop", **stop.COMMAND)(stop.command)
app.command("status", **status.COMMAND)(status.command)
app.command("get", **get.COMMAND)(get.command)
app.command("describe", **describe.COMMAND)(describe.command)
app.command("watch", **watch.COMMAND)(watch.command)
app.command("logs", **logs.COMMAND)(logs.command)
app.command("explain", **explain.COMMAND)(explain.command)
app.command("replay", **database.REPLAY)(database.replay)
app.add_typer(host.app, name="host")
app.add_typer(goodput.app, name="goodput")
app.add_typer(ckpt.app, name="ckpt")
app.add_typer(ckpt.app, name="checkpoint", hidden=True)  # the same, written out
app.add_typer(inject.app, name="inject")
app.add_typer(simulate.app, name="simulate")
app.add_typer(tokens.app, name="token")
app.add_typer(database.app, name="db")
app.add_typer(config.app, name="config")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flyball {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="show the version"),
) -> None:
    pass


def as_click() -> Any:  # noqa: ANN401 - click's classes have moved between packages, see above
    """All commands as one click group, for introspection."""
    return typer.main.get_command(app)


def dispatch(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code. Raises UsageError, and whatever the command raises."""
    match arguments:  # typer's own flags take no shell: they guess it from the calling process
        case ["--show-completion", shell]:
            typer.echo(completion.script(shell))
            return 0
        case ["--install-completion", shell]:
            announce(f"installed {shell} completion in {completion.install_script(shell)}; open a new shell to use it")
            return 0
    arguments = [SHORTHANDS.get(word, word) for word in arguments]
    if arguments[:1] == ["goodput"]:
        arguments = ["goodput", *goodput.in_full(arguments[1:])]
    try:
        result = app(list(arguments), prog_name="flyball", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except UsageProblem as error:
        message = str(error.format_message() if hasattr(error, "format_message") else error)
        if not message.strip():  # no command given: typer has printed the help
            return UsageError.exit_code
        context = getattr(error, "ctx", None)
        raise UsageError(message, hint=f"{context.command_path if context else 'flyball'} --help") from error
    return result if isinstance(result, int) else 0
