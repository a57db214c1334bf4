"""Where a goodput report comes from: event logs on this machine, or a supervisor."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from flyball.cli.goodput.times import Moment
from flyball.cli.reach.job_names import get_job
from flyball.cli.reach.left_state import LeftState
from flyball.cli.reach.options import look
from flyball.cli.show.output import say
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
    """Which run, and how to look at it."""

    logs: tuple[Path, ...] = ()
    job: str = ""
    job_chosen: str = "with --job JOB"  # how a person chooses one of a log's several
    supervisor: str = ""
    token_file: str = ""
    state_dir: str = ""
    database_url: str = ""
    log_format: str = AUTO
    log_map: str = ""
    strict: bool = False
    since: Moment | None = None
    until: Moment | None = None
    options: AccountOptions = AccountOptions()
    quiet: bool = False  # malformed lines are counted, and not named on stderr


class Found(msgspec.Struct, frozen=True):
    """A report, the slices of its time (as many as were asked for), and where they come from."""

    report: GoodputReport
    timeline: tuple[TimelineBin, ...]
    source: str
    left_out: int = 0  # malformed lines
    is_final: bool = False  # nobody will add to it: its supervisor has ended


_LOG_SUFFIXES = (".jsonl", ".json", ".log", ".csv", ".tsv", ".txt")  # of what is no job, though it could be one's name


def named_runs(a: str, b: str, query: Query) -> tuple[Query, Query]:
    """`query` for each of two runs that a person named. Raises NotFound, UsageError."""
    one, other = _named_run(a, query), _named_run(b, query)
    if bool(one.logs) == bool(other.logs):
        return one, other
    # What is said of logs is for the one that is a log, what is said of a supervisor for the other.
    return _of_its_kind(one), _of_its_kind(other)


def _named_run(run: str, query: Query) -> Query:
    """A log file, a folder of them, one job of these (LOG:JOB), or a job at the supervisor."""
    path = Path(run)
    if path.exists():
        return msgspec.structs.replace(query, logs=(path,), job_chosen="as LOG:JOB")
    colons = [at for at, letter in enumerate(run) if letter == ":"]  # a job's name may have some, too
    if log_ends := next((at for at in colons if at and Path(run[:at]).exists()), 0):
        log, job = run[:log_ends], run[log_ends + 1 :]
        if not job:
            raise UsageError(f"{run} names no job.", hint=f"name one of the log's jobs as {log}:JOB, or {log} alone")
        return msgspec.structs.replace(query, logs=(Path(log),), job=job)
    if not is_name(run) or path.suffix in _LOG_SUFFIXES:
        raise NotFound(
            f"There is no event log {run}.",
            hint="name a log file, a folder of *.jsonl, one of their jobs as LOG:JOB, or a job of the supervisor",
        )
    return msgspec.structs.replace(query, job=run)


def _of_its_kind(query: Query) -> Query:
    if query.logs:
        return msgspec.structs.replace(query, supervisor="", token_file="", state_dir="", database_url="")
    return msgspec.structs.replace(query, log_format=AUTO, log_map="", strict=False)


def find(query: Query, *, bins: int = 0) -> Found:
    """The report on the run that `query` names. Raises NotFound, UsageError, InvalidMessage with `strict`, and what a
    supervisor answers."""
    return _from_logs(query, bins) if query.logs else _from_supervisor(query, bins)


def refuse_supervisor(query: Query) -> None:
    """Raises UsageError if a query of logs also says which supervisor to ask."""
    if query.supervisor or query.token_file or query.state_dir or query.database_url:
        raise UsageError(
            "--supervisor, --token-file, --state-dir and --database-url do not go with log files.",
            hint="leave them out, or name a job with --job and no file",
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
    # No event is kept: a log may be of any size.
    events = stream(query.logs, refusals, format=query.log_format, mapping=mapping)
    try:
        history = build(events if query.quiet else counted("reading events:", events), job=query.job or None)
    except SeveralJobs as error:
        raise UsageError(error.message, hint=f"{error.hint} ({query.job_chosen})") from error
    if not query.quiet:
        say_left_out(refusals.count, refusals.named)
    options = _clipped(query, history.start, history.end) if query.since or query.until else query.options
    analysis = analysis_of(history, options)
    report = msgspec.structs.replace(analysis.report, notes=(*analysis.report.notes, *refusals.assumed))
    return Found(
        report=report,
        timeline=binned(analysis.timeline.intervals, report.started_at, report.ended_at, bins) if bins else (),
        source=", ".join(map(str, query.logs)),
        left_out=refusals.count,
    )


def say_left_out(count: int, first: Sequence[MalformedLine]) -> None:
    """How many lines of a log could not be used, and why the first could not, on stderr."""
    if count:
        lines = "line is no event and was" if count == 1 else "lines are no events and were"
        say(f"{count} {lines} left out, the first: {first[0]}")


def _clipped(query: Query, start: float, end: float) -> AccountOptions:
    """The options with the moments that relate to a run over [start, end]. Raises UsageError if none of it is left."""
    since = query.since.resolve(start, end) if query.since else None
    until = query.until.resolve(start, end) if query.until else None
    if (since is not None and since >= end) or (until is not None and until <= start):
        lasted = " to ".join(datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds") for at in (start, end))
        raise UsageError(
            f"Nothing of the run lies in that time: it lasted from {lasted}.", hint="change --from or --to"
        )
    return msgspec.structs.replace(query.options, from_at=since, to_at=until)


def _from_supervisor(query: Query, bins: int) -> Found:
    from goodput.account.timeline_bins import TimelineBin
    from goodput.calculator import GoodputReport

    if query.log_format != AUTO or query.log_map or query.strict:
        raise UsageError("--format, --map and --strict are for log files, and none is named.", hint="name the files")
    with look(
        query.supervisor, query.token_file, query.state_dir, job=query.job, database_url=query.database_url
    ) as client:
        job = query.job or _only_job(client)
        options = query.options
        if query.since or query.until:
            about = get_job(client, job)
            options = _clipped(
                query, float(about["submitted_at"]), float(about.get("ended_at") or SystemClock().wall_s())
            )
        asked = msgspec.structs.asdict(options) | {"timeline_bins": bins or None}
        answer = client.get("/v1/goodput", job=job, **{k: None if v is None else repr(v) for k, v in asked.items()})
        return Found(
            report=wire.convert(answer, GoodputReport),
            timeline=wire.convert(answer.get("timeline", []), tuple[TimelineBin, ...]),
            source=f"job {job} at {client.url}",
            is_final=isinstance(client, LeftState) and client.ended_at is not None,
        )


def _only_job(client: ApiClient) -> str:
    names = [j.get("job") or j["spec"]["job"] for j in client.items("/v1/jobs")]
    if not names:
        raise NotFound("The supervisor knows no job.", hint="submit one with `flyball run`, or name a log file")
    if len(names) > 1:
        raise UsageError(f"There are several jobs: {', '.join(names)}.", hint="choose one with --job NAME")
    return str(names[0])
