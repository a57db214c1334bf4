"""The two sides: how each is launched, and where its events come from."""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec

from flyball.contracts.decisions import DecisionKind
from flyball.contracts.events import Event, EventKind
from flyball.contracts.on_host.segments import shm_prefix
from goodput.read.event_files import read_logs
from host_daemon.workers.worker_environment import COPY_PAST_CACHES

JOB = "goodput"
WORLD_SIZE = 2
_TRAIN = Path(__file__).with_name("train.py")
_MAX_RESTARTS = "1000"  # both sides; more than any list of faults needs
_STOP_TIMEOUT_S = "10"  # when torchrun itself ends; also Flyball's default
_PAGE = 5000
# For both sides: what Flyball sets for its workers. LOGLEVEL makes torchrun's agent log its actions. Without the last
# variable, a restarted gloo job reuses the agent's store, finds dead workers' addresses there, and usually hangs.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLIBC_TUNABLES": COPY_PAST_CACHES,
    "RES_OPTIONS": "timeout:1 attempts:5",
    "LOGLEVEL": "INFO",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": _STOP_TIMEOUT_S,
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
_OTHERS_VARIABLES = ("FLYBALL_", "PET_", "TORCHELASTIC_")
# Lines of the log of torchrun's agent.
_STARTED = re.compile(r"\] Starting worker group$")
_CLOSING = re.compile(r"Sending process \d+ closing signal")
_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+")


class Side(StrEnum):
    TORCHRUN = "torchrun"  # with dcp.async_save
    FLYBALL = "flyball"


class Job(msgspec.Struct, frozen=True):
    """The training, and how often it saves to disk."""

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


class Line(NamedTuple):
    """A line of output, and the wall-clock time at which it was read."""

    at: float
    text: str


def command(side: Side, job: Job, folder: Path) -> list[str]:
    """The launcher's command line, with the script and its arguments."""
    return _COMMANDS[side](job, folder)


def environment() -> dict[str, str]:
    """This process's environment, without variables that would configure a launcher unnoticed."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_OTHERS_VARIABLES)}
    return own | _ENVIRONMENT


def events(side: Side, folder: Path, lines: Sequence[Line]) -> list[Event]:
    """All events of a finished run. `lines`: the launcher's output, as far as it counts."""
    if side is Side.FLYBALL:
        return _supervisor_events(folder)
    return [*merge_steps(rank_events(folder), WORLD_SIZE), *agent_events(lines, JOB)]


def rank_events(folder: Path) -> tuple[Event, ...]:
    """The events that the ranks under torchrun wrote."""
    return read_logs(sorted((folder / "events").glob("*.jsonl"))).events


def segments(folder: Path) -> list[Path]:
    """The shared memory of a `flyball run`. After the run it exists only if the run had to be killed."""
    prefix = Path(shm_prefix(str(_state_dir(folder) / "host")))
    return list(prefix.parent.glob(f"{prefix.name}.*"))


def _tied(module: str) -> list[str]:
    """Run a launcher that gets SIGTERM, and ends its workers, if this process dies first."""
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


def agent_events(lines: Iterable[Line], job: str) -> list[Event]:
    """Convert the stderr of torchrun's agent (LOGLEVEL=INFO) into events of Flyball's schema.

    The agent polls its workers. After a failure it first ends the others ("Sending process ... closing signal"), then
    reports the failure ("failed (exitcode: ...)"), then starts a new group ("Starting worker group"). The first of
    these lines is when it noticed. It decides nothing beyond that, so detection ends and stopping begins there. Every
    generation but the first follows an incident. Its cause is what the agent can know: a signal or an exit code of the
    worker that failed first.
    """
    events: list[Event] = []
    generation = -1
    incident_id = ""
    noticed_at: float | None = None

    def add(at: float, kind: EventKind, **data: str) -> None:
        events.append(Event(at=at, kind=kind, job=job, generation=generation, incident_id=incident_id, data=data))

    def open_incident(at: float, cause: str) -> str:
        name = f"restart-{generation + 1}"
        for kind, data in (
            (EventKind.INCIDENT_OPENED, {"cause": cause}),
            (EventKind.DECISION, {"kind": DecisionKind.RESTART_IN_PLACE.value}),
        ):
            events.append(Event(at=at, kind=kind, job=job, generation=generation, incident_id=name, data=data))
        return name

    for line in lines:
        if _STARTED.search(line.text):
            generation += 1
            add(line.at, EventKind.GENERATION_STARTED)
            incident_id, noticed_at = "", None
        elif _CLOSING.search(line.text):
            noticed_at = noticed_at or line.at
        elif match := _FAILED.search(line.text):
            cause = "worker_killed" if int(match[1]) < 0 else "worker_exception"
            incident_id = open_incident(noticed_at or line.at, cause)
            add(line.at, EventKind.WORKERS_STOPPED)
    if noticed_at is not None and not incident_id:
        open_incident(noticed_at, "unknown")
    return events


def merge_steps(events: Iterable[Event], world_size: int) -> list[Event]:
    """Replace the ranks' STEPS events by one per generation, as Flyball's sensor does before it stores them.

    It has the time at which the last rank completed each step that all ranks completed. Steps of a generation have no
    gaps. Without this, the calculator would see each step's last rank late on one side only, and count it separately.
    """
    others: list[Event] = []
    completed: dict[tuple[str, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        first, times = event.data.get("first_step"), event.data.get("completed_at")
        if event.kind is EventKind.STEPS and isinstance(first, int) and isinstance(times, list):
            for step, at in enumerate(times, first):
                completed[event.job, event.generation][step].append(float(at))
        else:
            others.append(event)
    for (job, generation), by_step in sorted(completed.items()):
        latest = {step: max(times) for step, times in sorted(by_step.items()) if len(times) == world_size}
        if latest:
            others.append(_summary(job, generation, latest, world_size))
    return others


def _summary(job: str, generation: int, latest: dict[int, float], world_size: int) -> Event:
    times: list[int | float | str] = list(latest.values())
    return Event(
        at=max(latest.values()),
        kind=EventKind.STEPS,
        job=job,
        generation=generation,
        data={
            "first_step": min(latest),
            "completed_at": times,
            "slowest_step": max(latest),
            "ranks": world_size,
            "sensor": "benchmark",
        },
    )
