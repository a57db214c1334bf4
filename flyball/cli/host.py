"""`flyball host`: join this machine to a cluster; `flyball host rm`: remove a host that is gone for good."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ckpt_engine.settings import CONFIG_VARIABLE, check_variables, load_settings
from flyball.cli.reach import this_host
from flyball.cli.reach.options import (
    CaFileOption,
    ClientCertOption,
    ClientKeyOption,
    SupervisorOption,
    TokenFileOption,
    command_help,
    variable,
    with_supervisor,
)
from flyball.cli.reach.places import find_supervisor, keep_token, make_state_dir, state_root
from flyball.cli.reach.sources import SupervisorChoice
from flyball.cli.show.output import Format, OutputOption, announce, printed
from flyball.client_tls import ClientTls
from flyball.contracts.identity import check_name
from flyball.layered_settings import unread_variables

app = typer.Typer(
    **command_help(
        "Join this machine to a cluster. Runs its host daemon in the foreground, which starts and watches workers for "
        "a supervisor. SIGTERM moves its ranks to another host first, if one is free; Ctrl-C ends it at once.",
        "flyball host --host-id node-7 --supervisor http://10.0.0.1:7370 --token-file node-7.token",
        "flyball host rm node-7",
    ),
    invoke_without_command=True,
)


@app.callback()
def daemon(
    context: typer.Context,
    *,
    supervisor: SupervisorOption = "",
    token_file: TokenFileOption = "",
    ca_file: CaFileOption = "",
    client_cert_file: ClientCertOption = "",
    client_key_file: ClientKeyOption = "",
    state_dir: Annotated[str, typer.Option(help="folder for the daemon's state and the ranks' logs")] = "",
    host_id: Annotated[str, variable("host_id", help="stable id of this host (default: its host name)")] = "",
    address: Annotated[
        str, variable("address", help="IP address at which other hosts reach this one (default: detected)")
    ] = "",
    failure_domain: Annotated[
        str, typer.Option(help="group of hosts that fail together, for example a rack or a switch")
    ] = "",
    fabric: Annotated[
        str, typer.Option(help="network in which hosts reach each other fast; spares come from it first")
    ] = "",
    warm_nproc: Annotated[
        int,
        variable(
            "warm_nproc",
            min=0,
            help="have a warm standby ready for jobs with this many workers per host; 0: after the first job",
        ),
    ] = 0,
    ckpt_config: Annotated[
        str, typer.Option(help="TOML file with checkpoint settings; \\[engine] has those of this host")
    ] = "",
    leave_timeout_s: Annotated[
        float,
        variable(
            "leave_timeout_s",
            min=0.0,
            max=3600.0,
            help="on SIGTERM, wait at most this long until the ranks train elsewhere",
        ),
    ] = 15.0,
    conditions_dir: Annotated[
        str, typer.Option(help="folder in which others report conditions of this host (default: in the state folder)")
    ] = "",
    cloud_notices: Annotated[
        str, typer.Option(help="watch the metadata service of aws, gce or azure for the end of this host")
    ] = "",
    worker_user: Annotated[
        str, typer.Option(help="user that workers run as, who cannot reach daemon and engine; needs root")
    ] = "",
    report_interval_s: Annotated[
        float, variable("report_interval_s", min=0.05, max=60.0, help="seconds between reports")
    ] = 1.0,
    output: OutputOption = Format.TABLE,
) -> None:
    """Replaces this process with the daemon, which then handles signals and sets the exit code. It logs text on a
    terminal, else JSON."""
    if context.invoked_subcommand is not None:
        return
    for said in unread_variables(os.environ):
        announce(said)
    environment = _checkpoint_settings(dict(os.environ), ckpt_config)
    environment |= ClientTls(ca_file, client_cert_file, client_key_file).environment()
    found = find_supervisor(os.environ, url=supervisor, token_file=token_file)
    name = check_name("The host", host_id or this_host.host_id())
    folder = make_state_dir(Path(state_dir) if state_dir else state_root(os.environ) / "hosts" / name)
    secret = found.token_file or keep_token(folder / "supervisor.token", found.token)
    arguments = [
        *("--state-dir", str(folder), "--host-id", name, "--supervisor", found.urls, "--token-file", str(secret)),
        *("--address", address or this_host.address_towards(found.url), "--report-interval-s", str(report_interval_s)),
        *("--leave-timeout-s", str(leave_timeout_s), "--warm-nproc", str(warm_nproc)),
        *(("--failure-domain", failure_domain) if failure_domain else ()),
        *(("--fabric", fabric) if fabric else ()),
        *(("--conditions-dir", conditions_dir) if conditions_dir else ()),
        *(("--cloud-notices", cloud_notices) if cloud_notices else ()),
        *(("--worker-user", worker_user) if worker_user else ()),
        *(("--log-format", "json") if output.is_for_programs else ()),
    ]
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-P", "-m", "host_daemon", *arguments], environment)


@app.command(
    "rm",
    **command_help(
        "Remove hosts that are gone for good. Hosts that still report, or have ranks, are refused. Silent hosts "
        "without ranks are removed automatically after a week.",
        "flyball host rm node-7",
        "flyball host rm node-7 node-8",
    ),
)
@with_supervisor()
def remove(
    *,
    hosts: Annotated[list[str], typer.Argument(metavar="HOST", help="host ids, as `flyball get hosts` shows them")],
    choice: SupervisorChoice,
    output: OutputOption = Format.TABLE,
) -> None:
    """Exit code 16 if a host is refused."""
    names = [check_name("The host", host) for host in hosts]
    with choice.connect() as client:
        for name in names:
            client.delete(f"/v1/hosts/{name}")
            if not output.is_for_programs:
                announce(f"removed host {name}; if its daemon starts again, it joins as a new host")
    printed({"removed": names}, output)


def _checkpoint_settings(environment: dict[str, str], config: str) -> dict[str, str]:
    """Add the settings file to the environment, and check it here, where the user sees errors, not in a log."""
    if config:
        environment[CONFIG_VARIABLE] = str(Path(config).resolve())
    check_variables(environment)
    load_settings(environment)
    return environment
