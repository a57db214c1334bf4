"""A supervisor inside the process of a command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.main import Supervisor


def start_supervisor(
    state_dir: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    database_url: str | None = None,
    token: str | None = None,
) -> Supervisor:
    """Bring one up; it answers when this returns. Raises PortInUse, StateVersionMismatch, ConfigurationError."""
    from services.main import Supervisor  # FastAPI, SQLAlchemy, ...: a second of imports that other commands save
    from services.runtime.settings import load_settings

    supervisor = Supervisor(
        load_settings(state_dir=state_dir, host=host, port=port, database_url=database_url, token=token)
    )
    supervisor.start()
    return supervisor
