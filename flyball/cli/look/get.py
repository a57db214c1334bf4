"""`flyball get KIND [NAME]`: list what a supervisor knows, filtered."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from flyball.cli.look.kinds import KINDS, NAMES, ListedKind, find_kind
from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.names import found_or_near
from flyball.cli.reach.options import JobOption, command_help, with_supervisor
from flyball.cli.reach.sources import SupervisorChoice, get_job
from flyball.cli.show.given_times import parse_duration
from flyball.cli.show.output import Format, OutputOption, announce, print_table, printed
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import NotFound, UsageError

Json = dict[str, Any]
MAX_OPEN_JOBS = 500  # whose checkpoints are listed: each is a request

COMMAND = command_help(
    f"List {', '.join(NAMES[:-1])} or {NAMES[-1]}, the newest last. With a name, show only that one.",
    "flyball get incidents --job llama --since 2h",
    "flyball get hosts --state silent --state failed -o wide",
    "flyball get actions --state failed -o json",
    "flyball get checkpoints",
    "flyball get host host-b -o yaml",
)

KindArgument = Annotated[str, typer.Argument(metavar="KIND", help=f"one of: {', '.join(NAMES)}")]


@with_supervisor(without=())
def command(
    *,
    kind: KindArgument,
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="only this one")] = "",
    job: JobOption = "",
    host: Annotated[str, typer.Option("--host", help="only about this host")] = "",
    state: Annotated[list[str] | None, typer.Option("--state", help="only in this state; repeatable")] = None,
    since: Annotated[str, typer.Option("--since", metavar="DURATION", help="only of the last 90s, 30m, 2h, 1d")] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, help="list at most this many of the newest")] = 50,
    choice: SupervisorChoice,
    output: OutputOption = Format.TABLE,
) -> None:
    """Read-only."""
    wanted = find_kind(kind)
    now = SystemClock().wall_s()
    begin = now - parse_duration("--since", since) if since else None
    filters = {"job": job or None, "host": host or None, "state": state or None, "since": begin}
    _check_filters(wanted, filters)
    with choice.open_read_only(job if wanted.name != "checkpoints" else name or job) as client:
        if name:
            item = fetch(client, wanted, name)
            items = [item]
        else:
            items, has_more = _listed(client, wanted, filters, limit)
    if printed(item if name else {"items": items}, output):
        return
    wide = output is Format.WIDE
    rows = (wanted.cells(item, now, wide=wide) for item in items)
    print_table(wanted.name.capitalize(), wanted.table(wide=wide), rows)
    if not name and has_more:
        announce(f"showing the newest {len(items)} (--limit N shows more)")


def fetch(client: ApiClient, kind: ListedKind, name: str) -> Json:
    """One thing by its name. Raises NotFound with similar names, UsageError."""
    if kind.name == "jobs":
        return get_job(client, name)
    if kind.name == "checkpoints":
        get_job(client, name)
        found: Json = client.get(kind.path, job=name, copies="false")
        return found
    if kind.can_show_one:
        _check_name(kind, name)
        with found_or_near(client, kind.path, kind.key, name):
            found = client.get(f"{kind.path}/{name}")
        return found
    if kind.name == "orders":
        items = client.everything(kind.path)
    else:
        _check_name(kind, name)
        prefix, _, number = name.partition("-")
        items = client.items(kind.path, before=f"{prefix}-{int(number) + 1}", limit=1)
    for item in items:
        if item[kind.key] == name:
            return item
    raise NotFound(f"There is no {kind.one} {name}.", hint=f"`flyball get {kind.name}` lists the newest")


def _check_name(kind: ListedKind, name: str) -> None:
    prefix, dash, _ = kind.example.partition("-")
    if dash and kind.name != "hosts" and not re.fullmatch(rf"{prefix}-\d{{1,18}}", name):
        raise UsageError(
            f"{name!r} is no name of {kind.one}s.",
            hint=f"for example {kind.example}; `flyball get {kind.name}` lists them",
        )


def _check_filters(kind: ListedKind, filters: dict[str, Any]) -> None:
    """An option that the kind does not have is an error: without it, everything would be listed."""
    for name, value in filters.items():
        if value is not None and name not in kind.filters:
            having = ", ".join(one.name for one in KINDS if name in one.filters)
            raise UsageError(f"--{name} does not apply to {kind.name}.", hint=f"it applies to {having}")


def _listed(client: ApiClient, kind: ListedKind, filters: dict[str, Any], limit: int) -> tuple[list[Json], bool]:
    """The newest items, and whether there are more."""
    if kind.name == "checkpoints":
        jobs = [filters["job"]] if filters["job"] else _open_jobs(client)
        return [fetch(client, kind, job) for job in jobs[-limit:]], len(jobs) > limit
    found = client.newest(kind.path, limit + 1, **filters)
    return found[-limit:], len(found) > limit


def _open_jobs(client: ApiClient) -> list[str]:
    return [str(job["job"]) for job in client.newest("/v1/jobs", MAX_OPEN_JOBS, open="true")]
