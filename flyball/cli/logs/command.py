"""`flyball logs`: what the ranks of a job wrote, while it runs and after it has ended."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from flyball.cli.logs.console import INTERVAL_S, LogFollower
from flyball.cli.logs.job_logs import JobLogs, RankLog, jobs_here, jobs_of_daemons
from flyball.cli.logs.log_mirror import ALL, LogMirror
from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.options import SupervisorOption, TokenFileOption, connect, examples
from flyball.cli.reach.places import find_supervisor
from flyball.cli.run.host_process import is_written
from flyball.cli.show.output import Format, OutputOption, print_json, say
from flyball.contracts.cluster import JobState
from flyball.contracts.errors import FlyballError, NotFound, UsageError
from flyball.contracts.on_host.console_request import BOTH
from flyball.contracts.reports.rank_logs import MAX_PIECE_BYTES, NEWEST
from flyball.launch.output_flags import ALL_RANKS, Console

COMMAND: dict[str, Any] = {
    "help": "Show what the ranks of a job wrote, on this machine also after its end and without a supervisor.",
    "epilog": examples(
        "flyball logs",
        "flyball logs llama -f",
        "flyball logs llama --rank 0 --rank 3 --tail 50",
        "flyball logs llama --generation 0",
        "flyball logs llama --generation all -o json",
        "flyball logs llama --rank 12 -f --supervisor http://10.0.0.1:7370",
    ),
}

ALL_GENERATIONS = "all"
NAMES_SHOWN = 5
JSON_LINES = 1000  # of a log, if --tail does not say
READ_SIZE_BYTES = 1 << 20
JSON_MOST_BYTES = 4 << 20  # of a log
LOCAL_INTERVAL_S = 2.0  # at which all processes are looked through for one that still writes
REMOTE_INTERVAL_S = 0.5
MAX_REMOTE_RANKS = 16  # that are shown without --rank
LINE_BYTES = 400  # of a line, to guess how much of a log far away its last lines are


def command(
    *,
    job: Annotated[str, typer.Argument(help="name of the job (default: the one that wrote last)")] = "",
    rank: Annotated[list[int] | None, typer.Option("--rank", min=0, help="only this rank; may be repeated")] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="go on until the job has ended")] = False,
    generation: Annotated[
        str, typer.Option("--generation", help="a number, or all (default: the newest; with -f also those that follow)")
    ] = "",
    host: Annotated[str, typer.Option("--host", help="only ranks of this host")] = "",
    tail: Annotated[int, typer.Option("--tail", min=0, help="only the last lines of each log; 0: all")] = 0,
    state_dir: Annotated[str, typer.Option("--state-dir", help="the state folder of the run or of the host")] = "",
    supervisor: SupervisorOption = "",
    token_file: TokenFileOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Bytes as the ranks wrote them, on stdout."""
    if generation and generation != ALL_GENERATIONS and not generation.isdecimal():
        raise UsageError(f"--generation {generation} is neither a number nor all.", hint="for example --generation 0")
    if follow and output is Format.JSON:
        raise UsageError("--follow and -o json contradict each other.", hint="leave one of them out")
    wanted = _Wanted(job, tuple(rank or ()), generation, host, tail)
    if not supervisor:
        try:
            runs = _choose(wanted, state_dir)
            _show(
                runs,
                wanted,
                follow,
                output,
                _every(LOCAL_INTERVAL_S, lambda: not any(is_written(run.folder) for run in runs)),
            )
            return
        except NotFound:
            if not job or state_dir or not _knows_supervisor(token_file):
                raise
    if not job:
        raise UsageError("A supervisor has many jobs.", hint="name one: flyball logs JOB --supervisor URL")
    with connect(supervisor, token_file, "") as client, tempfile.TemporaryDirectory(prefix="flyball-logs-") as folder:
        _show_remote(client, wanted, Path(folder), follow, output)


@dataclass(frozen=True)
class _Wanted:
    """What was asked for."""

    job: str
    ranks: tuple[int, ...]
    generation: str
    host: str
    tail: int


def _knows_supervisor(token_file: str) -> bool:
    try:
        find_supervisor(os.environ, token_file=token_file)
    except FlyballError:
        return False
    return True


def _show(runs: Sequence[JobLogs], wanted: _Wanted, follow: bool, output: Format, is_over: Callable[[], bool]) -> None:
    logs = _select(runs, wanted)
    if output is Format.JSON:
        print_json({"job": runs[0].job, "logs": [_as_json(log, wanted.tail or JSON_LINES) for log in logs]})
    elif follow:
        _follow(runs, logs, wanted, is_over)
    else:
        _print(logs, wanted.tail)


def _show_remote(client: ApiClient, wanted: _Wanted, folder: Path, follow: bool, output: Format) -> None:
    """Through the supervisor: logs are copied to a folder, and shown from there."""
    job = client.get(f"/v1/jobs/{wanted.job}")
    by_host: dict[str, list[int]] = {}
    for one in job["ranks"]:
        if (not wanted.ranks or one["rank"] in wanted.ranks) and wanted.host in ("", one["host_id"]):
            by_host.setdefault(one["host_id"], []).append(one["rank"])
    if wanted.host and wanted.ranks and not by_host:  # they were there before
        by_host[wanted.host] = list(wanted.ranks)
    placed = sum(map(len, by_host.values()))
    if placed > MAX_REMOTE_RANKS and not wanted.ranks:
        say(f"rank 0 of {placed}; others: --rank R")
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

    _show(runs, wanted, follow, output, _every(REMOTE_INTERVAL_S, is_over))


def _every(interval_s: float, look: Callable[[], bool]) -> Callable[[], bool]:
    """Look at most that often; false between."""
    due_at = 0.0

    def rarely() -> bool:
        nonlocal due_at
        if time.monotonic() < due_at:
            return False
        found = look()
        due_at = time.monotonic() + interval_s
        return found

    return rarely


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
        some = f" There are some of: {', '.join(known[:NAMES_SHOWN])}{more}." if known else ""
        what = f"job {job}" if job else "any job"
        raise NotFound(
            f"No logs of {what}{f' on host {host}' if host else ''} are on this machine.{some}",
            hint="ask where its ranks ran, name the folder (--state-dir DIR), or a supervisor (--supervisor URL)",
        )
    newest = {logs.host_id: logs for logs in named}  # the last of a host wins
    return list(newest.values())


def _select(runs: Sequence[JobLogs], asked: _Wanted) -> list[RankLog]:
    """The logs that were asked for, by generation and rank. Raises NotFound."""
    ranks, generation = asked.ranks, asked.generation
    every = sorted((log for run in runs for log in run.logs()), key=lambda log: (log.generation, log.rank))
    if not every:
        raise NotFound(
            f"There is no such log of job {asked.job} yet.",
            hint="`flyball status` shows whether it runs, and where its ranks are",
        )
    newest = max(log.generation for log in every)
    wanted = generation or str(newest)
    chosen = [
        log for log in every if (not ranks or log.rank in ranks) and wanted in (ALL_GENERATIONS, str(log.generation))
    ]
    if not chosen:
        has = sorted({log.rank for log in every})
        raise NotFound(
            f"Job {runs[0].job} has no such log here: ranks {has[0]} to {has[-1]}, generations "
            f"{every[0].generation} to {newest}.",
            hint="choose with --rank R and --generation N; ranks of other machines have their logs there",
        )
    if not generation and every[0].generation < newest:
        say(f"generation {newest} of job {runs[0].job}; earlier ones: --generation N, or all")
    return chosen


def _print(logs: Sequence[RankLog], tail: int) -> None:
    out = sys.stdout.buffer
    for number, log in enumerate(logs):
        if len(logs) > 1:
            gap = "\n" if number else ""
            out.write(f"{gap}==> rank {log.rank}, generation {log.generation}, host {log.host_id} <==\n".encode())
        with log.path.open("rb") as file:
            file.seek(_start_of_last(log.path, tail) if tail else 0)
            while data := file.read(READ_SIZE_BYTES):
                out.write(data)
        out.flush()


def _start_of_last(path: Path, lines: int) -> int:
    """The offset at which the last lines of a file begin."""
    with path.open("rb") as file:
        at = end = file.seek(0, os.SEEK_END)
        missing = lines
        while at > 0:
            begin = max(0, at - READ_SIZE_BYTES)
            file.seek(begin)
            block = file.read(at - begin)
            position = len(block) - (at == end and block.endswith(b"\n"))  # the end of the last line begins none
            while (position := block.rfind(b"\n", 0, position)) >= 0:
                missing -= 1
                if not missing:
                    return begin + position + 1
            at = begin
    return 0


def _as_json(log: RankLog, tail: int) -> dict[str, Any]:
    with log.path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(_start_of_last(log.path, tail), size - JSON_MOST_BYTES))
        text = file.read(JSON_MOST_BYTES).decode(errors="replace")
    return {
        "host_id": log.host_id,
        "generation": log.generation,
        "rank": log.rank,
        "path": str(log.path),
        "size_bytes": size,
        "written_at": log.path.stat().st_mtime,
        "text": text,
    }


def _follow(runs: Sequence[JobLogs], logs: Sequence[RankLog], asked: _Wanted, is_over: Callable[[], bool]) -> None:
    """Live, until nothing writes any more, or Ctrl-C."""
    ranks, generation, tail = asked.ranks, asked.generation, asked.tail
    begin = {log.path: _start_of_last(log.path, tail) if tail else 0 for log in logs}
    oldest = min(log.generation for log in logs)
    several = len({log.rank for log in logs}) > 1
    console = Console(tee={ALL_RANKS: BOTH}, prefix="[rank${rank}]: ") if several else Console()

    def begins_at(path: Path, number: int, rank: int) -> int | None:
        if (ranks and rank not in ranks) or number < oldest or (generation.isdecimal() and number != int(generation)):
            return None
        return begin.get(path, 0)

    out = sys.stdout.buffer
    followers = [LogFollower(run.folder, console, out=out, err=out, begins_at=begins_at) for run in runs]
    while any([follower.pump() for follower in followers]) or not is_over():
        time.sleep(INTERVAL_S)
    for follower in followers:
        follower.close()
