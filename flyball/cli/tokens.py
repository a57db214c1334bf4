"""`flyball token`: make tokens for hosts and readers, and replace the cluster's secret."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from flyball.cli.reach.options import StateDirOption, command_help, examples, with_supervisor
from flyball.cli.reach.places import keep_token, supervisor_dir
from flyball.cli.reach.sources import SupervisorChoice
from flyball.cli.show.output import announce
from flyball.contracts import wire
from flyball.contracts.credentials import (
    OPERATORS_FILE,
    PREFIXES,
    host_credential,
    operator_token,
    read_operators,
    reader_token,
    token_digest,
)
from flyball.contracts.errors import ConfigurationError, Conflict, NotFound
from flyball.contracts.identity import check_name
from flyball.state_folder import clear_errors, sync_folder, write_private

OutOption = Annotated[str, typer.Option("--out", help="write it to this file (mode 0600) instead of printing it")]
EPOCHS_VARIABLE = "FLYBALL_HOST_TOKEN_EPOCHS"
EpochOption = Annotated[
    int | None,
    typer.Option("--epoch", min=0, help=f"token epoch, to replace a revoked token (default: from {EPOCHS_VARIABLE})"),
]
SECRET_FILE, FORMER_FILE = "token", "token.former"

app = typer.Typer(
    **command_help(
        "Make a token for a host, a reader or an operator, or replace the cluster's secret.",
        "flyball token host node-7 --out node-7.token",
        "flyball token reader",
        "flyball token operator alice --out alice.token",
        "flyball token rotate",
    ),
    no_args_is_help=True,
)


@app.command(
    "host",
    epilog=examples("flyball token host node-7", "flyball token host node-7 --out node-7.token"),
)
@with_supervisor()
def host(
    host_id: Annotated[str, typer.Argument(help="the host's id, as in `flyball host --host-id`")],
    *,
    out: OutOption = "",
    epoch: EpochOption = None,
    choice: SupervisorChoice,
) -> None:
    """Make the token file of one host. Needs no running supervisor if the cluster's secret is on this machine."""
    check_name("The host", host_id)
    secret = _local_secret(choice)
    if secret:
        text = host_credential(secret, host_id, _local_epoch(host_id) if epoch is None else epoch).text()
    else:
        with choice.connect() as client:
            made = client.post(f"/v1/hosts/{host_id}/token")
        if epoch not in (None, made.get("epoch", 0)):
            raise Conflict(
                f"The supervisor accepts {host_id}'s token of epoch {made.get('epoch', 0)}, not {epoch}.",
                hint=f"set {EPOCHS_VARIABLE} with this host for all services and restart them",
            )
        text = str(made["token_file"])
    _output(text, out)


@app.command("reader", epilog=examples("flyball token reader --out reader.token"))
@with_supervisor()
def reader(*, out: OutOption = "", choice: SupervisorChoice) -> None:
    """Make a token that can read everything and change nothing."""
    secret = _local_secret(choice)
    if secret:
        text = reader_token(secret)
    else:
        with choice.connect() as client:
            text = str(client.post("/v1/reader-token")["token"])
    _output(f"{text}\n", out)


@app.command(
    "operator",
    **command_help(
        "Make a token for an operator with a name, which the audit log then shows. Only its digest is kept, in the "
        f"file {OPERATORS_FILE} of the supervisor's state folder. It replaces the name's former token at once.",
        "flyball token operator alice --out alice.token",
        "flyball token operator alice --remove",
    ),
)
def operator(
    name: Annotated[str, typer.Argument(help="who it is")],
    *,
    out: OutOption = "",
    remove: Annotated[bool, typer.Option("--remove", help="take the token back instead")] = False,
    state_dir: StateDirOption = "",
) -> None:
    """Several supervisors of one cluster need the same file."""
    check_name("The operator", name)
    folder = Path(state_dir) if state_dir else supervisor_dir(os.environ)
    if not folder.is_dir():
        raise NotFound(f"There is no folder {folder}.", hint="name the supervisor's state folder with --state-dir")
    file = folder / OPERATORS_FILE
    with clear_errors(file):
        known = read_operators(file.read_text()) if file.exists() else {}
        if remove and name not in known:
            raise NotFound(f"No operator is named {name}.", hint=f"those in {file} are: {', '.join(known) or 'none'}")
        known.pop(name, None)
        token = "" if remove else operator_token(name)
        if token:
            known[name] = token_digest(token.encode())
        write_private(file, "".join(f"{each} {digest}\n" for each, digest in sorted(known.items())).encode())
    if token:
        _output(f"{token}\n", out)
    else:
        announce(f"{name}'s token and sessions are refused from now on")


@app.command(
    "rotate",
    **command_help(
        "Make a new secret in the supervisor's state folder. The former secret and its tokens stay valid until you run "
        "this again with --finish. Restart the supervisor after each of the two; training is not affected.",
        "flyball token rotate",
        "flyball token rotate --finish",
    ),
)
def rotate(
    *,
    finish: Annotated[bool, typer.Option("--finish", help="stop accepting the former secret")] = False,
    state_dir: StateDirOption = "",
) -> None:
    """Keeps the former secret in a file of its own until `--finish`."""
    folder = Path(state_dir) if state_dir else supervisor_dir(os.environ)
    current, former = folder / SECRET_FILE, folder / FORMER_FILE
    if not current.is_file():
        raise NotFound(f"There is no token in {folder}.", hint="name the supervisor's state folder with --state-dir")
    if finish:
        former.unlink(missing_ok=True)
        announce("restart the supervisor: from then on it no longer accepts the former secret")
        return
    if former.exists():
        raise Conflict(
            "The former secret is still valid.",
            hint="distribute the new tokens, then run `flyball token rotate --finish`",
        )
    new = keep_token(folder / f".{SECRET_FILE}.new", secrets.token_urlsafe(32))
    write_private(former, current.read_bytes())
    new.rename(current)
    sync_folder(folder)
    announce("1. restart the supervisor")
    announce(
        "2. write each host's new token with `flyball token host HOST_ID`; running daemons pick it up by themselves"
    )
    announce("3. run `flyball token rotate --finish`, and restart the supervisor again")


def _local_epoch(host_id: str) -> int:
    """The host's valid token epoch, as configured for the services on this machine."""
    try:
        return wire.decoder_of(dict[str, int]).decode(os.environ.get(EPOCHS_VARIABLE) or "{}").get(host_id, 0)
    except msgspec.DecodeError as error:
        raise ConfigurationError(
            f"{EPOCHS_VARIABLE} is malformed: {error}.",
            hint='write the token epoch of each host, for example {"node-7": 1}',
        ) from error


def _local_secret(choice: SupervisorChoice) -> str:
    """The cluster's secret, if it is in a file on this machine or in the environment; else ''."""
    if choice.url or os.environ.get("FLYBALL_SUPERVISOR"):
        return ""
    if not choice.token_file and os.environ.get("FLYBALL_TOKEN"):
        secret = os.environ["FLYBALL_TOKEN"].strip()
    else:
        folder = Path(choice.state_dir) if choice.state_dir else supervisor_dir(os.environ)
        file = Path(choice.token_file or os.environ.get("FLYBALL_TOKEN_FILE") or folder / SECRET_FILE)
        if not file.is_file():
            return ""
        try:
            secret = file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"Cannot read the token file {file}: {getattr(error, 'strerror', None) or 'it is not text'}.",
                hint="run this as its owner, or name another file with --token-file",
            ) from error
    if secret.startswith(PREFIXES):
        raise ConfigurationError(
            "This is not the cluster's secret, so it cannot make other tokens here.",
            hint="use the file `token` in the supervisor's state folder, or ask the supervisor, with --supervisor",
        )
    return secret


def _output(text: str, out: str) -> None:
    if not out:
        typer.echo(text, nl=False)
        return
    keep_token(Path(out), text)
    announce(f"wrote {out}")
