"""`flyball inject agent`, and the connection to agents."""

from __future__ import annotations

import secrets
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flyball.cli.inject.faults import LOOK_INTERVAL_S, Reach, reach_stack
from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.options import expand
from flyball.cli.show.output import announce
from flyball.cli.signals import EndSignals
from flyball.contracts.errors import Unauthorized
from flyball.state_folder import clear_errors, create_once

if TYPE_CHECKING:
    from simulator.inject.agents import Agents

DEFAULT_PORT = 7390
TOKEN_BYTES = 32


@expand("reach", reach_stack)
def agent(
    *,
    agent_token_file: Annotated[
        Path, typer.Option("--agent-token-file", help="file with the agent's own token; made if there is none")
    ],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 picks a free one")] = DEFAULT_PORT,
    reach: Reach,
) -> int:
    """Runs until Ctrl-C or SIGTERM, and then undoes all that it injected."""
    from simulator.inject.agent import InjectionAgent

    with clear_errors(agent_token_file):
        if not agent_token_file.exists():
            create_once(agent_token_file, f"{secrets.token_urlsafe(TOKEN_BYTES)}\n".encode())
        token = agent_token_file.read_text().strip()
    idle = threading.Event()
    with (
        EndSignals(("SIGTERM", "SIGINT")) as signals,
        reach.open() as (_, injector),
        InjectionAgent(injector, token, port=port, announce=announce) as serving,
    ):
        announce(f"injecting for campaigns at {serving.url}; the token is in {agent_token_file}")
        while not signals.count:
            idle.wait(LOOK_INTERVAL_S)
    return 0


def agents_of(supervisor: ApiClient, urls: list[str], token_file: str) -> Agents:
    """The agents at these addresses. Raises Unauthorized without their token."""
    from simulator.inject.agents import Agents

    try:
        token = Path(token_file).read_text().strip() if token_file else ""
    except OSError as error:
        raise Unauthorized(f"{token_file} cannot be read: {error.strerror}.", hint="copy it from the agent") from error
    if not token:
        raise Unauthorized("The agents' token is missing.", hint="give --agent-token-file FILE")
    return Agents(supervisor, [ApiClient(url.rstrip("/"), token) for url in urls])
