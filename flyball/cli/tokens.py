"""`flyball token`: tokens for hosts and for readers, and a new secret for the cluster."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from flyball.cli.reach.options import StateDirOption, SupervisorOption, TokenFileOption, connect, examples
from flyball.cli.reach.places import keep_token, supervisor_dir
from flyball.cli.show.output import say
from flyball.contracts import wire
from flyball.contracts.credentials import PREFIXES, host_credential, reader_token
from flyball.contracts.errors import ConfigurationError, Conflict, NotFound
from flyball.contracts.identity import check_name
from flyball.state_folder import sync_folder

OutOption = Annotated[str, typer.Option("--out", help="write it to this file (0600) instead of printing it")]
EPOCHS_VARIABLE = "FLYBALL_HOST_TOKEN_EPOCHS"
EpochOption = Annotated[
    int | None,
    typer.Option("--epoch", min=0, help=f"which of the host's tokens: the one that counts by {EPOCHS_VARIABLE}"),
]
SECRET_FILE, FORMER_FILE = "token", "token.former"

app = typer.Typer(
    help="Make tokens: for a host that joins, for who may only read; or a new secret for the cluster.",
    no_args_is_help=True,
)


@app.command(
    "host",
    epilog=examples(
        "flyball token host node-7 --out node-7.token", "ssh node-7 flyball host --token-file node-7.token"
    ),
)
def host(
    host_id: Annotated[str, typer.Argument(help="the host's id, as in `flyball host --host-id`")],
    *,
    out: OutOption = "",
    epoch: EpochOption = None,
    supervisor: SupervisorOption = "",
    token_file: TokenFileOption = "",
    state_dir: StateDirOption = "",
) -> None:
    """The token file of one host. Where the secret is on this machine no supervisor needs to run."""
    check_name("The host", host_id)
    secret = _secret_here(supervisor, token_file, state_dir)
    if secret:
        text = host_credential(secret, host_id, _epoch_here(host_id) if epoch is None else epoch).text()
    else:
        with connect(supervisor, token_file, state_dir) as client:
            made = client.post(f"/v1/hosts/{host_id}/token")
        if epoch not in (None, made.get("epoch", 0)):
            raise Conflict(
                f"The supervisor takes {host_id}'s token of epoch {made.get('epoch', 0)}, not {epoch}.",
                hint=f"give all services {EPOCHS_VARIABLE} with this host and start them again",
            )
        text = str(made["token_file"])
    _give(text, out)


@app.command("reader", epilog=examples("flyball token reader --out reader.token"))
def reader(
    *,
    out: OutOption = "",
    supervisor: SupervisorOption = "",
    token_file: TokenFileOption = "",
    state_dir: StateDirOption = "",
) -> None:
    """The token of those who may see everything and change nothing."""
    secret = _secret_here(supervisor, token_file, state_dir)
    if secret:
        text = reader_token(secret)
    else:
        with connect(supervisor, token_file, state_dir) as client:
            text = str(client.post("/v1/reader-token")["token"])
    _give(f"{text}\n", out)


@app.command("rotate", epilog=examples("flyball token rotate", "flyball token rotate --finish"))
def rotate(
    *,
    finish: Annotated[bool, typer.Option("--finish", help="take the former secret no more")] = False,
    state_dir: StateDirOption = "",
) -> None:
    """A new secret in the supervisor's state folder. The former one, and all tokens made of it, are good until
    `--finish`. Each takes effect when the supervisor is started again; training does not notice."""
    folder = Path(state_dir) if state_dir else supervisor_dir(os.environ)
    current, former = folder / SECRET_FILE, folder / FORMER_FILE
    if not current.is_file():
        raise NotFound(f"There is no token in {folder}.", hint="name the supervisor's state folder with --state-dir")
    if finish:
        former.unlink(missing_ok=True)
        say("start the supervisor again: from then on it takes the former secret no more")
        return
    if former.exists():
        raise Conflict(
            "The former secret is still good.", hint="hand out the new tokens, then `flyball token rotate --finish`"
        )
    new = keep_token(folder / f".{SECRET_FILE}.new", secrets.token_urlsafe(32))
    os.link(current, former)
    new.rename(current)
    sync_folder(folder)
    say("1. start the supervisor again")
    say("2. write each host's new token with `flyball token host HOST_ID`; a running daemon finds it by itself")
    say("3. flyball token rotate --finish, and start the supervisor again")


def _epoch_here(host_id: str) -> int:
    """Which token of a host counts, as the services on this machine are told."""
    try:
        return wire.decoder_of(dict[str, int]).decode(os.environ.get(EPOCHS_VARIABLE) or "{}").get(host_id, 0)
    except msgspec.DecodeError as error:
        raise ConfigurationError(
            f"{EPOCHS_VARIABLE} is wrong: {error}.", hint='it looks like {"node-7": 1}: which token of a host counts'
        ) from error


def _secret_here(supervisor: str, token_file: str, state_dir: str) -> str:
    """The cluster's secret, if a file on this machine or the environment has it; else ''."""
    if supervisor or os.environ.get("FLYBALL_SUPERVISOR"):
        return ""
    if not token_file and os.environ.get("FLYBALL_TOKEN"):
        secret = os.environ["FLYBALL_TOKEN"].strip()
    else:
        folder = Path(state_dir) if state_dir else supervisor_dir(os.environ)
        file = Path(token_file or os.environ.get("FLYBALL_TOKEN_FILE") or folder / SECRET_FILE)
        if not file.is_file():
            return ""
        try:
            secret = file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"The token file {file} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}.",
                hint="run this as its owner, or give another with --token-file",
            ) from error
    if secret.startswith(PREFIXES):
        raise ConfigurationError(
            "This token makes no others: it is a host's or a reader's.",
            hint="give the operator's: the file `token` of the supervisor's state folder",
        )
    return secret


def _give(text: str, out: str) -> None:
    if not out:
        typer.echo(text, nl=False)
        return
    keep_token(Path(out), text)
    say(f"written to {out}")
