"""The options that the goodput commands share: which run to look at, and how. A command gets them as one Query."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from flyball.cli.goodput.sources import AUTO, Query
from flyball.cli.goodput.times import parse_duration, parse_moment
from flyball.cli.reach.options import DatabaseOption, JobOption, StateDirOption, SupervisorOption, TokenFileOption
from goodput.account.options import AccountOptions


def query_of(
    *,
    logs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="LOG", help="event logs, or folders of *.jsonl; without one a supervisor is asked"),
    ] = None,
    job: JobOption = "",
    since: Annotated[
        str, typer.Option("--from", help="only from here on: ISO 8601, seconds since 1970, 2h, +30m")
    ] = "",
    until: Annotated[str, typer.Option("--to", help="only up to here, written likewise")] = "",
    log_format: Annotated[
        str, typer.Option("--format", help="format of the logs (default: detected; see goodput-importers.md)")
    ] = AUTO,
    log_map: Annotated[
        str,
        typer.Option("--map", metavar="KEY=VALUE,...", help="columns of a CSV log, time zone: at=time,step=iter"),
    ] = "",
    strict: Annotated[bool, typer.Option("--strict", help="fail on a malformed line instead of skipping it")] = False,
    gpu_hour_price: Annotated[
        float | None,
        typer.Option(metavar="PRICE", min=0.0, help="what a GPU costs per hour, in any currency"),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="how many the job has (default: its ranks)")
    ] = None,
    window: Annotated[str, typer.Option(help="length of the rolling window: 1h, 600s")] = "1h",
    supervisor: SupervisorOption = "",
    token_file: TokenFileOption = "",
    state_dir: StateDirOption = "",
    database_url: DatabaseOption = "",
) -> Query:
    """What the options ask for. Raises UsageError."""
    return Query(
        logs=tuple(logs or ()),
        job=job,
        supervisor=supervisor,
        token_file=token_file,
        state_dir=state_dir,
        database_url=database_url,
        log_format=log_format,
        log_map=log_map,
        strict=strict,
        since=parse_moment("--from", since),
        until=parse_moment("--to", until),
        options=AccountOptions(gpu_hour_price=gpu_hour_price, gpus=gpus, window_s=parse_duration("--window", window)),
    )


def with_query(*, without: Collection[str] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For a command with a parameter `query`: on the command line it has the options of `query_of` instead, but those
    `without` that it has no use for. typer goes by a function's signature, so that is where they are put."""
    shared = [p for p in inspect.signature(query_of, eval_str=True).parameters.values() if p.name not in without]

    def changed(command: Callable[..., Any]) -> Callable[..., Any]:
        def with_options(**given: Any) -> Any:  # noqa: ANN401 - what typer made of the command line
            return command(query=query_of(**{p.name: given.pop(p.name) for p in shared}), **given)

        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name != "query"]
        with_options.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
        return with_options

    return changed
