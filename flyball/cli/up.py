"""`flyball up`: run a supervisor in the foreground."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Annotated

import typer

from flyball.cli.reach.options import command_help, variable
from flyball.cli.reach.places import make_state_dir, supervisor_dir
from flyball.cli.reach.this_host import is_here_only
from flyball.cli.run.embedded import start_supervisor
from flyball.cli.show.output import Format, OutputOption, announce, print_fields, printed
from flyball.cli.signals import EndSignals
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import FlyballError
from flyball.layered_settings import unread_variables
from flyball.service_manager import ServiceManager

DEFAULT_PORT = 7370
LOOK_INTERVAL_S = 0.2

COMMAND = command_help(
    "Run a supervisor in the foreground. One process has the sensor, controller, actuator, API and dashboard. Ctrl-C "
    "or SIGTERM stops it; training goes on without it.",
    "flyball up",
    "flyball up --host 0.0.0.0 --port 7370",
    "flyball up --database-url mysql+pymysql://flyball@db/flyball",
)


def command(
    *,
    state_dir: Annotated[str, typer.Option(help="folder for its database, token and log")] = "",
    port: Annotated[
        int, variable("port", min=0, max=65535, help="port to listen on; 0 picks a free one")
    ] = DEFAULT_PORT,
    host: Annotated[
        str, variable("host", help="address to listen on; 0.0.0.0 lets other machines connect")
    ] = "127.0.0.1",
    database_url: Annotated[str, typer.Option(help="SQLAlchemy URL (default: SQLite in the state folder)")] = "",
    redis_url: Annotated[
        str, typer.Option(help="Redis for the signals if several supervisors share a database: redis://host:6379/0")
    ] = "",
    tls_cert_file: Annotated[str, typer.Option(help="PEM file of the server's certificate chain (enables https)")] = "",
    tls_key_file: Annotated[str, typer.Option(help="PEM file of the server's key, not password-protected")] = "",
    tls_client_ca_file: Annotated[
        str, typer.Option(help="PEM file of a CA; only clients with a certificate from it may connect")
    ] = "",
    output: OutputOption = Format.TABLE,
) -> int:
    """Runs until SIGTERM or Ctrl-C. Running requests may finish; training is not affected."""
    from services.runtime.process import allow_many_connections

    allow_many_connections()
    for said in unread_variables(os.environ):
        announce(said)
    manager = ServiceManager(os.environ, SystemClock())
    folder = make_state_dir(Path(state_dir) if state_dir else supervisor_dir(os.environ))
    with EndSignals(("SIGTERM", "SIGINT", "SIGHUP")) as signals:
        supervisor = start_supervisor(
            folder,
            host=host,
            port=port,
            database_url=database_url or None,
            redis_url=redis_url or None,
            tls_cert_file=tls_cert_file or None,
            tls_key_file=tls_key_file or None,
            tls_client_ca_file=tls_client_ca_file or None,
        )
        try:
            is_own_token = not (os.environ.get("FLYBALL_TOKEN") or os.environ.get("FLYBALL_TOKEN_FILE"))
            facts = {
                "url": supervisor.url,
                "token_file": str(folder / "token") if is_own_token else None,
                "token": "in the token file" if is_own_token else "of the environment: FLYBALL_TOKEN, or its _FILE",
                "dashboard": f"{supervisor.url}/?token={supervisor.token}",
                "state_dir": str(folder),
            }
            if not printed(facts, output):
                print_fields(facts)
                _announce_next_steps(supervisor.url, host, folder, is_own_token=is_own_token)
            manager.ready()
            idle = threading.Event()
            while not signals.count:
                idle.wait(LOOK_INTERVAL_S)
                if supervisor.responds:
                    manager.alive()
                if supervisor.failed:
                    raise FlyballError(
                        "A part of the supervisor failed.",
                        hint=f"read {folder / 'supervisor.log'}, then start it again",
                    )
            announce("stopping; training goes on without a supervisor")
        finally:
            manager.stopping()
            supervisor.stop()
    return 0


def _announce_next_steps(url: str, host: str, folder: Path, *, is_own_token: bool) -> None:
    if not is_own_token:
        announce("commands and hosts need the same FLYBALL_TOKEN or FLYBALL_TOKEN_FILE in their environment")
    if is_here_only(host):
        is_default = folder == supervisor_dir(os.environ).resolve()
        token = f" --token-file {folder / 'token'}" if is_own_token else ""
        flags = "" if is_default else f" --supervisor {url}{token}"
        announce(f"add this machine as a host: flyball host{flags}   (for other machines, see --host)")
    else:
        announce(f"make a token for each host: flyball token host NAME --state-dir {folder} --out NAME.token")
        announce(
            f"then, on that host: flyball host --host-id NAME --supervisor {_remote_url(url)} --token-file NAME.token"
        )
        if url.startswith("https:"):
            announce("hosts also need --ca-file FILE, unless a CA that their system trusts signed the certificate")
        else:
            announce("WARNING: no TLS: anybody who can listen on this network can read the tokens; see --tls-cert-file")


def _remote_url(url: str) -> str:
    return url.replace("//127.0.0.1:", "//THIS-MACHINE:").replace("//[::1]:", "//THIS-MACHINE:")
