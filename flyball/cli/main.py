"""Entry point of the `flyball` command. `run` bypasses typer, so that it starts fast; typer handles all others."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import resource
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from flyball.cli import completion
from flyball.cli.show.messages import print_error
from flyball.cli.signals import Interrupted
from flyball.contracts.errors import ConfigurationError, FlyballError
from flyball.process_start import import_lean, prefer_own_packages, without_collector

prefer_own_packages()  # first: users have packages named like some that the commands import (goodput, services)

INTERRUPTED = 130
BUG = 70  # EX_SOFTWARE of sysexits.h


def main() -> None:
    """Run the command line and exit with its code."""
    open_closed_streams()
    if completion.VARIABLE in os.environ:
        _exit_at_once(_complete())
    code = run_cli(sys.argv[1:])
    if sys.argv[1:2] == ["run"]:
        _exit_at_once(code)
    sys.exit(code)


def open_closed_streams() -> None:
    """Treat a standard stream that is closed as /dev/null. Some service managers start programs without; the next file
    opened would else be taken for it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)  # which gets the lowest free number
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            stream = open(number, "r" if number == 0 else "w", closefd=False)  # noqa: SIM115 - as python's own
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def _complete() -> int:
    text, code = completion.answer(os.environ, _load_commands)
    if text:
        sys.stdout.write(f"{text}\n")
    return code


def _load_commands() -> Any:  # noqa: ANN401 - a click group, whose class has moved between packages
    from flyball.cli.commands import as_click

    return as_click()


def _exit_at_once(code: int) -> NoReturn:
    """Exit without tearing down the interpreter, which would cost 0.2 s. Everything that was started has ended."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def run_cli(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code. Errors are printed as cause and next step, never as a traceback."""
    try:
        return _dispatch(arguments)
    except FlyballError as error:
        print_error(error)
        return error.exit_code
    except Interrupted as signal:
        return signal.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `flyball status | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001 - outermost frame: report the bug, with its traceback in a file
        is_limit = getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)
        print_error(_too_few_files() if is_limit else _bug(error))
        return ConfigurationError.exit_code if is_limit else BUG


def _dispatch(arguments: Sequence[str]) -> int:
    """Import only what the command needs: the imports take longer than many commands."""
    if arguments[:1] == ["run"]:
        with without_collector():
            from flyball.cli.run.command import run

        return run(list(arguments[1:]))  # argparse's grammar, as torchrun's: the script owns all words after it
    import_lean("structlog", "httpx")
    from flyball.cli.commands import dispatch

    return dispatch(arguments)


def _too_few_files() -> FlyballError:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return ConfigurationError(
        f"This process may open {most} files at once, and needs more.",
        hint="raise the limit (ulimit -n 4096), or have your system's administrator raise it",
    )


def _bug(error: Exception) -> FlyballError:
    descriptor, path = tempfile.mkstemp(prefix="flyball-crash-", suffix=".txt")
    with os.fdopen(descriptor, "w") as file:
        file.write("".join(traceback.format_exception(error)))
    return FlyballError(
        f"This is a bug in Flyball: {type(error).__name__}: {error}", hint=f"report it and attach the file {path}"
    )


if __name__ == "__main__":
    main()
