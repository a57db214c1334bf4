"""The generation of a trainer without a supervisor, agreed on through the event file that all ranks share.

The first process of a launch begins a generation, one above the newest in the file; the others of the same launch join
it. Processes of one launch share torchrun's run id and restart count, the rendezvous address and port, Slurm's job id
and restart count, and on one host the launcher itself. If they go back to an earlier step without a new launch, the
first one to report it begins a generation too.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from flyball.contracts.clock import Clock
from flyball.contracts.errors import InvalidMessage
from flyball.contracts.events import Event, EventKind
from flyball.contracts.wire import decode
from flyball.sdk.worker_identity import WorkerIdentity

_BLOCK_BYTES = 1 << 20
_LOCK_POLL_S = 0.01
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # Lustre without `-o flock`, NFS without a lock service
# Events that show how far a generation came; all others are skipped undecoded. Lines of steps are long, and a long run
# has millions of them, so the regular expression reads their job and generation from the beginning of the line.
_RARE = (
    EventKind.GENERATION_STARTED,
    EventKind.INCIDENT_CLOSED,
    EventKind.WORKERS_STOPPED,
    EventKind.JOB_ENDED,
)
_FREQUENT = (EventKind.RANK_MARKS, EventKind.STEPS)
_HEAD = re.compile(
    rb'{"at":[^,]*,"kind":"(?:(?:%s)"|(?:%s)"(?P<whose>,"job":"(?:[^"\\]|\\.)*","generation":-?\d+,))'
    % ("|".join(_RARE).encode(), "|".join(_FREQUENT).encode())
)
_LAUNCH_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_RESTART_COUNT",
)


@dataclass(frozen=True, slots=True)
class Launch:
    """The processes that were started together, as seen by one of them."""

    job: str
    key: str
    launched_at: float  # start of the launcher, as far as this host can tell
    spawned_at: float  # start of this process
    rank: int
    world_size: int
    given: int  # the supervisor's generation, 0 without one
    rollback: int = 0  # times that its processes went back to an earlier step


def launch_of(me: WorkerIdentity, environment: Mapping[str, str], clock: Clock) -> Launch:
    """The launch that this process belongs to."""
    alone = me.world_size == 1 and "TORCHELASTIC_RUN_ID" not in environment
    one_host = me.world_size == 1 or environment.get("LOCAL_WORLD_SIZE") == str(me.world_size)
    launcher = os.getpid() if alone else os.getppid()
    spawned_at = _started_at(os.getpid(), clock)
    parts = [*(environment.get(name, "-") for name in _LAUNCH_VARIABLES), str(me.world_size)]
    if one_host:
        parts += [socket.gethostname(), str(launcher), str(_start_ticks(launcher))]
    return Launch(
        job=me.job,
        key=f"generation {me.generation}" if me.supervised else " ".join(parts),
        launched_at=spawned_at if alone else _started_at(launcher, clock),
        spawned_at=spawned_at,
        rank=me.rank,
        world_size=me.world_size,
        given=me.generation if me.supervised else 0,
    )


def _start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None where that cannot be had."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def _started_at(pid: int, clock: Clock) -> float:
    """Wall-clock seconds; now, where the start cannot be had."""
    ticks = _start_ticks(pid)
    now, up_s = clock.wall_s(), time.clock_gettime(time.CLOCK_BOOTTIME)
    if ticks is None:
        return now
    return round(now - max(0.0, up_s - ticks / os.sysconf("SC_CLK_TCK")), 6)


@dataclass(frozen=True, slots=True)
class Entered:
    """The generation of this process. `events` announce it; only the process that began it has any."""

    generation: int
    began: bool
    events: tuple[Event, ...] = ()
    incident_id: str = ""  # the incident that it resolves

    def first_step(self, launch: Launch, at: float) -> Event:
        """The event for the generation's first step, from the process that began it: the outage is over."""
        if self.incident_id:
            data: dict[str, str] = {"state": "resolved"}
            return Event(at, EventKind.INCIDENT_CLOSED, launch.job, incident_id=self.incident_id, data=data)
        marks = {"first_step_at": at}
        return Event(at, EventKind.RANK_MARKS, launch.job, self.generation, launch.rank, data=marks)


def enter(path: Path, launch: Launch, write: Callable[[Sequence[Event]], object], lock_timeout_s: float) -> Entered:
    """Join the generation of `launch` in the file, or begin the next one there. `write` gets its events while the file
    is locked. Raises OSError if the file cannot be read, TimeoutError if another process keeps it locked; the
    generation is unknown then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = path.open("a+b")
    except io.UnsupportedOperation:  # a pipe: there is nothing to read back
        entered = begin(launch)
        write(entered.events)
        return entered
    with file:
        _lock(file, lock_timeout_s)  # until the file is closed
        entered = _entered(file, launch)
        write(entered.events)
    return entered


def begin(launch: Launch, newest: Event | None = None, later: Sequence[Event] = ()) -> Entered:
    """Begin the generation after `newest`; `later` are the events since then, newest first.

    If `newest` had completed a step, it was interrupted, unless the job had ended. Nobody saw a restart begin, so its
    incident is inferred; a rollback begins when the job goes back. If `newest` had completed no step, its own incident
    is still open, and goes on."""
    later = [event for event in later if newest and event.generation in (-1, newest.generation)]
    number = max(launch.given, 1 + (newest.generation if newest else launch.rollback))
    events = []
    incident_id = newest.incident_id if newest else ""
    if newest is None:
        events.append(Event(launch.launched_at, EventKind.JOB_SUBMITTED, launch.job))
    elif any(event.kind is EventKind.JOB_ENDED for event in later):
        incident_id = ""
    elif launch.rollback or any(_shows_a_step(event) for event in later):
        cause = "rollback" if launch.rollback else "restart"
        incident_id = f"{cause}-{number}"
        stopped_at = max((e.at for e in later if e.kind is EventKind.WORKERS_STOPPED), default=launch.spawned_at)
        data: dict[str, str | bool] = {"cause": cause} if launch.rollback else {"cause": cause, "inferred": True}
        opened_at = min(stopped_at, launch.spawned_at)
        events.append(Event(opened_at, EventKind.INCIDENT_OPENED, launch.job, incident_id=incident_id, data=data))
    world: dict[str, str | int] = {"world_size": launch.world_size, "launch": launch.key, "rollback": launch.rollback}
    events.append(
        Event(launch.spawned_at, EventKind.GENERATION_STARTED, launch.job, number, incident_id=incident_id, data=world)
    )
    return Entered(number, True, tuple(events), incident_id)


def _shows_a_step(event: Event) -> bool:
    return event.kind in (EventKind.STEPS, EventKind.INCIDENT_CLOSED) or "first_step_at" in event.data


def _entered(file: BinaryIO, launch: Launch) -> Entered:
    newest: Event | None = None
    later: list[Event] = []
    stepped: set[bytes] = set()  # generations that completed a step: one event is enough
    for line in _lines_from_the_end(file):
        head = _HEAD.match(line)
        if head is None or head["whose"] in stepped:
            continue
        try:
            event = decode(line, Event)
        except InvalidMessage:
            continue  # cut off by a kill; the report counts it
        if event.job != launch.job:
            continue
        if event.kind is EventKind.GENERATION_STARTED:
            newest = newest or event
            rollbacks = event.data.get("rollback", 0)
            if event.data.get("launch") != launch.key or (isinstance(rollbacks, int) and rollbacks < launch.rollback):
                break
            if rollbacks == launch.rollback:
                return Entered(event.generation, began=False)
        elif newest is None:
            if event.kind in _FREQUENT:
                if not _shows_a_step(event):
                    continue
                stepped.add(head["whose"])
            later.append(event)
    return begin(launch, newest, later)


def _lines_from_the_end(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file, last one first."""
    position = file.seek(0, os.SEEK_END)
    rest = b""
    while position > 0:
        start = max(0, position - _BLOCK_BYTES)
        file.seek(start)
        lines = (file.read(position - start) + rest).split(b"\n")
        position, rest = start, lines[0]
        yield from reversed(lines[1:])
    yield rest


def _lock(file: BinaryIO, timeout_s: float) -> None:
    """Lock the file. Raises TimeoutError, because a process that holds the lock may be stopped. If the file system has
    no locks, go on without: at worst a generation is begun twice."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise TimeoutError(errno.EWOULDBLOCK, "another process has it locked") from None
            time.sleep(_LOCK_POLL_S)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return
            raise
