"""Writes the API's documents, without a server: the reference, or the OpenAPI document for generators of clients.

python -m services.describe_api > api.md
python -m services.describe_api --json > openapi.json

Neither is kept: `make docs` puts both into the site, and each supervisor serves both, at /docs and /openapi.json.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from flyball.contracts.clock import SystemClock
from services.api.app import create_app
from services.api.description.reference import markdown, reference
from services.assembly import Assembly
from services.rules.engine_keys import EngineKeyring
from services.rules.grant_seals import GrantSeals
from services.runtime.claim import PARTS
from services.runtime.health import Health
from services.runtime.http.auth import Authenticator
from services.settings import Settings
from services.store.sql.schema_upgrade import migrate

Json = dict[str, Any]


def document() -> Json:
    """Return the OpenAPI document of a supervisor with all parts."""
    with tempfile.TemporaryDirectory() as folder:
        clock = SystemClock()
        settings, secret = Settings(state_dir=Path(folder)), "only described"
        assembly = Assembly(settings, frozenset(PARTS), clock, GrantSeals(secret), EngineKeyring(secret))
        try:
            migrate(assembly.db)
            assembly.build()
            health = Health(loops=(), checks={}, clock=clock)
            return create_app(assembly.dependencies(Authenticator("only-for-the-description"), health)).openapi()
        finally:
            assembly.close()


def json_text(found: Json) -> str:
    """Return the document as text that is the same each time."""
    return msgspec.json.format(msgspec.json.encode(found, order="sorted"), indent=1).decode() + "\n"


if __name__ == "__main__":
    described = document()
    sys.stdout.write(json_text(described) if "--json" in sys.argv[1:] else markdown(reference(described)))
