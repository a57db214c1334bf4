"""The options that the goodput commands share: which run to report on, and how. Commands get them as one Query."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from flyball.cli.goodput.sources import AUTO, Query
from flyball.cli.reach.options import (
    DatabaseOption,
    JobOption,
    StateDirOption,
    SupervisorOption,
    TokenFileOption,
    expand,
)
from flyball.cli.reach.sources import SupervisorChoice
from flyball.cli.show.given_times import parse_duration, parse_moment
from goodput.account.options import AccountOptions


def with_query(*, without: Collection[str] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command with a parameter `query` the options of `_query`, except those in `without`."""
    return expand("query", _query, without=without)


def _query(
    *,
    logs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="LOG", help="event logs, or folders of *.jsonl (default: ask a supervisor)"),
    ] = None,
    job: JobOption = "",
    since: Annotated[
        str,
        typer.Option("--from", help="ignore earlier times: ISO 8601, Unix time, 2h (before end) or +30m (into run)"),
    ] = "",
    until: Annotated[str, typer.Option("--to", help="ignore later times, written in the same ways")] = "",
    log_format: Annotated[
        str,
        typer.Option("--format", help="format of the logs (default: detected; see goodput/importers.md)"),
    ] = AUTO,
    log_map: Annotated[
        str,
        typer.Option(
            "--map", metavar="KEY=VALUE,...", help="columns of a CSV log, and its time zone: at=time,step=iter"
        ),
    ] = "",
    strict: Annotated[bool, typer.Option("--strict", help="fail on a malformed line instead of skipping it")] = False,
    gpu_hour_price: Annotated[
        float | None,
        typer.Option(metavar="PRICE", min=0.0, help="price of one GPU hour, in any currency"),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="number of GPUs of the job (default: one per rank)")
    ] = None,
    all_runs: Annotated[
        bool, typer.Option("--all-runs", help="of a job: also the runs that its newest one resumed")
    ] = False,
    window: Annotated[str, typer.Option(help="length of the rolling window, for example 1h or 600s")] = "1h",
    supervisor: SupervisorOption = "",
    token_file: TokenFileOption = "",
    state_dir: StateDirOption = "",
    database_url: DatabaseOption = "",
) -> Query:
    """Build the query from the options. Raises UsageError."""
    return Query(
        logs=tuple(logs or ()),
        job=job,
        choice=SupervisorChoice(supervisor, token_file, state_dir, database_url),
        log_format=log_format,
        log_map=log_map,
        strict=strict,
        since=parse_moment("--from", since),
        until=parse_moment("--to", until),
        all_runs=all_runs,
        options=AccountOptions(gpu_hour_price=gpu_hour_price, gpus=gpus, window_s=parse_duration("--window", window)),
    )
