"""`flyball logs`: show the output of a job's ranks, while it runs and after it has ended."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from flyball.cli.logs.console import INTERVAL_S, LogFollower
from flyball.cli.logs.escaped_output import EscapedOutput
from flyball.cli.logs.job_logs import JobLogs, RankLog, jobs_here, jobs_of_daemons
from flyball.cli.logs.log_mirror import ALL, LogMirror
from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.options import command_help, with_supervisor
from flyball.cli.reach.sources import SupervisorChoice
from flyball.cli.run.host_process import is_written
from flyball.cli.show.output import Format, OutputOption, RawOption, announce, printed
from flyball.contracts.cluster import JobState
from flyball.contracts.errors import FlyballError, NotFound, UsageError
from flyball.contracts.on_host.console_request import BOTH
from flyball.contracts.reports.rank_logs import MAX_PIECE_BYTES, NEWEST
from flyball.launch.output_flags import ALL_RANKS, Console
from flyball.worker_files import open_worker_file

COMMAND = command_help(
    "Show the output of a job's ranks. Logs on this machine need no supervisor, and stay after the job's end.",
    "flyball logs",
    "flyball logs llama -f",
    "flyball logs llama --rank 0 --rank 3 --tail 50",
    "flyball logs llama --generation 0",
    "flyball logs llama --generation all -o json",
    "flyball logs llama --rank 12 -f --supervisor http://10.0.0.1:7370",
)

ALL_GENERATIONS = "all"
NAMES_SHOWN = 5
JSON_LINES = 1000  # per log, without --tail
READ_SIZE_BYTES = 1 << 20
MAX_JSON_BYTES = 4 << 20  # per log
LOCAL_INTERVAL_S = 2.0  # between scans of all processes for one that still writes
REMOTE_INTERVAL_S = 0.5
MANY_NUMBERS = 8  # of ranks or generations: more are named as a range
MAX_REMOTE_RANKS = 16  # shown without --rank
LINE_BYTES = 400  # estimated, to decide how much of a remote log holds its last lines


@with_supervisor(without=("state_dir", "database_url"))
def command(
    *,
    job: Annotated[str, typer.Argument(help="name of the job (default: the one that wrote last)")] = "",
    rank: Annotated[list[int] | None, typer.Option("--rank", min=0, help="only this rank; repeatable")] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="keep showing new output until the job ends")] = False,
    generation: Annotated[
        str, typer.Option("--generation", help="a number, or all (default: the newest; with -f also later ones)")
    ] = "",
    host: Annotated[str, typer.Option("--host", help="only ranks on this host")] = "",
    tail: Annotated[int, typer.Option("--tail", min=0, help="only this many last lines per log; 0 means all")] = 0,
    state_dir: Annotated[str, typer.Option("--state-dir", help="state folder of the run or of the host")] = "",
    choice: SupervisorChoice,
    output: OutputOption = Format.TABLE,
    raw: RawOption = False,
) -> None:
    """Writes the logs' bytes to stdout; unchanged, unless that is a terminal."""
    if generation and generation != ALL_GENERATIONS and not generation.isdecimal():
        raise UsageError(
            f"--generation {generation} is neither a number nor all.", hint="write for example --generation 0"
        )
    if follow and output.is_for_programs:
        raise UsageError(f"--follow and -o {output} cannot be combined.", hint="leave one of them out")
    wanted = _Wanted(job, tuple(rank or ()), generation, host, tail, raw)
    if not choice.url:
        try:
            runs = _choose(wanted, state_dir)
            _show(
                runs,
                wanted,
                follow,
                output,
                _at_intervals(LOCAL_INTERVAL_S, lambda: not _goes_on(runs, choice)),
            )
            return
        except NotFound:
            if not job or state_dir or not _has_supervisor(choice, job):
                raise
    if not job:
        raise UsageError("Which job of the supervisor?", hint="name it: flyball logs JOB --supervisor URL")
    with choice.connect(job) as client, tempfile.TemporaryDirectory(prefix="flyball-logs-") as folder:
        _show_remote(client, wanted, Path(folder), follow, output)


@dataclass(frozen=True)
class _Wanted:
    """The logs that the user wants."""

    job: str
    ranks: tuple[int, ...]
    generation: str
    host: str
    tail: int
    raw: bool


def _has_supervisor(choice: SupervisorChoice, job: str) -> bool:
    try:
        choice.connect(job).close()
    except FlyballError:
        return False
    return True


def _goes_on(runs: Sequence[JobLogs], choice: SupervisorChoice) -> bool:
    """Whether more may come: workers or a daemon run here or, in a folder that is shared, on another machine."""
    return any(is_written(run.folder) or run.may_continue or _runs_elsewhere(run.job, choice) for run in runs)


def _runs_elsewhere(job: str, choice: SupervisorChoice) -> bool:
    try:
        with choice.connect(job) as client:
            return not JobState(client.get(f"/v1/jobs/{job}")["state"]).ended
    except FlyballError:
        return False


def _show(runs: Sequence[JobLogs], wanted: _Wanted, follow: bool, output: Format, is_over: Callable[[], bool]) -> None:
    logs = _select(runs, wanted)
    if output.is_for_programs:
        printed({"job": runs[0].job, "logs": [_as_json(log, wanted.tail or JSON_LINES) for log in logs]}, output)
    elif follow:
        _follow(runs, logs, wanted, is_over)
    else:
        _print(logs, wanted)


def _show_remote(client: ApiClient, wanted: _Wanted, folder: Path, follow: bool, output: Format) -> None:
    """Copy the logs through the supervisor to a folder, and show them from there."""
    job = client.get(f"/v1/jobs/{wanted.job}")
    by_host: dict[str, list[int]] = {}
    for one in job["ranks"]:
        if (not wanted.ranks or one["rank"] in wanted.ranks) and wanted.host in ("", one["host_id"]):
            by_host.setdefault(one["host_id"], []).append(one["rank"])
    if wanted.host and wanted.ranks and not by_host:  # the ranks were on that host earlier
        by_host[wanted.host] = list(wanted.ranks)
    if job["ranks"] and not by_host:
        raise NotFound(
            f"Job {wanted.job} has no such rank{f' on host {wanted.host}' if wanted.host else ''}, but "
            f"{_numbers('rank', (one['rank'] for one in job['ranks']))}.",
            hint="choose with --rank R, and with --host HOST where a rank was earlier",
        )
    placed = sum(map(len, by_host.values()))
    if placed > MAX_REMOTE_RANKS and not wanted.ranks:
        announce(f"showing only rank 0 of {placed} (--rank R shows others)")
        by_host = {host: [0] for host, ranks in by_host.items() if 0 in ranks} or by_host
    number = int(wanted.generation) if wanted.generation.isdecimal() else ALL if wanted.generation else NEWEST
    mirrors = [
        LogMirror(
            client,
            wanted.job,
            folder / host,
            ranks=ranks,
            generation=number,
            host=host,
            last_bytes=max(MAX_PIECE_BYTES, wanted.tail * LINE_BYTES) if wanted.tail else 0,
        )
        for host, ranks in by_host.items()
    ]
    for mirror in mirrors:
        mirror.update()
    runs = [JobLogs(wanted.job, host, folder / host, folder) for host in by_host]

    def is_over() -> bool:
        ended = JobState(client.get(f"/v1/jobs/{wanted.job}")["state"]).ended
        return not any([mirror.update() for mirror in mirrors]) and ended

    _show(runs, wanted, follow, output, _at_intervals(REMOTE_INTERVAL_S, is_over))


def _at_intervals(interval_s: float, check: Callable[[], bool]) -> Callable[[], bool]:
    """Limit how often `check` is called; in between, the result is False."""
    due_at = 0.0

    def limited() -> bool:
        nonlocal due_at
        if time.monotonic() < due_at:
            return False
        result = check()
        due_at = time.monotonic() + interval_s
        return result

    return limited


def _choose(wanted: _Wanted, state_dir: str) -> list[JobLogs]:
    """The newest run of the job on each host of this machine. Raises NotFound."""
    job, host = wanted.job, wanted.host
    found = [logs for logs in jobs_here(os.environ, state_dir) if host in ("", logs.host_id)]
    name = job or (found[-1].job if found else "")
    named = [logs for logs in found if logs.job == name]
    if job and not named and not state_dir:
        named = [logs for logs in jobs_of_daemons(job) if host in ("", logs.host_id)]
    if not named:
        known = list(dict.fromkeys(logs.job for logs in reversed(found)))
        more = f" and {len(known) - NAMES_SHOWN} more" if len(known) > NAMES_SHOWN else ""
        others = f" Jobs with logs here: {', '.join(known[:NAMES_SHOWN])}{more}." if known else ""
        what = f"job {job}" if job else "any job"
        raise NotFound(
            f"There are no logs of {what}{f' on host {host}' if host else ''} on this machine.{others}",
            hint="run this where the job's ranks ran, or use --state-dir DIR or --supervisor URL",
        )
    newest = {logs.host_id: logs for logs in named}  # the last one of each host wins
    return list(newest.values())


def _select(runs: Sequence[JobLogs], wanted: _Wanted) -> list[RankLog]:
    """The wanted logs, by generation and rank. Raises NotFound."""
    ranks = wanted.ranks
    every = sorted((log for run in runs for log in run.logs()), key=lambda log: (log.generation, log.rank))
    if not every:
        raise NotFound(
            f"Job {wanted.job} has no such log yet.",
            hint="`flyball status` shows whether it runs, and where its ranks are",
        )
    newest = max(log.generation for log in every)
    generation = wanted.generation or str(newest)
    chosen = [
        log
        for log in every
        if (not ranks or log.rank in ranks) and generation in (ALL_GENERATIONS, str(log.generation))
    ]
    if not chosen:
        known = _numbers("rank", (log.rank for log in every))
        raise NotFound(
            f"Job {runs[0].job} has no such log here, but logs of {known} and "
            f"{_numbers('generation', (log.generation for log in every))}.",
            hint="choose with --rank R and --generation N; logs of ranks on other machines are on those machines",
        )
    if not wanted.generation and every[0].generation < newest:
        announce(f"showing generation {newest} of job {runs[0].job} (--generation N, or all, shows earlier ones)")
    return chosen


def _numbers(name: str, numbers: Iterable[int]) -> str:
    """'rank 0', 'ranks 0 and 1', 'ranks 0, 1 and 5', or 'ranks 0 to 63'."""
    found = sorted(set(numbers))
    if len(found) == 1:
        return f"{name} {found[0]}"
    if len(found) > MANY_NUMBERS and found[-1] - found[0] == len(found) - 1:
        return f"{name}s {found[0]} to {found[-1]}"
    return f"{name}s {', '.join(map(str, found[:-1]))} and {found[-1]}"


def _print(logs: Sequence[RankLog], wanted: _Wanted) -> None:
    out, tail = EscapedOutput.on(sys.stdout.buffer, raw=wanted.raw), wanted.tail
    for number, log in enumerate(logs):
        if len(logs) > 1:
            gap = "\n" if number else ""
            out.write(f"{gap}==> rank {log.rank}, generation {log.generation}, host {log.host_id} <==\n".encode())
        with os.fdopen(open_worker_file(log.path), "rb") as file:
            file.seek(_start_of_last(log.path, tail) if tail else 0)
            while data := file.read(READ_SIZE_BYTES):
                out.write(data)
        out.flush()


def _start_of_last(path: Path, lines: int) -> int:
    """The offset at which the last `lines` lines of a file begin."""
    with os.fdopen(open_worker_file(path), "rb") as file:
        at = end = file.seek(0, os.SEEK_END)
        missing = lines
        while at > 0:
            begin = max(0, at - READ_SIZE_BYTES)
            file.seek(begin)
            block = file.read(at - begin)
            position = len(block) - (at == end and block.endswith(b"\n"))  # ignore the newline at the end of the file
            while (position := block.rfind(b"\n", 0, position)) >= 0:
                missing -= 1
                if not missing:
                    return begin + position + 1
            at = begin
    return 0


def _as_json(log: RankLog, tail: int) -> dict[str, Any]:
    with os.fdopen(open_worker_file(log.path), "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(_start_of_last(log.path, tail), size - MAX_JSON_BYTES))
        text = file.read(MAX_JSON_BYTES).decode(errors="replace")
    return {
        "host_id": log.host_id,
        "generation": log.generation,
        "rank": log.rank,
        "path": str(log.path),
        "size_bytes": size,
        "written_at": log.path.stat().st_mtime,
        "text": text,
    }


def _follow(runs: Sequence[JobLogs], logs: Sequence[RankLog], wanted: _Wanted, is_over: Callable[[], bool]) -> None:
    """Show new output until the job ends, or until Ctrl-C."""
    ranks, generation, tail = wanted.ranks, wanted.generation, wanted.tail
    begin = {log.path: _start_of_last(log.path, tail) if tail else 0 for log in logs}
    oldest = min(log.generation for log in logs)
    several = len({log.rank for log in logs}) > 1
    console = Console(tee={ALL_RANKS: BOTH}, prefix="[rank${rank}]: ") if several else Console()

    def begins_at(path: Path, number: int, rank: int) -> int | None:
        if (ranks and rank not in ranks) or number < oldest or (generation.isdecimal() and number != int(generation)):
            return None
        return begin.get(path, 0)

    out = EscapedOutput.on(sys.stdout.buffer, raw=wanted.raw)
    followers = [LogFollower(run.folder, console, out=out, err=out, begins_at=begins_at) for run in runs]
    while any([follower.pump() for follower in followers]) or not is_over():
        time.sleep(INTERVAL_S)
    for follower in followers:
        follower.close()
