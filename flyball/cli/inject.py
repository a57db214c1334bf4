"""`flyball inject`: inject real faults into a running job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.options import SupervisorOption, TokenFileOption, command_help, expand
from flyball.cli.reach.sources import SupervisorChoice
from flyball.cli.show.output import Format, OutputOption, print_fields, print_json
from flyball.cli.show.times import exact_clock
from flyball.contracts.clock import SystemClock

if TYPE_CHECKING:
    from simulator.inject.faults import Injection

app = typer.Typer(
    **command_help(
        "Inject a real fault into a running job on this machine. See docs/faults.md for what each one touches.",
        "flyball inject kill --job llama --rank 1",
        "flyball inject preempt --host host-b --deadline 30",
    ),
    no_args_is_help=True,
)

JobName = Annotated[str, typer.Option("--job", help="name of the job")]
RankNumber = Annotated[int, typer.Option("--rank", min=0, help="global rank")]
HostName = Annotated[str, typer.Option("--host", help="host id, as `flyball status` shows it")]


class _Injector(NamedTuple):
    """Where to inject a fault, and how to print the result."""

    choice: SupervisorChoice
    state_dir: Path | None
    output: Format

    def inject(self, fault: Callable[[ApiClient], Injection]) -> None:
        with self.choice.connect() as client:
            done = fault(client)
        if self.output is Format.JSON:
            print_json(done)
            return
        print_fields(
            {
                "fault": done.fault,
                "target": done.target,
                "at": exact_clock(done.at),
                "jobs": done.jobs,
                "processes": done.pids,
                "segments removed": done.removed_segments,
            }
        )


def _injector(
    *,
    state_dir: Annotated[
        Path | None, typer.Option("--state-dir", help="the host's state folder (default: its running daemon's)")
    ] = None,
    supervisor: SupervisorOption = "",
    token_file: TokenFileOption = "",
    output: OutputOption = Format.TABLE,
) -> _Injector:
    return _Injector(SupervisorChoice(supervisor, token_file), state_dir, output)


@app.command(
    "kill",
    **command_help(
        "Kill the process of one rank (SIGKILL).",
        "flyball inject kill --job llama --rank 1",
    ),
)
@expand("injector", _injector)
def kill(*, job: JobName, rank: RankNumber, injector: _Injector) -> None:
    from simulator.inject import faults

    injector.inject(lambda api: faults.kill(api, job=job, rank=rank, clock=SystemClock(), state_dir=injector.state_dir))


@app.command(
    "hang",
    **command_help(
        "Freeze the process of one rank (SIGSTOP).",
        "flyball inject hang --job llama --rank 1",
    ),
)
@expand("injector", _injector)
def hang(*, job: JobName, rank: RankNumber, injector: _Injector) -> None:
    from simulator.inject import faults

    injector.inject(lambda api: faults.hang(api, job=job, rank=rank, clock=SystemClock(), state_dir=injector.state_dir))


@app.command(
    "host-down",
    **command_help(
        "Take a host down: kill all its processes, remove its shared memory and its state folder.",
        "flyball inject host-down --host host-b",
    ),
)
@expand("injector", _injector)
def host_down(*, host: HostName, injector: _Injector) -> None:
    from simulator.inject import faults

    injector.inject(lambda api: faults.host_down(api, host_id=host, clock=SystemClock(), state_dir=injector.state_dir))


@app.command(
    "preempt",
    **command_help(
        "Send a host a preemption notice, as a cloud provider does.",
        "flyball inject preempt --host host-b --deadline 30",
    ),
)
@expand("injector", _injector)
def preempt(
    *,
    host: HostName,
    deadline_s: Annotated[float, typer.Option("--deadline", min=0.1, help="seconds of notice")] = 30.0,
    injector: _Injector,
) -> None:
    from simulator.inject import faults

    injector.inject(
        lambda api: faults.preempt(
            api, host_id=host, deadline_s=deadline_s, clock=SystemClock(), state_dir=injector.state_dir
        )
    )
