"""The engine's state folder. It holds the lock and port of this engine, the highest fence and the current generation of
each job, which must survive a kill, and late saves that an ending engine could not report."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from ckpt_engine.tiers.durable_files import write_durably
from flyball.contracts import wire
from flyball.contracts.checkpoints import PeerTransport
from flyball.contracts.errors import (
    ConfigurationError,
    Conflict,
    FlyballError,
    InvalidMessage,
    StaleCommand,
    StateVersionMismatch,
)
from flyball.contracts.identity import Fence
from flyball.contracts.on_host.engine_wire import (
    ENGINE_PID_FILE,
    HOST_STATE_VERSION,
    TRANSPORTS_FILE,
    Configure,
    LateSaves,
)
from flyball.state_folder import StateFolder, make_folder, sync_folder, write_private

log = structlog.get_logger()

MAX_SOCKET_PATH_BYTES = 107  # sun_path of Linux, less the closing zero


class EngineStateDir:
    """The state folder of one host. Open it once per process."""

    def __init__(self, path: Path) -> None:
        """Raises Conflict if another engine uses the folder, StateVersionMismatch if it is another version's."""
        self.path = path
        self._folder = StateFolder(path, version=HOST_STATE_VERSION, in_use=self._in_use)
        self._folder.open(ENGINE_PID_FILE)
        self.previous_port = self._read_port()  # used again, so that peers find this engine where it was

    def socket_path(self, name: str) -> Path:
        """The path of a Unix socket in the folder. A file that a killed engine left there is removed."""
        path = self.path / name
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise ConfigurationError(
                f"The path {path} is longer than the {MAX_SOCKET_PATH_BYTES} bytes that a Unix socket may have.",
                hint="use a state folder with a shorter path",
            )
        path.unlink(missing_ok=True)
        return path

    def write_pid_file(self, port: int) -> None:
        """Record this engine's pid and port: "pid port"."""
        self._folder.write_lock(ENGINE_PID_FILE, f"{os.getpid()} {port}")

    def answer_keys(self) -> tuple[tuple[str, ...], Callable[[Sequence[str]], None]]:
        """The keys with which other hosts' engines may call, newest first, and what stores them. They outlive the jobs
        that brought them: memory of an ended job is still given out. Raises StateVersionMismatch, OSError."""
        path = self.path / "engine-keys.json"

        def store(keys: Sequence[str]) -> None:
            write_durably(path, [wire.encode(keys)])

        try:
            return wire.decode(path.read_bytes(), tuple[str, ...]), store
        except FileNotFoundError:
            return (), store
        except InvalidMessage as error:
            raise StateVersionMismatch(
                f"{path} is not readable: {error.message}",
                hint="remove the file: the next generation of each job brings the keys again",
            ) from error

    def _read_port(self) -> int:
        try:
            _, port = (self.path / ENGINE_PID_FILE).read_text().split()
            return int(port)
        except ValueError:
            return 0  # empty, or torn by a kill: nothing depends on it

    def _in_use(self, _lock: str, pid: str) -> Conflict:
        return Conflict(
            f"Another checkpoint engine (pid {pid}) uses {self.path}.",
            hint="use it, stop it, or give this one another state folder",
        )


class FenceFile:
    """The highest (epoch, generation) obeyed per job. It is on disk before a command is carried out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._fences: dict[str, Fence] = {}
        if path.exists():
            try:
                self._fences = wire.decode(path.read_bytes(), dict[str, Fence])
            except InvalidMessage as error:
                raise StateVersionMismatch(
                    f"{path} is not readable: {error.message}",
                    hint="remove the file if no job runs on this host, or restore it",
                ) from error

    def obey(self, job: str, fence: Fence) -> None:
        """Store the fence durably if it is the highest so far. Raises StaleCommand if it is lower."""
        with self._lock:
            highest = self._fences.get(job)
            if highest is not None and fence < highest:
                raise StaleCommand(
                    f"A command for {job} carries epoch {fence.epoch}, generation {fence.generation}; epoch "
                    f"{highest.epoch}, generation {highest.generation} has already been obeyed.",
                    hint="nothing to do: its sender is no longer the leader, or the job has moved on",
                )
            if fence != highest:
                fences = {**self._fences, job: fence}
                write_durably(self._path, [wire.encode(fences)])
                self._fences = fences


class JobFiles:
    """The last Configure of each job, from which a restarted engine resumes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        make_folder(folder)

    def store(self, configure: Configure) -> None:
        path, content = self._path(configure.placement.job), wire.encode(configure)
        if not path.exists() or path.read_bytes() != content:  # a file's time is that of its generation
            write_durably(path, [content])

    def names(self) -> list[str]:
        """The jobs that have a file."""
        return [path.stem for path in self._folder.glob("*.json")]

    def load(self) -> list[Configure]:
        """All that can be read, the newest last. The others are logged, and their segments stay."""
        found: list[Configure] = []
        for path in sorted(self._folder.glob("*.json"), key=lambda path: (path.stat().st_mtime_ns, path.name)):
            try:
                found.append(wire.decode(path.read_bytes(), Configure))
            except (InvalidMessage, OSError) as error:
                log.error("job_not_resumed", path=str(path), reason=str(error))
        return found

    def remove(self, job: str) -> None:
        self._path(job).unlink(missing_ok=True)
        sync_folder(self._folder)  # else a released job would come back after a power cut

    def _path(self, job: str) -> Path:
        return self._folder / f"{job}.json"


class LateSavesFile:
    """Late saves that an ending engine could not report. The next engine reports them and then removes the file.
    Failures are only logged: nothing depends on this file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._may_exist = True

    def store(self, unreported: Sequence[LateSaves]) -> None:
        """Replace the content."""
        if not unreported:
            self.remove()
            return
        self._may_exist = True
        try:
            write_durably(self._path, [wire.encode(unreported)])
        except (FlyballError, OSError) as error:
            log.warning("late_saves_not_kept", count=len(unreported), reason=str(error))

    def load(self) -> tuple[LateSaves, ...]:
        """The content; () if it cannot be read. The file stays."""
        try:
            return wire.decode(self._path.read_bytes(), tuple[LateSaves, ...])
        except FileNotFoundError:
            self._may_exist = False
        except (InvalidMessage, OSError) as error:
            log.warning("late_saves_not_read", path=str(self._path), reason=str(error))
        return ()

    def remove(self) -> None:
        """They were reported. Cheap when there is no file."""
        if not self._may_exist:
            return
        self._may_exist = False
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("late_saves_not_removed", path=str(self._path), reason=str(error))


class TransportsFile:
    """What carries shards to each peer, for `flyball ckpt ls`, which asks no process. Failures are only logged."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / TRANSPORTS_FILE

    def store(self, known: tuple[PeerTransport, ...]) -> None:
        """Replace the content, one thread at a time. It need not survive a power cut."""
        try:
            write_private(self._path, wire.encode(known), durable=False)
        except OSError as error:
            log.warning("transports_not_stored", path=str(self._path), reason=str(error))
