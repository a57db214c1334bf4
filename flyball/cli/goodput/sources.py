"""Compute a goodput report from event logs on this machine, or fetch it from a supervisor."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from flyball.cli.reach.left_state import LeftState
from flyball.cli.reach.sources import SupervisorChoice, get_job
from flyball.cli.show.given_times import Moment
from flyball.cli.show.output import announce
from flyball.contracts import wire
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import NotFound, UsageError
from flyball.contracts.identity import is_name
from goodput.account.options import AccountOptions

if TYPE_CHECKING:
    from flyball.cli.reach.client import ApiClient
    from goodput.account.timeline_bins import TimelineBin
    from goodput.calculator import GoodputReport
    from goodput.read.event_files import MalformedLine

AUTO = "auto"


class Query(msgspec.Struct, frozen=True):
    """The run to report on, and how."""

    logs: tuple[Path, ...] = ()
    job: str = ""
    how_to_choose_job: str = "with --job JOB"  # for the hint if a log has several
    choice: SupervisorChoice = SupervisorChoice()
    log_format: str = AUTO
    log_map: str = ""
    strict: bool = False
    since: Moment | None = None
    until: Moment | None = None
    options: AccountOptions = AccountOptions()
    all_runs: bool = False  # of a job: also those that its newest run resumed
    quiet: bool = False  # count malformed lines without printing them


class Found(msgspec.Struct, frozen=True):
    """A report, its timeline in as many slices as wanted, and where both come from."""

    report: GoodputReport
    timeline: tuple[TimelineBin, ...]
    source: str
    left_out: int = 0  # malformed lines
    is_final: bool = False  # its supervisor has ended, so it will not change


_LOG_SUFFIXES = (".jsonl", ".json", ".log", ".csv", ".tsv", ".txt")  # a missing log file, rather than a job's name


def named_runs(a: str, b: str, query: Query) -> tuple[Query, Query]:
    """The query for each of two runs named by the user. Raises NotFound, UsageError."""
    one, other = _named_run(a, query), _named_run(b, query)
    if bool(one.logs) == bool(other.logs):
        return one, other
    # One is a log, the other a job: each gets only the options that apply to it.
    return _relevant_options(one), _relevant_options(other)


def _named_run(run: str, query: Query) -> Query:
    """Query for a log file, a folder of them, one job of these (LOG:JOB), a result of the simulator, or a job of the
    supervisor."""
    path = Path(run)
    if path.exists():
        return msgspec.structs.replace(query, logs=(path,), how_to_choose_job="as LOG:JOB")
    colons = [at for at, letter in enumerate(run) if letter == ":"]  # job names may contain colons, too
    if log_ends := next((at for at in colons if at and Path(run[:at]).exists()), 0):
        log, job = run[:log_ends], run[log_ends + 1 :]
        if not job:
            raise UsageError(f"{run} names no job.", hint=f"write {log}:JOB for one of its jobs, or just {log}")
        return msgspec.structs.replace(query, logs=(Path(log),), job=job)
    if not is_name(run) or path.suffix in _LOG_SUFFIXES:
        raise NotFound(
            f"There is no event log {run}.",
            hint="name a log file, a folder of *.jsonl files, LOG:JOB for one job in a log, or a job of the supervisor",
        )
    return msgspec.structs.replace(query, job=run)


def _relevant_options(query: Query) -> Query:
    if query.logs:
        return msgspec.structs.replace(query, choice=SupervisorChoice())
    return msgspec.structs.replace(query, log_format=AUTO, log_map="", strict=False)


def find(query: Query, *, bins: int = 0) -> Found:
    """The report on the run, with a timeline of `bins` slices.

    Raises NotFound, UsageError, InvalidMessage if `strict`, and the errors of `ApiClient`.
    """
    if not query.logs:
        return _from_supervisor(query, bins)
    from goodput.read.simulations import is_result

    if len(query.logs) == 1 and is_result(query.logs[0]):
        return _from_simulation(query)
    return _from_logs(query, bins)


def refuse_supervisor(query: Query) -> None:
    """Raises UsageError if a query of logs also chooses a supervisor."""
    if any(query.choice):
        raise UsageError(
            "--supervisor, --token-file, --state-dir and --database-url cannot be combined with log files.",
            hint="leave them out, or name a job with --job instead of files",
        )


def _from_logs(query: Query, bins: int) -> Found:
    from flyball.cli.show.progress import counted
    from goodput.account.timeline_bins import binned
    from goodput.calculator import analysis_of
    from goodput.history.job_history import SeveralJobs, build
    from goodput.read.event_files import MalformedLines
    from goodput.read.importers.options import parse_mapping
    from goodput.read.importers.registry import stream

    refuse_supervisor(query)
    refusals = MalformedLines(strict=query.strict)
    mapping = parse_mapping(query.log_map) if query.log_map else None
    # Streamed, because a log may have any size.
    events = stream(query.logs, refusals, format=query.log_format, mapping=mapping)
    try:
        history = build(events if query.quiet else counted("reading events:", events), job=query.job or None)
    except SeveralJobs as error:
        raise UsageError(error.message, hint=f"{error.hint} ({query.how_to_choose_job})") from error
    if not query.quiet:
        announce_skipped(refusals.count, refusals.named)
    options = _clipped(query, history.start, history.end) if query.since or query.until else query.options
    analysis = analysis_of(history, options)
    report = msgspec.structs.replace(analysis.report, notes=(*analysis.report.notes, *refusals.assumed))
    return Found(
        report=report,
        timeline=binned(analysis.timeline.intervals, report.started_at, report.ended_at, bins) if bins else (),
        source=", ".join(map(str, query.logs)),
        left_out=refusals.count,
    )


def _from_simulation(query: Query) -> Found:
    """The account in a result of `flyball simulate run -o json`, with its own slices."""
    from goodput.read.simulations import read_result

    refuse_supervisor(query)
    options = query.options
    if query.since or query.until or query.job or options.gpu_hour_price is not None or options.gpus is not None:
        raise UsageError(
            f"{query.logs[0]} is a result of the simulator, whose account is complete.",
            hint="leave out --from, --to, --job, --gpu-hour-price and --gpus",
        )
    result = read_result(query.logs[0])
    return Found(report=result.goodput, timeline=result.timeline, source=str(query.logs[0]), is_final=True)


def announce_skipped(count: int, first: Sequence[MalformedLine]) -> None:
    """Print how many log lines were not events, and what was wrong with the first."""
    if count:
        lines = "line that is not an event" if count == 1 else "lines that are not events"
        announce(f"skipped {count} {lines}, the first: {first[0]}")


def _clipped(query: Query, start: float, end: float) -> AccountOptions:
    """The options with --from and --to resolved for a run over [start, end]. Raises UsageError if nothing remains."""
    since = query.since.resolve(start, end) if query.since else None
    until = query.until.resolve(start, end) if query.until else None
    if (since is not None and since >= end) or (until is not None and until <= start):
        lasted = " to ".join(datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds") for at in (start, end))
        raise UsageError(f"The run has nothing in that time: it lasted from {lasted}.", hint="change --from or --to")
    return msgspec.structs.replace(query.options, from_at=since, to_at=until)


def _from_supervisor(query: Query, bins: int) -> Found:
    from goodput.account.timeline_bins import TimelineBin
    from goodput.calculator import GoodputReport

    if query.log_format != AUTO or query.log_map or query.strict:
        raise UsageError("--format, --map and --strict apply to log files, and none is named.", hint="name the files")
    with query.choice.open_read_only(query.job) as client:
        job = query.job or _only_job(client)
        options = query.options
        if query.since or query.until:
            info = get_job(client, job)
            options = _clipped(
                query, float(info["submitted_at"]), float(info.get("ended_at") or SystemClock().wall_s())
            )
        params = msgspec.structs.asdict(options) | {"timeline_bins": bins or None}
        query_of = {k: None if v is None else repr(v) for k, v in params.items()}
        answer = client.get("/v1/goodput", job=job, all_runs="true" if query.all_runs else None, **query_of)
        return Found(
            report=wire.convert(answer, GoodputReport),
            timeline=wire.convert(answer.get("timeline", []), tuple[TimelineBin, ...]),
            source=f"job {job} at {client.url}",
            is_final=isinstance(client, LeftState) and client.ended_at is not None,
        )


def _only_job(client: ApiClient) -> str:
    names = [j.get("job") or j["spec"]["job"] for j in client.items("/v1/jobs")]
    if not names:
        raise NotFound("The supervisor has no job.", hint="submit one with `flyball run`, or name a log file")
    if len(names) > 1:
        raise UsageError(f"There are several jobs: {', '.join(names)}.", hint="choose one with --job NAME")
    return str(names[0])
