"""`flyball inject faults`, `fault` and `undo`: any fault of the catalog, for as long as it is to last."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.options import SupervisorOption, TokenFileOption, expand
from flyball.cli.reach.places import live_folders, live_record, state_root, supervisor_dir
from flyball.cli.reach.sources import SupervisorChoice
from flyball.cli.show.given_times import parse_duration
from flyball.cli.show.output import Format, OutputOption, announce, print_fields, print_table, printed
from flyball.cli.show.times import exact_clock
from flyball.cli.signals import EndSignals
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import UsageError

if TYPE_CHECKING:
    from simulator.inject.injector import FaultInjector
    from simulator.inject.journal import Journal

LOOK_INTERVAL_S = 0.1

JobOption = Annotated[str, typer.Option("--job", help="name of the job")]
RankOption = Annotated[int, typer.Option("--rank", min=-1, help="global rank")]
HostOption = Annotated[str, typer.Option("--host", help="host id, as `flyball get hosts` shows it")]


class Reach(NamedTuple):
    """How an injector reaches the supervisor, and what is on this machine."""

    choice: SupervisorChoice
    state_dir: Path | None
    supervisor_dir: Path | None

    @contextmanager
    def open(self, job: str = "") -> Iterator[tuple[ApiClient, FaultInjector]]:
        """An injector; at the end, all that it did is undone."""
        from simulator.inject.injector import FaultInjector

        with self.choice.connect(job) as client:
            injector = FaultInjector(
                client,
                clock=SystemClock(),
                journal=journal(),
                state_dir=self.state_dir,
                supervisor_dir=services_folder(client, self.supervisor_dir, os.environ),
            )
            with injector:
                yield client, injector


def reach_stack(
    *,
    state_dir: Annotated[
        Path | None, typer.Option("--state-dir", help="the host's state folder (default: its running daemon's)")
    ] = None,
    supervisor_dir: Annotated[
        Path | None, typer.Option("--supervisor-dir", help="the services' state folder, for faults of services")
    ] = None,
    supervisor: SupervisorOption = "",
    token_file: TokenFileOption = "",
) -> Reach:
    return Reach(SupervisorChoice(supervisor, token_file), state_dir, supervisor_dir)


def services_folder(client: ApiClient, given: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The state folder of this supervisor's services, if it is on this machine. The marks of its jobs say nothing about
    another supervisor's services. Raises UsageError if the `given` one is another's."""
    if given is not None:
        if not _is_of(client, given):
            raise UsageError(
                f"{given} has neither the address nor the token of the supervisor {client.url}.",
                hint="give --supervisor-dir and --supervisor of the same cluster",
            )
        return given
    return next((f for f in [supervisor_dir(environ), *live_folders(environ)] if _is_of(client, f)), None)


def _is_of(client: ApiClient, folder: Path) -> bool:
    record = live_record(folder)
    if record is not None and record.url == client.url:
        return True
    try:
        return client.has_token((folder / "token").read_text().strip())
    except OSError:
        return False


def journal() -> Journal:
    """Of all injectors of this user on this machine."""
    from simulator.inject.journal import Journal

    return Journal(state_root(os.environ) / "injections")


@expand("reach", reach_stack)
def faults(
    *,
    job: JobOption = "",
    rank: RankOption = -1,
    host: HostOption = "",
    reach: Reach,
    output: OutputOption = Format.TABLE,
) -> None:
    with reach.open(job) as (client, injector):
        if job and rank < 0:
            rank = 0
        if job and not host:
            host = next((str(r["host_id"]) for r in client.get(f"/v1/jobs/{job}")["ranks"] if r["rank"] == rank), "")
        offers = injector.offers(host_id=host, job=job, rank=rank)
    if printed(offers, output):
        return
    print_table(
        "Faults",
        ("fault", "of a", "what happens", "options", "lasts", "not available here"),
        (
            (
                offer.fault,
                offer.target,
                offer.about,
                " ".join(f"{name}={value}" for name, value in offer.options.items()),
                f"{offer.lasts_s:g} s" if offer.lasts_s else "-",
                offer.lacks,
            )
            for offer in offers
        ),
    )


@expand("reach", reach_stack)
def fault(
    *,
    name: Annotated[str, typer.Argument(metavar="FAULT", help="as `flyball inject faults` lists it")],
    job: JobOption = "",
    rank: RankOption = -1,
    host: HostOption = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="an option of the fault; may be repeated")
    ] = None,
    lasts: Annotated[str, typer.Option("--for", help="how long it lasts, e.g. 30s (default: as it is listed)")] = "",
    reach: Reach,
    output: OutputOption = Format.TABLE,
) -> int:
    """Waits until the fault is over, and undoes it then: earlier after Ctrl-C or SIGTERM."""
    from simulator.inject.injector import FaultRequest

    options = dict(_setting(text) for text in settings or [])
    lasts_s = parse_duration("--for", lasts) if lasts else -1.0
    idle = threading.Event()
    with EndSignals(("SIGTERM", "SIGINT")) as signals, reach.open(job) as (_, injector):
        with signals.raised():  # it may wait for a step or a phase; what was begun is undone
            done = injector.inject(FaultRequest(name, job, rank, host, options, lasts_s))
        if not printed(done, output):
            print_fields({"fault": done.fault, "target": done.target, "at": exact_clock(done.at), "jobs": done.jobs})
        if done.not_recorded:
            announce(f"warning: {done.not_recorded}")
        if injector.active:
            announce(f"it is undone after {done.lasts_s:g} s, or with Ctrl-C")
        while injector.active and not injector.failed and not signals.count:
            idle.wait(LOOK_INTERVAL_S)
    return signals.exit_code


def undo(*, output: OutputOption = Format.TABLE) -> int:
    """Exit code 1 if something could not be undone."""
    from simulator.inject.injector import undo_left

    book = journal()
    undone = undo_left(book)
    left = book.entries()
    if not printed({"undone": undone, "left": left}, output):
        rows = [(e.fault, e.target, "undone") for e in undone]
        rows += [
            (e.fault, e.target, f"its injector runs (pid {e.pid})" if not e.is_left else "NOT undone") for e in left
        ]
        print_table("Injections that were left", ("fault", "target", "state"), rows)
    return 1 if any(entry.is_left for entry in left) else 0


def clock(*, folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="where to build it")]) -> None:
    from simulator.inject.kinds.clocks import make_clock

    made = make_clock(folder, os.environ.get("LD_PRELOAD", ""))
    typer.echo(" ".join(f"{name}={value}" for name, value in made.items()))


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise UsageError(f"--set {text} is not valid.", hint="write --set NAME=VALUE, for example --set code=3")
    return name, value
