"""The command line: `flyball`. `run` is started by hand, light and first; all other commands are typer's."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import NoReturn

from flyball.cli import completion
from flyball.cli.show.messages import say_error
from flyball.cli.signals import Interrupted
from flyball.contracts.errors import FlyballError
from flyball.process_start import import_lean, prefer_own_packages, without_collector

prefer_own_packages()  # before the commands: some import what users have packages of the same names as

INTERRUPTED = 130
BUG = 70  # EX_SOFTWARE of sysexits.h


def main() -> None:
    """Run the command line and exit with its code."""
    if completion.VARIABLE in os.environ:
        _exit_at_once(_complete())
    code = run_cli(sys.argv[1:])
    if sys.argv[1:2] == ["run"]:
        _exit_at_once(code)
    sys.exit(code)


def _complete() -> int:
    text, code = completion.answer(os.environ)
    if text:
        sys.stdout.write(f"{text}\n")
    return code


def _exit_at_once(code: int) -> NoReturn:
    """Without taking the interpreter down module by module, for which a shell would wait 0.2 s more: everything that
    was started has ended."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader is gone
            stream.flush()
    os._exit(code)


def run_cli(arguments: Sequence[str]) -> int:
    """The exit code of a command line. Errors go to stderr as cause and next step, never as a traceback."""
    try:
        return _dispatch(arguments)
    except FlyballError as error:
        say_error(error)
        return error.exit_code
    except Interrupted as signal:
        return signal.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `flyball status | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001 - the outermost frame: a bug is told, with its traceback in a file
        say_error(_bug(error))
        return BUG


def _dispatch(arguments: Sequence[str]) -> int:
    """Only what the command needs is imported: that takes longer than many of them."""
    if arguments[:1] == ["run"]:
        with without_collector():
            from flyball.cli.run.command import run

        return run(list(arguments[1:]))  # torchrun's grammar is argparse's: what follows the script is the script's
    import_lean("structlog", "httpx")
    from flyball.cli.commands import dispatch

    return dispatch(arguments)


def _bug(error: Exception) -> FlyballError:
    descriptor, path = tempfile.mkstemp(prefix="flyball-crash-", suffix=".txt")
    with os.fdopen(descriptor, "w") as file:
        file.write("".join(traceback.format_exception(error)))
    return FlyballError(
        f"Flyball met a bug of its own: {type(error).__name__}: {error}", hint=f"report it with the file {path}"
    )


if __name__ == "__main__":
    main()
