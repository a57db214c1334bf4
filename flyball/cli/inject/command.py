"""`flyball inject`: inject real faults into a running job. Registers the commands of this folder."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from flyball.cli.inject import agents, campaign
from flyball.cli.inject import faults as catalog
from flyball.cli.reach.client import ApiClient
from flyball.cli.reach.options import SupervisorOption, TokenFileOption, command_help, expand
from flyball.cli.reach.sources import SupervisorChoice
from flyball.cli.show.messages import announce
from flyball.cli.show.output import Format, OutputOption, print_fields, printed
from flyball.cli.show.times import exact_clock
from flyball.cli.signals import EndSignals
from flyball.contracts.clock import SystemClock
from flyball.contracts.reports.conditions import Severity

if TYPE_CHECKING:
    from simulator.inject.faults import Injection

app = typer.Typer(
    **command_help(
        "Inject a real fault into a running job on this machine that was started with --injectable. "
        "docs/reference/inject.md says what each one touches.",
        "flyball inject kill --job llama --rank 1",
        "flyball inject preempt --host host-b --deadline 30",
    ),
    no_args_is_help=True,
)

app.command(
    "faults",
    **command_help(
        "List all faults, with their options, and what each one lacks here.",
        "flyball inject faults",
        "flyball inject faults --job llama --rank 1",
    ),
)(catalog.faults)
app.command(
    "fault",
    **command_help(
        "Inject any fault of the list, and undo it when it is over.",
        "flyball inject fault slow --job llama --rank 1 --for 60s",
        "flyball inject fault exit --job llama --rank 1 --set code=3 --set step=200",
        "flyball inject fault host-reboot --host host-b",
    ),
)(catalog.fault)
app.command(
    "undo",
    **command_help(
        "Undo what injectors on this machine left that were killed.",
        "flyball inject undo",
    ),
)(catalog.undo)
app.command(
    "clock",
    **command_help(
        "Build a wall clock that `clock-jump` can set, and print the environment of processes that are to have it.",
        "env $(flyball inject clock /tmp/clock-a) flyball host --supervisor http://10.0.0.1:7370",
    ),
)(catalog.clock)

app.command(
    "campaign",
    **command_help(
        "Inject random faults into a running job for some time, and report for each how it was detected, what was "
        "decided, when the job had recovered, and what it lost.",
        "flyball inject campaign --job llama --mix llama3 --rate 60 --duration 30m --out out.html",
        "flyball inject campaign --job llama --mix kill=2,hang=1 --seed 7 --json",
    ),
)(campaign.campaign)
app.command(
    "agent",
    **command_help(
        "Inject faults on this machine for campaigns that run elsewhere. Listens on the loopback address only, has a "
        "token of its own, and never runs unless it is started by this command.",
        "flyball inject agent --agent-token-file inject.token --port 7390",
    ),
)(agents.agent)

JobName = Annotated[str, typer.Option("--job", help="name of the job")]
RankNumber = Annotated[int, typer.Option("--rank", min=0, help="global rank")]
HostName = Annotated[str, typer.Option("--host", help="host id, as `flyball get hosts` shows it")]


class _Injector(NamedTuple):
    """Where to inject a fault, and how to print the result."""

    choice: SupervisorChoice
    state_dir: Path | None
    output: Format

    def inject(self, fault: Callable[[ApiClient], Injection], job: str = "") -> None:
        with self.choice.connect(job) as client:
            done = fault(client)
        if printed(done, self.output):
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

    act = partial(faults.kill, job=job, rank=rank, clock=SystemClock(), state_dir=injector.state_dir)
    injector.inject(act, job)


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

    act = partial(faults.hang, job=job, rank=rank, clock=SystemClock(), state_dir=injector.state_dir)
    injector.inject(act, job)


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


@app.command(
    "condition",
    **command_help(
        "Report that something is wrong with a host, as a monitor does; --end takes it back.",
        "flyball inject condition --host host-b --kind gpu-lost --severity critical",
        "flyball inject condition --host host-b --kind gpu-lost --end",
    ),
)
@expand("injector", _injector)
def condition(
    *,
    host: HostName,
    kind: Annotated[str, typer.Option("--kind", help="what is wrong, e.g. gpu-lost")],
    severity: Annotated[Severity, typer.Option("--severity", help="info, warning or critical")] = Severity.CRITICAL,
    end: Annotated[bool, typer.Option("--end", help="take an injected condition back")] = False,
    injector: _Injector,
) -> None:
    from simulator.inject import faults

    injector.inject(
        lambda api: faults.condition(
            api,
            host_id=host,
            kind=kind,
            severity=severity,
            ends=end,
            clock=SystemClock(),
            state_dir=injector.state_dir,
        )
    )


LOOK_INTERVAL_S = 0.2


@app.command(
    "chaos",
    **command_help(
        "Break something again and again, drawn from a seed: kill or freeze the process of a rank. Run one on each "
        "host with the same job, interval and seed: it acts when a rank of its host is drawn. Ctrl-C or SIGTERM ends "
        "it.",
        "flyball inject chaos --host host-a --job example --every 60 --seed 1",
    ),
)
@expand("injector", _injector)
def chaos(
    *,
    host: HostName,
    job: JobName,
    every_s: Annotated[float, typer.Option("--every", min=1.0, help="seconds between two faults")] = 60.0,
    seed: Annotated[int, typer.Option("--seed", help="the same seed draws the same faults")] = 1,
    injector: _Injector,
) -> None:
    """A turn that finds nothing to break, or no supervisor, is skipped."""
    from simulator.inject.chaos import Chaos, until_next_s

    clock, idle = SystemClock(), threading.Event()
    with EndSignals(("SIGTERM", "SIGINT")) as signals, injector.choice.connect(job) as client:
        turns = Chaos(
            client,
            job=job,
            host_id=host,
            every_s=every_s,
            seed=seed,
            clock=clock,
            announce=announce,
            state_dir=injector.state_dir,
        )
        announce(f"breaking ranks of job {job} on {host}, at most one every {every_s:g} s")
        while True:
            turn_at_s = clock.monotonic_s() + until_next_s(clock.wall_s(), every_s)
            while clock.monotonic_s() < turn_at_s:
                if signals.count:
                    return
                idle.wait(LOOK_INTERVAL_S)
            done = turns.take_turn()
            if done is not None:
                printed(done, injector.output)
