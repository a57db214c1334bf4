"""`flyball up`: a supervisor in the foreground."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from flyball.cli.embedded import start_supervisor
from flyball.cli.options import examples
from flyball.cli.output import Format, OutputOption, print_fields, print_json, say
from flyball.cli.places import make_state_dir, supervisor_dir
from flyball.cli.signals import EndSignals
from flyball.contracts.errors import FlyballError

DEFAULT_PORT = 7370
LOOK_INTERVAL_S = 0.2

COMMAND: dict[str, Any] = {
    "help": "Run a supervisor in the foreground: sensor, controller, actuator, API and status page in one process.",
    "epilog": examples(
        "flyball up", "flyball up --host 0.0.0.0 --port 7370", "flyball up --database-url mysql+pymysql://…"
    ),
}


def command(
    *,
    state_dir: Annotated[str, typer.Option(help="where its database, token and log are kept")] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen on; 0: any free one")] = DEFAULT_PORT,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    database_url: Annotated[str, typer.Option(help="SQLAlchemy URL (default: SQLite in the state folder)")] = "",
    output: OutputOption = Format.TABLE,
) -> int:
    """Until SIGTERM or Ctrl-C, which let running requests end and leave training alone."""
    folder = make_state_dir(Path(state_dir) if state_dir else supervisor_dir(os.environ))
    with EndSignals(("SIGTERM", "SIGINT", "SIGHUP")) as signals:
        supervisor = start_supervisor(folder, host=host, port=port, database_url=database_url or None)
        try:
            facts = {
                "url": supervisor.url,
                "token_file": str(folder / "token"),
                "dashboard": f"{supervisor.url}/?token={supervisor.token}",
                "state_dir": str(folder),
            }
            if output is Format.JSON:
                print_json(facts)
            else:
                print_fields(facts)
                say(f"hosts join with: flyball host --supervisor {supervisor.url} --token-file {folder / 'token'}")
            idle = threading.Event()
            while not signals.count:
                idle.wait(LOOK_INTERVAL_S)
                if supervisor.failed:
                    raise FlyballError(
                        "A part of the supervisor was given up.",
                        hint=f"read {folder / 'supervisor.log'}, then start it again",
                    )
            say("stopping; training goes on without a supervisor")
        finally:
            supervisor.stop()
    return 0
