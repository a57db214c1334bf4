"""The two sides: how each is launched, and where its events come from."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from flyball.contracts.events import Event
from flyball.contracts.on_host.segments import shm_prefix
from goodput.read.event_files import read_logs
from goodput_bench.agent_log import Line, agent_events
from goodput_bench.world_steps import summed_up
from host_daemon.workers.worker_environment import COPY_PAST_CACHES

JOB = "goodput"
WORLD_SIZE = 2
_TRAIN = Path(__file__).with_name("train.py")
_MAX_RESTARTS = "1000"  # both sides: no list of faults may exhaust it
_STOP_TIMEOUT_S = "10"  # of torchrun's own end; Flyball's default too
_PAGE = 5000
# The same for both. What Flyball sets for its workers torchrun's get too; LOGLEVEL makes torchrun's agent say what it
# does; without the last one a restart of a gloo job reuses the agent's store, finds the addresses of dead workers
# there, and hangs more often than not.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLIBC_TUNABLES": COPY_PAST_CACHES,
    "RES_OPTIONS": "timeout:1 attempts:5",
    "LOGLEVEL": "INFO",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": _STOP_TIMEOUT_S,
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
_OTHERS_VARIABLES = ("FLYBALL_", "PET_", "TORCHELASTIC_")


class Side(StrEnum):
    TORCHRUN = "torchrun"  # with dcp.async_save
    FLYBALL = "flyball"


class Job(msgspec.Struct, frozen=True):
    """What is trained, and how often it is saved to the disk."""

    every_steps: int
    hang_timeout_s: float
    step_floor_s: float
    width: int
    layers: int
    training_seed: int = 1

    def arguments(self, folder: Path, saver: str) -> list[str]:
        named = {
            "--saver": saver,
            "--folder": folder,
            "--job": JOB,
            "--save-every": self.every_steps,
            "--hang-timeout-s": self.hang_timeout_s,
            "--step-floor-s": self.step_floor_s,
            "--width": self.width,
            "--layers": self.layers,
            "--seed": self.training_seed,
        }
        return [str(_TRAIN), *(str(word) for pair in named.items() for word in pair)]


def command(side: Side, job: Job, folder: Path) -> list[str]:
    """The command line of a launcher, with the script and its arguments."""
    return _COMMANDS[side](job, folder)


def environment() -> dict[str, str]:
    """That of this process, without what would configure a launcher behind our back."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_OTHERS_VARIABLES)}
    return own | _ENVIRONMENT


def events(side: Side, folder: Path, lines: Sequence[Line]) -> list[Event]:
    """All events of a run that is over; `lines`: the launcher's output as far as it counts."""
    if side is Side.FLYBALL:
        return _supervisor_events(folder)
    return [*summed_up(rank_events(folder), WORLD_SIZE), *agent_events(lines, JOB)]


def rank_events(folder: Path) -> tuple[Event, ...]:
    """What the ranks under torchrun told of themselves."""
    return read_logs(sorted((folder / "events").glob("*.jsonl"))).events


def segments(folder: Path) -> list[Path]:
    """The shared memory of a `flyball run`; it is there after the run only if that had to be killed."""
    prefix = Path(shm_prefix(str(_state_dir(folder) / "host")))
    return list(prefix.parent.glob(f"{prefix.name}.*"))


def _tied(module: str) -> list[str]:
    """A launcher that gets SIGTERM, and ends its workers, when this process dies without having ended it."""
    return [sys.executable, "-P", "-m", "flyball.cli.run.tied", str(os.getpid()), module]


def _torchrun(job: Job, folder: Path) -> list[str]:
    launcher = [*_tied("torch.distributed.run"), "--standalone", "--nproc-per-node", str(WORLD_SIZE)]
    return [*launcher, "--max-restarts", _MAX_RESTARTS, *job.arguments(folder, "dcp")]


def _flyball(job: Job, folder: Path) -> list[str]:
    launcher = [*_tied("flyball.cli.main"), "run", "--nproc-per-node", str(WORLD_SIZE)]
    tiers = ["--local-ckpt-dir", str(folder / "checkpoints"), "--local-ckpt-interval", str(job.every_steps)]
    named = ["--job", JOB, "--state-dir", str(_state_dir(folder)), "--max-restarts", _MAX_RESTARTS]
    return [*launcher, *named, *tiers, *job.arguments(folder, "flyball")]


_COMMANDS: dict[Side, Callable[[Job, Path], list[str]]] = {Side.TORCHRUN: _torchrun, Side.FLYBALL: _flyball}


def _state_dir(folder: Path) -> Path:
    return folder / "state"


def _supervisor_events(folder: Path) -> list[Event]:
    from services.store.sql.database import Database
    from services.store.sql.events import SqlEventLog

    database = Database(f"sqlite:///{_state_dir(folder) / 'supervisor' / 'flyball.sqlite'}")
    try:
        log = SqlEventLog(database)
        found: list[Event] = []
        after = 0
        while page := log.read(JOB, after, _PAGE):
            found += [event for _, event in page]
            after = page[-1][0]
        return found
    finally:
        database.close()
