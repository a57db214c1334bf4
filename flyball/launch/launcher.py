"""Turns the command line of `flyball run` (torchrun's, plus Flyball's flags) into a RunRequest. Pure, and light to
import."""

from __future__ import annotations

import hashlib
import ipaddress
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import msgspec

from ckpt_engine.settings import Config
from flyball.client_tls import ClientTls
from flyball.contracts.checkpoints import CheckpointSpec
from flyball.contracts.errors import UsageError
from flyball.contracts.identity import check_name, is_supervisor_url
from flyball.launch.checkpoint_flags import gather, read_nothing
from flyball.launch.forwarded_environment import ALL, NONE
from flyball.launch.launch_flags import ALL_FLAGS, TRANSOM_VARIABLES, Flag, FlagKind, FlagOrigin, Use
from flyball.launch.launch_grammar import convert, read_line
from flyball.launch.output_flags import Console, parse_console
from flyball.layered_settings import unread_variables

DEFAULT_MAX_RESTARTS = 3
DEFAULT_RENDEZVOUS_PORT = 29400  # this and the next are torchrun's
DEFAULT_MASTER_PORT = 29500
DEFAULT_STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")  # the last: a batch system's warning
DEFAULT_STOP_GRACE_S = 10.0
_CHECKS = ("check_nodes", "precheck", "network_check", "comm_perf_test")  # flags that ask for a check of hosts
MIN_HANG_TIMEOUT_S, MAX_HANG_TIMEOUT_S = 1.0, 366 * 86_400.0
MIN_NOTICE_S, MAX_NOTICE_S = 5.0, 86_400.0
_NOT_BY_VARIABLE = ("logs_specs", "numa_binding")  # torchrun reads no PET_ variable for these
NPROC_WORDS = ("auto", "cpu", "gpu", "xpu")


class RunRequest(msgspec.Struct, frozen=True):
    """The user's request. '' means not given."""

    argv: tuple[str, ...]  # the script (with `module`, a module name) and its arguments
    module: bool = False
    program: bool = False  # run the script without Python
    virtual_local_rank: bool = False
    nnodes: int = 1
    min_nnodes: int = 1  # it may go on with so few
    spares: int = 0
    nproc_per_node: str = "1"  # a number, or one of NPROC_WORDS
    max_restarts: int = DEFAULT_MAX_RESTARTS
    job: str = ""
    resume: bool = False
    fresh: bool = False
    keeps_on_disk: bool = True  # the newest checkpoint, if the user names no folder
    role: str = "default"
    checkpoint: CheckpointSpec = CheckpointSpec()
    engine_environment: Mapping[str, str] = {}  # variables with the checkpoint engine's settings, for its host
    supervisor: str = ""  # URL
    tls: ClientTls = ClientTls()  # for the supervisor
    rendezvous: str = ""  # "host:port" at which one of the hosts starts the supervisor
    node_rank: int | None = None
    trusted_network: bool = False  # hosts join without a secret
    local_addr: str = ""
    host_id: str = ""
    state_dir: str = ""
    log_dir: str = ""
    console: Console = Console()
    stop_grace_s: float = DEFAULT_STOP_GRACE_S
    batch: bool = False  # a batch system ends all processes of the job by SIGTERM
    notice_s: float = 0.0  # from that to its SIGKILL; 0.0: as it says
    never_from_scratch: bool = False
    injectable: bool = False
    check_nodes: bool = False
    exclude_stragglers: bool = False
    hang_timeout_s: float = 0.0  # 0.0: adapts to the job
    policy_file: str = ""
    stop_signals: tuple[str, ...] = DEFAULT_STOP_SIGNALS
    env: tuple[str, ...] = ()  # values of --env
    output: str = "table"
    help: bool = False
    help_all: bool = False
    notices: tuple[str, ...] = ()  # flags without an effect here, each with the reason


def parse_run(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    read_config: Callable[[str], Config] = read_nothing,
    *,
    before: Sequence[str] = (),
) -> RunRequest:
    """Parse a command line. torchrun's PET_* variables stand in for flags that are not given.

    `read_config` reads the file of checkpoint settings, if one is named. `before` is the command line of an earlier run
    whose script runs again; flags given now take precedence over its flags. `--resume` needs no script.

    Raises UsageError for invalid input, and for flags that Flyball refuses.
    """
    line = read_line(arguments)
    if line.help:
        return RunRequest(argv=(), help=True, help_all=bool(line.given.get("help_all")))
    earlier = read_line(before) if before else None
    if earlier is not None:
        kept = {name: value for name, value in earlier.given.items() if name not in ("resume", "fresh")}
        line = earlier._replace(given={**kept, **line.given})
    given = {**_from_environment(environ, line.given), **line.given}
    if given.get("resume") and given.get("fresh"):
        raise UsageError("--resume and --fresh contradict each other.", hint="leave one of them out")
    for flag in ALL_FLAGS:
        if flag.use is Use.REFUSED and given.get(flag.dest):
            raise UsageError(f"{flag.names[-1]} is not supported: {flag.about}.", hint=_REFUSAL_HINTS[flag.dest])
    if not line.script and not given.get("resume"):
        raise UsageError("No script is given.", hint="flyball run [flags] train.py [arguments of the script]")
    notices = [_notice(flag, given[flag.dest]) for flag in ALL_FLAGS if flag.use is Use.NOTED and flag.dest in given]
    notices += [f"{name}: not used: {why}" for name, why in TRANSOM_VARIABLES.items() if name in environ]
    notices += unread_variables(environ)
    if not given.get("supervisor") and not given.get("use_supervisor"):
        whole = "workers have the whole environment of this shell"
        notices += [f"--env {word}: not used: {whole}" for word in given.get("env", ()) if word in (ALL, NONE)]
    checkpoint = gather(given, environ, read_config)
    notices += checkpoint.notices

    run_path = given.get("run_path", False)  # takes precedence, as for torchrun
    module, program = (given.get(name, False) and not run_path for name in ("module", "no_python"))
    if module and program:
        raise UsageError("--module and --no-python contradict each other.", hint="leave one of them out")
    min_nnodes, nnodes = _parse_nnodes(given)
    spares = _at_least(0, "--spares", given.get("spares", 0))
    supervisor = _supervisor(given, environ)
    rendezvous = _rendezvous(given, nnodes + spares, supervisor, notices)
    if min_nnodes == 1 and not supervisor and not rendezvous:
        nnodes = _alone(given, nnodes, notices)
    if nnodes > 1 and not supervisor and not rendezvous:
        raise UsageError(
            f"--nnodes {nnodes} needs hosts that can find each other.",
            hint="start `flyball up` on one machine and give its address with --supervisor URL, or give the same "
            "--rdzv-endpoint HOST:PORT on every host; `flyball demo` shows several hosts on one machine",
        )
    job = given.get("job", "") or _job_from_rendezvous_id(given.get("rdzv_id", "none"))
    if nnodes > 1 and not job and not rendezvous:  # at a rendezvous, all hosts derive it from the same command
        raise UsageError(
            "A job of several hosts needs a name that is the same on every host.", hint="add --job NAME (or --rdzv-id)"
        )
    return RunRequest(
        argv=(line.script, *line.script_arguments) if line.script else (),
        module=module,
        program=program,
        virtual_local_rank=given.get("virtual_local_rank", False),
        nnodes=nnodes,
        min_nnodes=min_nnodes,
        spares=spares,
        nproc_per_node=_parse_nproc(given),
        max_restarts=_at_least(0, "--max-restarts", given.get("max_restarts", DEFAULT_MAX_RESTARTS)),
        job=check_name("The job", job) if job else "",
        resume=given.get("resume", False),
        fresh=given.get("fresh", False),
        keeps_on_disk=not given.get("no_local_ckpt", False),
        role=given.get("role", "default"),
        checkpoint=checkpoint.spec,
        engine_environment=checkpoint.engine_environment,
        supervisor=supervisor,
        tls=ClientTls(*(str(given.get(name, "")) for name in ("ca_file", "client_cert_file", "client_key_file"))),
        rendezvous=rendezvous,
        node_rank=given.get("node_rank") if given.get("rdzv_backend", "static") == "static" else None,
        trusted_network=given.get("trusted_network", False),
        local_addr=given.get("local_addr") or "",
        host_id=check_name("The host", given["host_id"]) if given.get("host_id") else "",
        state_dir=given.get("state_dir", ""),
        log_dir=given.get("log_dir") or "",
        console=parse_console(
            given.get("redirects", "0"), given.get("tee", "0"), given.get("local_ranks_filter") or "", environ
        ),
        stop_grace_s=float(given.get("shutdown_timeout", given.get("term_timeout", DEFAULT_STOP_GRACE_S))),
        batch=bool(given.get("batch") or given.get("notice_s")),
        notice_s=_notice_s(given.get("notice_s", 0.0)),
        never_from_scratch=given.get("never_from_scratch", False),
        injectable=given.get("injectable", False),
        check_nodes=any(given.get(name) for name in _CHECKS),
        exclude_stragglers=bool(given.get("exclude_stragglers") or given.get("exclude_straggler")),
        policy_file=given.get("policy", ""),
        hang_timeout_s=_hang_timeout_s(given.get("hang_timeout", 0.0)),
        stop_signals=_stop_signals(given.get("signals_to_handle", "")),
        env=given.get("env", ()),
        output=_one_of("-o", given.get("output", "table"), ("table", "json")),
        notices=tuple(notices),
    )


def _hang_timeout_s(seconds: float) -> float:
    if seconds == 0.0 or (math.isfinite(seconds) and MIN_HANG_TIMEOUT_S <= seconds <= MAX_HANG_TIMEOUT_S):
        return seconds
    raise UsageError(
        f"--hang-timeout {seconds:g} is not a number of seconds from {MIN_HANG_TIMEOUT_S:g} to {MAX_HANG_TIMEOUT_S:g}.",
        hint="a rank without a step for that long counts as hung; 0 lets Flyball adapt to the job",
    )


def _notice_s(seconds: float) -> float:
    if seconds == 0.0 or (math.isfinite(seconds) and MIN_NOTICE_S <= seconds <= MAX_NOTICE_S):
        return seconds
    raise UsageError(
        f"--notice-s {seconds:g} is not a number of seconds from {MIN_NOTICE_S:g} to {MAX_NOTICE_S:g}.",
        hint="give the time from the batch system's SIGTERM to its SIGKILL: Slurm's KillWait is 30",
    )


def _notice(flag: Flag, value: object) -> str:
    shown = flag.names[-1] if flag.kind is FlagKind.SWITCH else f"{flag.names[-1]} {value}"
    return f"{shown}: {flag.about}" if flag.about.startswith("not ") else f"{shown}: not needed: {flag.about}"


_REFUSAL_HINTS = {
    "logs_specs": "use --log-dir, --redirects, --tee and --local-ranks-filter",
}


def _from_environment(environ: Mapping[str, str], given: Mapping[str, object]) -> dict[str, Any]:
    """Values of torchrun's PET_<FLAG> variables for flags that are not given, converted like the flags."""
    values: dict[str, object] = {}
    for flag in ALL_FLAGS:
        variable = f"PET_{flag.dest.upper()}"
        if flag.origin is not FlagOrigin.TORCHRUN or variable not in environ or flag.dest in _NOT_BY_VARIABLE:
            continue
        if flag.kind is FlagKind.SWITCH or flag.dest not in given:
            values[flag.dest] = convert(flag, environ[variable], f"The environment variable {variable}")
    return values


def _parse_nnodes(given: Mapping[str, Any]) -> tuple[int, int]:
    """The fewest hosts that the job may go on with, and how many it asks for."""
    text = str(given.get("nnodes", "1"))
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    low = int(match[1]) if match else 0
    high = int(match[2] or low) if match else 0
    if not 1 <= low <= high:
        raise UsageError(f"--nnodes {text} is neither a number of hosts nor MIN:MAX.", hint="for example --nnodes 2")
    fewest = _at_least(1, "--min-nodes", given.get("min_nodes", low))
    if fewest > high or (low < high and fewest != low):
        raise UsageError(f"--min-nodes {fewest} contradicts --nnodes {text}.", hint="give --nnodes MIN:MAX alone")
    return fewest, high


def _alone(given: Mapping[str, Any], nnodes: int, notices: list[str]) -> int:
    """The number of hosts of a job that no other host can join: 1."""
    if nnodes > 1:
        notices.append(
            f"--nnodes {given.get('nnodes', nnodes)}: the job runs on this host alone; others could join through "
            "--supervisor URL or --rdzv-endpoint HOST:PORT"
        )
    return 1


def _parse_nproc(given: Mapping[str, str]) -> str:
    text = str(given.get("nproc_per_node", "auto" if given.get("auto_config") else "1")).strip()
    if text in NPROC_WORDS or (text.isdecimal() and int(text) > 0):
        return text
    raise UsageError(
        f"--nproc-per-node {text} is neither a number of workers nor one of {', '.join(NPROC_WORDS)}.",
        hint="for example --nproc-per-node 2",
    )


def _supervisor(given: Mapping[str, str], environ: Mapping[str, str]) -> str:
    url = given.get("supervisor", "")
    if given.get("use_supervisor") and not url:
        url = environ.get("FLYBALL_SUPERVISOR", "")
        if not url:
            raise UsageError(
                "--use-supervisor takes the address from FLYBALL_SUPERVISOR, which is not set.",
                hint="export FLYBALL_SUPERVISOR=http://HOST:PORT, or give --supervisor URL",
            )
    if url and not is_supervisor_url(url):
        raise UsageError(f"--supervisor {url} is not an address.", hint="for example --supervisor http://10.0.0.1:7370")
    if url and given.get("standalone"):
        raise UsageError("--standalone and --supervisor contradict each other.", hint="leave one of them out")
    return url.rstrip("/")


def _rendezvous(given: Mapping[str, object], hosts: int, supervisor: str, notices: list[str]) -> str:
    """The "host:port" at which the hosts of a job meet, '' if there is none or it is not needed."""
    named = [name for name in ("rdzv_endpoint", "master_addr", "master_port", "node_rank") if given.get(name)]
    if given.get("standalone"):
        if hosts > 1:
            raise UsageError(
                f"--standalone means one host, but the job may have {hosts}.", hint="leave one of them out"
            )
        why = "--standalone needs no address"
    elif supervisor:
        why = "the hosts find each other through the supervisor"
    elif hosts == 1:
        why = "one host needs no address; the workers get a fresh MASTER_PORT per generation"
    else:
        return _endpoint(given)
    notices.extend(f"--{name.replace('_', '-')} {given[name]}: not needed: {why}" for name in named)
    return ""


def _endpoint(given: Mapping[str, object]) -> str:
    backend = str(given.get("rdzv_backend", "static"))
    if backend not in ("static", "c10d"):
        raise UsageError(
            f"--rdzv-backend {backend} is not used: several hosts meet at one of them.",
            hint="--rdzv-backend c10d --rdzv-endpoint HOST:PORT, with the address of one of the hosts",
        )
    endpoint = str(given.get("rdzv_endpoint", "") or "")
    if not endpoint and (given.get("master_addr") or given.get("master_port")):
        address = _bracketed(str(given.get("master_addr") or "127.0.0.1"))
        endpoint = f"{address}:{given.get('master_port') or DEFAULT_MASTER_PORT}"
    if not endpoint:
        return ""
    host, colon, port = _bracketed(endpoint).rpartition(":")
    if not colon or port.endswith("]") or (not port.isdecimal() and endpoint.count(":") <= 1):
        host, port = _bracketed(endpoint), str(DEFAULT_RENDEZVOUS_PORT)
    host = _bracketed(host)
    is_host = ":" not in host or host.startswith("[")
    if not host or not is_host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(
            f"--rdzv-endpoint {endpoint} is not HOST:PORT.",
            hint="for example --rdzv-endpoint 10.0.0.1:29400, or [fd00::1]:29400",
        )
    return f"{host}:{port}"


def _bracketed(host: str) -> str:
    """A host as in URLs: an IPv6 address in brackets."""
    try:
        return f"[{host}]" if ipaddress.ip_address(host.partition("%")[0]).version == 6 else host
    except ValueError:
        return host


def _job_from_rendezvous_id(text: str) -> str:
    """A job name from a run id: torchrun allows characters that job names do not have."""
    if text in ("none", ""):
        return ""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")[:63]


def _stop_signals(text: str) -> tuple[str, ...]:
    names = tuple(part.strip().upper() for part in text.split(",") if part.strip()) or DEFAULT_STOP_SIGNALS
    for name in names:
        if not re.fullmatch(r"SIG[A-Z0-9]+", name) or name in ("SIGKILL", "SIGSTOP", "SIGCHLD"):
            raise UsageError(
                f"--signals-to-handle: {name} cannot be handled.", hint="for example SIGTERM,SIGINT,SIGUSR1"
            )
    return names


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise UsageError(f"{flag} {value} is not one of {', '.join(allowed)}.", hint=f"for example {flag} {allowed[0]}")
    return value


def _at_least(low: int, flag: str, value: object) -> int:
    number = int(str(value))
    if number < low:
        raise UsageError(f"{flag} {number} is less than {low}.", hint=f"give {low} or more")
    return number


def default_job_name(request: RunRequest, workdir: str) -> str:
    """A name for a job without one, the same for the same command: the script's name, and a hash of script, arguments,
    folder and size."""
    script = request.argv[0]
    stem = script.rpartition(".")[2] if request.module else PurePath(script).stem
    cleaned = re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._") or "job"
    path = script if request.module else str(PurePath(workdir, script))
    same = [path, *request.argv[1:], workdir, str(request.module), str(request.nnodes), request.nproc_per_node]
    suffix = hashlib.sha256("\0".join(same).encode(errors="surrogateescape")).hexdigest()[:6]
    return check_name("The job", f"{cleaned[:40]}-{suffix}")
