"""Options that several commands share: which supervisor, and how to prove oneself to it."""

from __future__ import annotations

import os
import textwrap
from typing import Annotated

import typer

from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.sources import connect_live, look_at

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
DatabaseOption = Annotated[
    str, typer.Option("--database-url", help="read a supervisor's database instead; nothing is changed in it")
]
JobOption = Annotated[str, typer.Option("--job", help="only this job")]

_SHORT = textwrap.TextWrapper(width=74, break_long_words=False, break_on_hyphens=False)  # of 80 columns


def connect(supervisor: str, token_file: str, state_dir: str, job: str = "") -> ApiClient:
    """A client for the supervisor that the options, the environment or this machine name."""
    return connect_live(os.environ, url=supervisor, token_file=token_file, state_dir=state_dir, job=job)


def look(supervisor: str, token_file: str, state_dir: str, *, job: str = "", database_url: str = "") -> ApiClient:
    """As `connect`, to look only: also at what a supervisor left that has ended."""
    return look_at(
        os.environ,
        url=supervisor,
        token_file=token_file,
        state_dir=state_dir,
        job=job,
        database_url=database_url,
    )


def examples(*lines: str) -> str:
    """The end of a command's help: a line for each, as a shell takes it also where it is long."""
    return "\n".join(("Examples:", *(" \\\n    ".join(_SHORT.wrap(line)) for line in lines)))
