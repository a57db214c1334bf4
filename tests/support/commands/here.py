"""Commands of `flyball` that are run in the tests' own process: to start another one costs more than most commands."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from subprocess import CompletedProcess
from unittest.mock import patch

from flyball.cli.main import run_cli


def run_here(*arguments: str, environment: Mapping[str, str]) -> CompletedProcess[str]:
    """Run a command line with this environment, and no terminal. Not for commands that start processes."""
    with (
        patch.dict(os.environ, environment, clear=True),
        redirect_stdout(_stream()) as out,
        redirect_stderr(_stream()) as err,
    ):
        try:
            code = run_cli(list(arguments))
        except SystemExit as end:  # argparse has shown its help
            code = int(end.code or 0)
    return CompletedProcess(arguments, code, _text(out), _text(err))


def _stream() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8")


def _text(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()
