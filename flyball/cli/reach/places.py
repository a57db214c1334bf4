"""State folders on this machine, the supervisors that run in them, and their addresses and tokens."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import ConfigurationError, NotFound, Unauthorized, UsageError
from flyball.contracts.identity import is_supervisor_url
from flyball.contracts.on_host.os_text import to_text
from flyball.contracts.wire import MALFORMED, decoder_of

CLOCK_STEP_S = 60.0  # tolerate clock changes of this size since a process started
WRITES_WITHIN_S = 90.0  # a supervisor writes every second; other machines see that late, and their clocks differ
ANSWERS_WITHIN_S = 2.0
DATABASE = "flyball.sqlite"
GIVEN_TOKEN = "token.given"  # of a `flyball run` whose secret came from its environment, while it runs
MAX_STATE_PATH = 90  # bytes; Unix sockets inside the folder may have paths of at most 107 bytes


def state_root(environ: Mapping[str, str]) -> Path:
    """The folder that contains the state folders of the supervisor and of all runs."""
    named = environ.get("FLYBALL_STATE_DIR")
    if named:
        return Path(named)
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "flyball"


def bad_copies_file(environ: Mapping[str, str]) -> Path:
    """Where this machine notes which copies of checkpoints did not verify."""
    return state_root(environ) / "bad-copies.json"


def supervisor_dir(environ: Mapping[str, str]) -> Path:
    """The default state folder of `flyball up`."""
    named = environ.get("FLYBALL_STATE_DIR")
    return Path(named) if named else state_root(environ) / "supervisor"


def is_running(pid_file: Path) -> bool:
    """Whether the process whose id is in the file is running."""
    try:
        return _is_alive(int(pid_file.read_text()))
    except (OSError, ValueError):
        return False


def _is_alive(pid: int) -> bool:
    """Whether a process is running. A zombie is not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def make_state_dir(folder: Path) -> Path:
    """Create a private folder and return its real path. Raises ConfigurationError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        resolved = folder.resolve()
    except OSError as error:
        raise ConfigurationError(
            f"Cannot use the state folder {folder}: {error.strerror}.",
            hint="choose a writable folder with --state-dir",
        ) from error
    if len(os.fsencode(resolved)) > MAX_STATE_PATH:
        raise ConfigurationError(
            f"The path of the state folder {resolved} is too long for the sockets inside it.",
            hint=f"choose a path of at most {MAX_STATE_PATH} bytes with --state-dir",
        )
    if to_text(str(resolved)) != str(resolved):
        raise ConfigurationError(
            f"The path of the state folder {resolved} is not valid UTF-8, which its database needs.",
            hint="choose another with --state-dir, or with FLYBALL_STATE_DIR",
        )
    return resolved


def keep_token(file: Path, token: str) -> Path:
    """Write a token to a file that only its owner can read."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    file.touch(mode=0o600)
    file.chmod(0o600)  # in case it existed
    file.write_text(token)
    return file


@dataclass(frozen=True)
class SupervisorConnection:
    """How to reach a supervisor."""

    url: str
    token: str
    token_file: Path | None  # for a host daemon; None if the token came from the environment
    others: tuple[str, ...] = ()  # URLs of more supervisors of the same cluster, for a host daemon

    @property
    def urls(self) -> str:
        """All URLs, in the form that a host daemon takes."""
        return ",".join((self.url, *self.others))


def find_supervisor(
    environ: Mapping[str, str], *, url: str = "", token_file: str = "", state_dir: str = ""
) -> SupervisorConnection:
    """The supervisor named by flag or environment, else the one running on this machine.

    `url` may list several supervisors of one cluster, separated by commas. Raises NotFound if none runs, UsageError if
    several do, Unauthorized without a token.
    """
    url, *others = (url or environ.get("FLYBALL_SUPERVISOR", "")).split(",")
    folder: Path | None = Path(state_dir) if state_dir else None
    if not url:
        found = (
            live_folders(environ) if folder is None else [f for f in (folder, folder / "supervisor") if live_record(f)]
        )
        if not found:
            raise NotFound(
                f"No supervisor runs {f'in {folder}' if folder else 'on this machine'}, and none was named.",
                hint="start one with `flyball up`, or name one with --supervisor URL or --state-dir DIR",
            )
        if len(found) > 1:
            raise UsageError(
                "Several supervisors run on this machine: " + ", ".join(str(f) for f in found) + ".",
                hint="choose one with --state-dir DIR or --supervisor URL",
            )
        folder = found[0]
        record = live_record(folder)
        url = record.url if record else ""
    for one in (url, *others):
        if not is_supervisor_url(one.strip()):
            raise UsageError(
                f"{one} is not a supervisor's address.", hint="write for example --supervisor http://10.0.0.1:7370"
            )
    url = url.strip().rstrip("/")
    token, file = _token(environ, token_file, folder or _folder_of(url, environ))
    return SupervisorConnection(url, token, file, tuple(one.strip() for one in others))


def _folder_of(url: str, environ: Mapping[str, str]) -> Path:
    """The state folder of the supervisor with this address, if it runs on this machine."""
    found = (folder for folder in live_folders(environ) if (record := live_record(folder)) and record.url == url)
    return next(found, supervisor_dir(environ))


def _token(environ: Mapping[str, str], token_file: str, folder: Path) -> tuple[str, Path | None]:
    if not token_file and environ.get("FLYBALL_TOKEN"):
        return environ["FLYBALL_TOKEN"].strip(), None
    given = folder / GIVEN_TOKEN
    own = given if given.exists() else folder / "token"
    file = Path(token_file or environ.get("FLYBALL_TOKEN_FILE") or own)
    try:
        return file.read_text().strip(), file
    except OSError as error:
        raise Unauthorized(
            f"No token: {file} cannot be read ({error.strerror}).",
            hint="copy it from the supervisor's state folder and use --token-file FILE, or export FLYBALL_TOKEN",
        ) from error


class RunningSupervisor(msgspec.Struct):
    """The contents of supervisor.json: how to reach a supervisor."""

    url: str
    pid: int
    host: str = ""  # the machine with that process; '': this one
    elsewhere: str = ""  # its URL for other machines; '': there is none

    @property
    def is_here(self) -> bool:
        return self.host in ("", socket.gethostname())


def live_record(folder: Path) -> RunningSupervisor | None:
    """Read a folder's supervisor.json if its process is running. A process that started later only reuses the id. One
    on another machine, with which the folder is shared, is asked."""
    record = _record(folder)
    if record is None:
        return None
    if not record.is_here:
        at = record.elsewhere
        is_live = bool(at) and _is_written(folder) and _answers(at)
        return RunningSupervisor(at, record.pid, record.host, at) if is_live else None
    try:
        written_at = (folder / "supervisor.json").stat().st_mtime
        if not _is_alive(record.pid) or psutil.Process(record.pid).create_time() > written_at + CLOCK_STEP_S:
            return None
    except (OSError, psutil.Error):
        return None
    return record


def host_elsewhere(folder: Path) -> str:
    """The other machine on which a supervisor runs in this folder, also if it cannot be reached from here; '' if
    none does. Only its writes show that."""
    record = _record(folder)
    return record.host if record is not None and not record.is_here and _is_written(folder) else ""


def _record(folder: Path) -> RunningSupervisor | None:
    try:
        return decoder_of(RunningSupervisor).decode((folder / "supervisor.json").read_bytes())
    except (OSError, *MALFORMED):
        return None


def _is_written(folder: Path) -> bool:
    """Whether the folder's database was written lately. It may also be elsewhere."""
    files = [file for file in (folder / DATABASE, folder / f"{DATABASE}-wal") if file.exists()]
    newest = max((file.stat().st_mtime for file in files), default=None)
    return newest is None or SystemClock().wall_s() - newest < WRITES_WITHIN_S


def _answers(url: str) -> bool:
    """Whether a supervisor answers there."""
    from flyball.cli.reach.client import ApiClient  # other commands save the time to import it
    from flyball.contracts.errors import FlyballError

    try:
        with ApiClient(url, "", timeout_s=ANSWERS_WITHIN_S) as client:
            return "checks" in client.get("/healthz")
    except FlyballError:
        return False


def live_folders(environ: Mapping[str, str]) -> list[Path]:
    """The folders of all supervisors running on this machine."""
    jobs = state_root(environ) / "jobs"
    folders = [supervisor_dir(environ), *sorted(jobs.glob("*/supervisor"))]
    return [folder for folder in folders if live_record(folder)]
