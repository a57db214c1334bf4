"""What can be known of a state without the supervisor that wrote it. Only the standard library is needed: shell
completion and `flyball ls` read SQLite files by themselves."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

# The newest moment that a supervisor wrote down, whatever it did: when it ended, if it does not run.
LAST_SIGN_SQL = """
    SELECT (SELECT MAX(at) FROM vouches),
           (SELECT MAX(received_at) FROM host_reports),
           (SELECT at FROM events ORDER BY number DESC LIMIT 1)
"""
_REVISION = re.compile(r"(\d{4})_\w+\.py")


def read_only_uri(file: Path) -> str:
    """SQLite's own URI of a database that is neither made nor changed. Without a journal beside it the file is all
    there is; SQLite need not make files for those who read and write at once."""
    is_whole = not file.with_name(f"{file.name}-wal").exists()
    return f"file:{quote(str(file.resolve()))}?mode=ro{'&immutable=1' if is_whole else ''}"


def revisions() -> list[str]:
    """The schema's revisions that this release knows, oldest first."""
    folder = Path(__file__).parent / "migrations" / "versions"
    return sorted(match[1] for file in folder.iterdir() if (match := _REVISION.fullmatch(file.name)))
