"""Results of the simulator, as `flyball simulate run SCENARIO -o json` writes them: runs with an account of their time,
like jobs. They are files that people copy about, so nothing in them is trusted."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from flyball.contracts import wire
from flyball.contracts.errors import InvalidMessage, NotFound
from goodput.account.timeline_bins import MAX_BINS, TimelineBin
from goodput.calculator import GoodputReport

SCHEMA = "flyball.simulation.v1"
SUFFIX = ".json"
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,98}"  # of a file, without the suffix
MAX_BYTES = 16 << 20  # of a file: 54 days of 16,384 GPUs take less than 1 MiB
MAX_FILES = 200  # that are listed, the last written
T = TypeVar("T")
HINT = f"write one with `flyball simulate run SCENARIO -o json > NAME{SUFFIX}`"


class SimulatedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A result of the simulator. Its goodput is that of the production account."""

    schema: Literal["flyball.simulation.v1"]
    version: Annotated[str, msgspec.Meta(description="Of Flyball.", examples=["0.1.0"])]
    scenario: Annotated[str, msgspec.Meta(examples=["llama3"])]
    seed: int
    days: float
    nodes: int
    gpus: int
    outcome: Annotated[str, msgspec.Meta(description="running, or failed if the policy gave the job up.")]
    message: str
    interruptions: int
    lost_gpu_hours: float
    closed_form_ettr: Annotated[float | None, msgspec.Meta(description="What Meta's closed form expects.")]
    violations: Annotated[tuple[str, ...], msgspec.Meta(description="Checks that failed.")]
    goodput: GoodputReport
    timeline: Annotated[tuple[TimelineBin, ...], msgspec.Meta(max_length=MAX_BINS)] = ()


class SimulationSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A file in the folder of results. With a `problem` the rest is not known."""

    name: Annotated[str, msgspec.Meta(description="Of the file, without .json.", examples=["llama3-8-spares"])]
    written_at: Annotated[float, msgspec.Meta(description="Seconds since 1970.")]
    problem: Annotated[str, msgspec.Meta(description="Why it cannot be read; '': it can.", examples=[""])] = ""
    scenario: str = ""
    seed: int = 0
    days: float = 0.0
    gpus: int = 0
    goodput: float | None = None


class _ResultAccount(msgspec.Struct):
    goodput: float | None


class _ResultHead(msgspec.Struct):
    """What a list shows of a result: the rest is skipped, not built."""

    schema: Literal["flyball.simulation.v1"]
    scenario: str
    seed: int
    days: float
    gpus: int
    goodput: _ResultAccount


def is_result(path: Path) -> bool:
    """Whether a file says that it is a result of the simulator."""
    if path.suffix != SUFFIX or not path.is_file():
        return False
    with path.open("rb") as file:
        return f'"{SCHEMA}"'.encode() in file.read(256)


def read_result(path: Path) -> SimulatedRun:
    """Raises NotFound, InvalidMessage."""
    return _decoded(path, SimulatedRun)


def _decoded(path: Path, kind: type[T]) -> T:
    content = _content(path)
    try:
        return wire.decode(content, kind, max_bytes=MAX_BYTES)
    except InvalidMessage as error:
        raise InvalidMessage(
            f"{path.name} is not a result of the simulator: {error.__cause__ or error.message}.", hint=HINT
        ) from error


def _without_waiting(path: str, _: int) -> int:
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _content(path: Path) -> bytes:
    """A named pipe or a device is no file: opening it must not block."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:  # which closes what it does not take, such as a folder
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise InvalidMessage(f"{path.name} is no file.", hint=HINT)
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise NotFound(f"There is no result {path.stem[:99]!r}.", hint=f"{HINT} in {path.parent}") from error
    except IsADirectoryError as error:
        raise InvalidMessage(f"{path.name} is no file.", hint=HINT) from error
    except OSError as error:
        raise InvalidMessage(
            f"{path.name} cannot be read: {error.strerror}.", hint="correct its permissions"
        ) from error
    if not content:
        raise InvalidMessage(f"{path.name} is empty.", hint="wait until the simulation is done, or run it again")
    if len(content) > MAX_BYTES:
        raise InvalidMessage(f"{path.name} has more than {MAX_BYTES >> 20} MiB.", hint=HINT)
    return content


class SimulationFolder:
    """Reads the results in a folder. May be used by several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[tuple[str, int, int], SimulationSummary] = {}  # by name, time and size of a file

    def summaries(self) -> tuple[list[SimulationSummary], int]:
        """Return the files that were written last, by name, and how many others there are."""
        try:
            with os.scandir(self.path) as entries:
                named = [entry for entry in entries if _is_named(entry.name)]
        except OSError:
            return [], 0
        files = [(entry, found) for entry in named if (found := _stat(entry)) is not None]
        files.sort(key=lambda file: file[1].st_mtime_ns)
        newest = files[-MAX_FILES:]
        known = {}
        for entry, found in newest:
            key = (entry.name, found.st_mtime_ns, found.st_size)
            before = self._known.get(key)
            if before is None or before.problem:  # which may end without a change of the file: its permissions
                before = _summary(Path(entry.path), found.st_mtime)
            known[key] = before
        self._known = known
        return sorted(known.values(), key=lambda one: one.name), len(files) - len(newest)

    def result(self, name: str) -> SimulatedRun:
        """Raises NotFound, InvalidMessage."""
        if not re.fullmatch(NAME, name):
            raise NotFound(f"There is no result {name[:99]!r}.", hint=f"{HINT} in {self.path}")
        return read_result(self.path / f"{name}{SUFFIX}")


def _is_named(file_name: str) -> bool:
    return file_name.endswith(SUFFIX) and re.fullmatch(NAME, file_name.removesuffix(SUFFIX)) is not None


def _stat(entry: os.DirEntry[str]) -> os.stat_result | None:
    """None if it is not there: a link without its file, or a file that was just removed."""
    try:
        return entry.stat()
    except OSError:
        return None


def _summary(path: Path, written_at: float) -> SimulationSummary:
    try:
        head = _decoded(path, _ResultHead)
    except (InvalidMessage, NotFound) as error:
        return SimulationSummary(name=path.stem, written_at=written_at, problem=error.message)
    return SimulationSummary(
        name=path.stem,
        written_at=written_at,
        scenario=head.scenario,
        seed=head.seed,
        days=head.days,
        gpus=head.gpus,
        goodput=head.goodput.goodput,
    )
