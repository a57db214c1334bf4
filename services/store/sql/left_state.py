"""Reads a state folder's database without its supervisor. Needs only the standard library, for `flyball ls` and shell
completion."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

# The newest moments that a supervisor wrote down: if it does not run, the latest of them is when it ended.
LAST_SIGN_SQL = """
    SELECT (SELECT MAX(at) FROM vouches),
           (SELECT MAX(received_at) FROM host_reports),
           (SELECT at FROM events ORDER BY number DESC LIMIT 1)
"""


def read_only_uri(file: Path) -> str:
    """Return SQLite's URI for opening `file` without creating or changing it. Without a journal beside it the file is
    complete, and SQLite need not create files that coordinate readers and writers."""
    is_complete = not file.with_name(f"{file.name}-wal").exists()
    return f"file:{quote(str(file.resolve()))}?mode=ro{'&immutable=1' if is_complete else ''}"
