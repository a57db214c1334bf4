"""`flyball inject`: real faults on a running job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.options import SupervisorOption, TokenFileOption, connect, examples
from flyball.cli.show.output import Format, OutputOption, moment, print_fields, print_json
from flyball.contracts.clock import SystemClock

if TYPE_CHECKING:
    from simulator.inject.faults import Injection

app = typer.Typer(
    help="Inject a real fault into a running job on this machine; docs/faults.md says what is touched.",
    epilog=examples("flyball inject kill --job llama --rank 1", "flyball inject preempt --host host-b --deadline 30"),
    no_args_is_help=True,
)

JobName = Annotated[str, typer.Option("--job", help="name of the job")]
RankNumber = Annotated[int, typer.Option("--rank", min=0, help="global rank")]
HostName = Annotated[str, typer.Option("--host", help="id of the host")]
HostFolder = Annotated[
    Path | None, typer.Option("--state-dir", help="the host's state folder (default: that of its running daemon)")
]


@app.command(
    "kill",
    help="Kill the process of one rank (SIGKILL).",
    epilog=examples("flyball inject kill --job llama --rank 1"),
)
def kill(
    *,
    job: JobName,
    rank: RankNumber,
    state_dir: HostFolder = None,
    supervisor: SupervisorOption = "",
    token_file: TokenFileOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    from simulator.inject import faults

    _carry_out(
        lambda api: faults.kill(api, job=job, rank=rank, clock=SystemClock(), state_dir=state_dir),
        connect(supervisor, token_file, ""),
        output,
    )


@app.command(
    "hang",
    help="Freeze the process of one rank (SIGSTOP).",
    epilog=examples("flyball inject hang --job llama --rank 1"),
)
def hang(
    *,
    job: JobName,
    rank: RankNumber,
    state_dir: HostFolder = None,
    supervisor: SupervisorOption = "",
    token_file: TokenFileOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    from simulator.inject import faults

    _carry_out(
        lambda api: faults.hang(api, job=job, rank=rank, clock=SystemClock(), state_dir=state_dir),
        connect(supervisor, token_file, ""),
        output,
    )


@app.command(
    "host-down",
    help="Take a host down: kill its processes, remove its shared memory and its state folder.",
    epilog=examples("flyball inject host-down --host host-b"),
)
def host_down(
    *,
    host: HostName,
    state_dir: HostFolder = None,
    supervisor: SupervisorOption = "",
    token_file: TokenFileOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    from simulator.inject import faults

    _carry_out(
        lambda api: faults.host_down(api, host_id=host, clock=SystemClock(), state_dir=state_dir),
        connect(supervisor, token_file, ""),
        output,
    )


@app.command(
    "preempt",
    help="Send a host a preemption notice, as a cloud does.",
    epilog=examples("flyball inject preempt --host host-b --deadline 30"),
)
def preempt(
    *,
    host: HostName,
    deadline_s: Annotated[float, typer.Option("--deadline", min=0.1, help="seconds of notice")] = 30.0,
    state_dir: HostFolder = None,
    supervisor: SupervisorOption = "",
    token_file: TokenFileOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    from simulator.inject import faults

    _carry_out(
        lambda api: faults.preempt(api, host_id=host, deadline_s=deadline_s, clock=SystemClock(), state_dir=state_dir),
        connect(supervisor, token_file, ""),
        output,
    )


def _carry_out(act: Callable[[ApiClient], Injection], client: ApiClient, output: Format) -> None:
    with client:
        done = act(client)
    if output is Format.JSON:
        print_json(done)
        return
    print_fields(
        {
            "fault": done.fault,
            "target": done.target,
            "at": moment(done.at),
            "jobs": done.jobs,
            "processes": done.pids,
            "segments removed": done.removed_segments,
        }
    )
