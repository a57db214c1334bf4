"""Options that several commands share: which supervisor, and how to prove oneself to it."""

from __future__ import annotations

import os
import textwrap
from typing import Annotated

import typer

from flyball.cli.client import ApiClient
from flyball.cli.places import find_supervisor

SupervisorOption = Annotated[
    str, typer.Option("--supervisor", help="address of the supervisor (default: FLYBALL_SUPERVISOR, or the one here)")
]
TokenFileOption = Annotated[
    str, typer.Option("--token-file", help="file with its token (default: FLYBALL_TOKEN, or its state folder's)")
]
StateDirOption = Annotated[str, typer.Option("--state-dir", help="its state folder, if it runs on this machine")]
CaFileOption = Annotated[
    str, typer.Option("--ca-file", help="PEM of the authority behind its certificate (default: FLYBALL_CA_FILE)")
]
ClientCertOption = Annotated[
    str, typer.Option("--client-cert-file", help="PEM to show if it asks (default: FLYBALL_CLIENT_CERT_FILE)")
]
ClientKeyOption = Annotated[str, typer.Option("--client-key-file", help="its key (default: FLYBALL_CLIENT_KEY_FILE)")]
JobOption = Annotated[str, typer.Option("--job", help="only this job")]

_SHORT = textwrap.TextWrapper(width=74, break_long_words=False, break_on_hyphens=False)  # of 80 columns


def connect(supervisor: str, token_file: str, state_dir: str) -> ApiClient:
    """A client for the supervisor that the options, the environment or this machine name."""
    found = find_supervisor(os.environ, url=supervisor, token_file=token_file, state_dir=state_dir)
    return ApiClient(found.url, found.token)


def examples(*lines: str) -> str:
    """The end of a command's help: a line for each, as a shell takes it also where it is long."""
    return "\n".join(("Examples:", *(" \\\n    ".join(_SHORT.wrap(line)) for line in lines)))
