"""Find the runs on this machine, including finished ones, in their state folders.

Reads the databases with Python's sqlite3 module alone, so that `flyball ls` and shell completion are fast.
"""

from __future__ import annotations

import difflib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import msgspec

from flyball.cli.reach.places import DATABASE, host_elsewhere, live_record, state_root, supervisor_dir
from flyball.contracts.cluster import JobState
from flyball.contracts.errors import NotFound
from flyball.contracts.on_host.os_text import from_text
from flyball.contracts.wire import MALFORMED, decoder_of
from services.store.sql.left_state import LAST_SIGN_SQL, read_only_uri

INTERRUPTED = "interrupted"  # unfinished when its supervisor ended; the same word as in services.api.left_state
UNREADABLE = "unreadable"
BUSY_TIMEOUT_S = 2.0
NAMES_SHOWN = 8

S = TypeVar("S", bound=msgspec.Struct)


class LocalRun(msgspec.Struct, frozen=True):
    """A job in one state folder, as recorded in the folder's database. Times are wall clock."""

    job: str
    state: str  # a JobState, "interrupted", or "unreadable"
    folder: Path  # has supervisor/ and host/; for `flyball up`: the supervisor's own folder
    supervisor_dir: Path  # has the database, the token and the log
    url: str = ""  # of its supervisor, if that is running and can be reached
    elsewhere: str = ""  # the other machine on which it runs, out of reach
    recorded_state: str = ""  # the JobState in the database
    message: str = ""
    doing: str = ""  # what it does, while its supervisor says so: "training"
    step: int = -1
    generation: int = -1
    restarts: int = 0
    submitted_at: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None
    supervisor_ended_at: float | None = None  # its last sign of life, if it ended before the job
    log_dir: Path | None = None  # has the ranks' logs, if any were written on this machine

    @property
    def is_live(self) -> bool:
        """Whether its supervisor is running."""
        return bool(self.url or self.elsewhere)

    @property
    def since(self) -> float | None:
        """When it entered its current state."""
        return self.ended_at or self.supervisor_ended_at or self.started_at or self.submitted_at or None


def find_runs(environ: Mapping[str, str], *, state_dir: str = "") -> list[LocalRun]:
    """All runs on this machine, or in one state folder, newest first."""
    found = [run for folder in supervisor_folders(environ, state_dir=state_dir) for run in runs_in(folder)]
    return sorted(found, key=lambda run: (run.submitted_at, run.job), reverse=True)


def find_run(environ: Mapping[str, str], job: str, *, state_dir: str = "") -> LocalRun:
    """The run of a job: the supervised one, else the newest. Raises NotFound."""
    runs = find_runs(environ, state_dir=state_dir)
    mine = [run for run in runs if run.job == job]
    if not mine:
        raise NotFound(f"There is no job {job} on this machine.", hint=known_names(job, [run.job for run in runs]))
    return next((run for run in mine if run.is_live), mine[0])


def known_names(name: str, known: Sequence[str], what: str = "job") -> str:
    """A hint for an unknown name of a `what`: similar names if there are any, else all."""
    names = list(dict.fromkeys(filter(None, known)))
    if near := difflib.get_close_matches(name, names, n=3, cutoff=0.6):
        return f"did you mean {' or '.join(near)}?"
    if not names:
        starts = {"job": "run", "host": "host"}
        return f"there are no {what}s yet" + (f"; `flyball {starts[what]}` starts one" if what in starts else "")
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"known {what}s: {', '.join(names[:NAMES_SHOWN])}{more}"


def supervisor_folders(environ: Mapping[str, str], *, state_dir: str = "") -> list[Path]:
    """The folders on this machine that hold the state of a running or finished supervisor."""
    if state_dir:
        candidates = [Path(state_dir), Path(state_dir) / "supervisor"]
    else:
        candidates = [supervisor_dir(environ), *sorted((state_root(environ) / "jobs").glob("*/supervisor"))]
    return [folder for folder in candidates if has_state(folder)]


def has_state(folder: Path) -> bool:
    """Whether the folder has a supervisor's database. If that is elsewhere, the file here is empty."""
    try:
        return (folder / DATABASE).stat().st_size > 0
    except OSError:
        return False


def runs_in(folder: Path) -> list[LocalRun]:
    """The jobs in a supervisor's folder."""
    record = live_record(folder)
    elsewhere = host_elsewhere(folder) if record is None else ""
    home = folder.parent if folder.name == "supervisor" and _is_run(folder.parent) else folder
    try:
        with closing(_open(folder / DATABASE)) as connection:
            rows = list(_jobs(connection))
            signs = () if record or elsewhere else connection.execute(LAST_SIGN_SQL).fetchone()
            seen_at = max(filter(None, signs), default=None)
    except sqlite3.Error as error:
        try:
            changed_at = (folder / DATABASE).stat().st_mtime
        except FileNotFoundError:  # just removed
            return []
        message = f"cannot read its database: {error}"
        return [LocalRun("", UNREADABLE, home, folder, message=message, submitted_at=changed_at)]
    url = record.url if record else ""
    return [_run(row, home, folder, url=url, elsewhere=elsewhere, seen_at=seen_at) for row in rows]


def _is_run(folder: Path) -> bool:
    """Whether the folder belongs to one `flyball run`, which has a host's and a supervisor's folder in it."""
    return folder.parent.name == "jobs" or (folder / "host").is_dir()


class _JobRow(msgspec.Struct):
    job: str
    spec: str
    state: str
    message: str
    submitted_at: float
    ended_at: float
    newest_step: int
    generation: int
    started_at: float | None
    plan: str | None


class _PlanPart(msgspec.Struct):
    restart_count: int = 0


class _Spec(msgspec.Struct):
    log_dir: str = ""


def _open(database: Path) -> sqlite3.Connection:
    return sqlite3.connect(read_only_uri(database), uri=True, timeout=BUSY_TIMEOUT_S)


def _jobs(connection: sqlite3.Connection) -> Iterator[_JobRow]:
    query = """
        SELECT job, spec, state, message, submitted_at, ended_at, newest_step, generation,
               (SELECT MIN(started_at) FROM generations g WHERE g.job = jobs.job AND started_at >= submitted_at),
               (SELECT plan FROM generations g WHERE g.job = jobs.job ORDER BY generation DESC LIMIT 1)
        FROM jobs
    """
    return (_JobRow(*row) for row in connection.execute(query))


def _run(row: _JobRow, home: Path, folder: Path, *, url: str, elsewhere: str, seen_at: float | None) -> LocalRun:
    is_live = bool(url or elsewhere)
    has_ended = row.state in {state.value for state in JobState if state.ended}
    logs = Path(from_text(_decoded(row.spec, _Spec).log_dir) or home / "host" / "logs") / row.job
    return LocalRun(
        job=row.job,
        state=row.state if has_ended or is_live else INTERRUPTED,
        folder=home,
        supervisor_dir=folder,
        url=url,
        elsewhere=elsewhere,
        recorded_state=row.state,
        message=row.message,
        step=row.newest_step,
        generation=row.generation,
        restarts=_decoded(row.plan or "{}", _PlanPart).restart_count,
        submitted_at=row.submitted_at,
        started_at=row.started_at,
        ended_at=row.ended_at or None,
        supervisor_ended_at=None if has_ended or is_live else seen_at or row.submitted_at,
        log_dir=logs if logs.is_dir() else None,
    )


def _decoded(document: str, kind: type[S]) -> S:
    try:
        return decoder_of(kind).decode(document)
    except MALFORMED:
        return kind()
