"""From the command line of `flyball run` (torchrun's, and a little more) to a RunRequest. Pure: reads nothing but its
arguments, starts nothing, imports nothing heavy."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import NoReturn

import msgspec

from ckpt_engine.settings import Config
from flyball.checkpoint_flags import gather, read_nothing
from flyball.client_tls import ClientTls
from flyball.contracts.checkpoints import CheckpointSpec
from flyball.contracts.errors import UsageError
from flyball.contracts.identity import check_name
from flyball.launch_flags import ALL_FLAGS, TRANSOM_VARIABLES, Flag, Kind, Origin, Use

DEFAULT_MAX_RESTARTS = 3
DEFAULT_RENDEZVOUS_PORT = 29400  # torchrun's
DEFAULT_STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
DEFAULT_STOP_GRACE_S = 10.0
NPROC_WORDS = ("auto", "cpu", "gpu", "xpu")


class Console(msgspec.Struct, frozen=True):
    """Which local ranks are shown on the terminal, and how."""

    only: tuple[int, ...] = ()  # (): all
    hidden: tuple[int, ...] = ()  # redirected to their log files
    all_hidden: bool = False
    prefix: bool = False  # also with a single rank

    def shows(self, local_rank: int) -> bool:
        """Whether lines of this rank appear on the terminal."""
        if self.all_hidden or local_rank in self.hidden:
            return False
        return not self.only or local_rank in self.only


class RunRequest(msgspec.Struct, frozen=True):
    """What a user asked for. '' means: not said."""

    argv: tuple[str, ...]  # script and its arguments; with `module`, a module name and its arguments
    module: bool = False
    nnodes: int = 1
    max_nnodes: int = 1  # hosts beyond nnodes are spares
    nproc_per_node: str = "1"  # a number, or one of NPROC_WORDS
    max_restarts: int = DEFAULT_MAX_RESTARTS
    job: str = ""
    role: str = "default"
    checkpoint: CheckpointSpec = CheckpointSpec()
    engine_environment: Mapping[str, str] = {}  # variables that hand the checkpoint engine's settings on to its host
    supervisor: str = ""  # URL
    tls: ClientTls = ClientTls()  # to it
    rendezvous: str = ""  # "host:port" at which one of the hosts brings the supervisor up
    node_rank: int | None = None
    local_addr: str = ""
    host_id: str = ""
    state_dir: str = ""
    log_dir: str = ""
    console: Console = Console()
    stop_grace_s: float = DEFAULT_STOP_GRACE_S
    stop_signals: tuple[str, ...] = DEFAULT_STOP_SIGNALS
    output: str = "table"
    help: bool = False
    notices: tuple[str, ...] = ()  # flags that change nothing here, each with the reason


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message[:1].upper()}{message[1:]}.", hint="flyball run --help shows all flags")


_TYPES = {Kind.TEXT: str, Kind.INTEGER: int, Kind.NUMBER: float}


def build_parser() -> argparse.ArgumentParser:
    """argparse's parser of the flag table; values that were not given are absent from its namespace."""
    parser = _Parser(
        prog="flyball run",
        usage="flyball run [flags] [-m] SCRIPT [arguments of the script]",
        add_help=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run a training script under supervision, in place of torchrun.",
        epilog=_EPILOG,
    )
    for origin in Origin:
        group = parser.add_argument_group(f"flags of {origin}")
        for flag in (f for f in ALL_FLAGS if f.origin is origin):
            _add(group, flag)
    parser.add_argument("training_script", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


_EPILOG = """examples:
  flyball run train.py --lr 3e-4
  flyball run --nproc-per-node 4 --max-restarts 3 train.py
  flyball run --nproc-per-node gpu -m my_package.train
  flyball run --supervisor http://10.0.0.1:7370 --nnodes 2 --nproc-per-node 8 --job llama train.py
"""


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    about = flag.about.replace("%", "%%")
    if flag.use is Use.NOTED:
        about = f"accepted, changes nothing: {about}"
    if flag.use is Use.REFUSED:
        about = f"refused: {about}"
    if flag.kind is Kind.SWITCH:
        group.add_argument(*flag.spellings, dest=flag.dest, action="store_true", help=about)
    else:
        choices = flag.choices or None
        group.add_argument(
            *flag.spellings, dest=flag.dest, type=_TYPES[flag.kind], metavar=flag.metavar, choices=choices, help=about
        )


def parse_run(
    arguments: Sequence[str], environ: Mapping[str, str], read_config: Callable[[str], Config] = read_nothing
) -> RunRequest:
    """The request that a command line stands for. torchrun's PET_* variables fill in for flags that are not given.
    `read_config` reads the file of checkpoint settings, if one is named.

    Raises UsageError for what cannot mean anything, and for flags that Flyball refuses.
    """
    given = vars(build_parser().parse_args(list(arguments)))
    if given.get("help"):
        return RunRequest(argv=(), help=True)
    given = {**_from_environment(environ), **given}
    for flag in ALL_FLAGS:
        if flag.use is Use.REFUSED and given.get(flag.dest):
            raise UsageError(f"{flag.names[-1]} is not supported: {flag.about}.", hint=_REFUSAL_HINTS[flag.dest])
    script = given.get("training_script")
    if not script:
        raise UsageError("No script is named.", hint="flyball run [flags] train.py [arguments of the script]")
    notices = [_notice(flag, given[flag.dest]) for flag in ALL_FLAGS if flag.use is Use.NOTED and flag.dest in given]
    notices += [f"{name}: not used: {why}" for name, why in TRANSOM_VARIABLES.items() if name in environ]
    checkpoint = gather(given, environ, read_config)
    notices += checkpoint.notices

    nnodes, max_nnodes = _parse_nnodes(given.get("nnodes", "1"), notices)
    supervisor = _supervisor(given, environ)
    rendezvous = _rendezvous(given, nnodes, supervisor, notices)
    if nnodes > 1 and not supervisor and not rendezvous:
        raise UsageError(
            f"--nnodes {nnodes} needs hosts that know of each other.",
            hint="start `flyball up` on one machine and give its address with --supervisor URL, or give the same "
            "--rdzv-endpoint HOST:PORT on every host; `flyball demo` shows several hosts on one machine",
        )
    job = given.get("job", "") or _job_from_rendezvous_id(given.get("rdzv_id", "none"))
    if nnodes > 1 and not job:
        raise UsageError(
            "A job of several hosts needs a name that is the same on every host.", hint="add --job NAME (or --rdzv-id)"
        )
    return RunRequest(
        argv=(str(script), *given.get("training_script_args", [])),
        module=given.get("module", False),
        nnodes=nnodes,
        max_nnodes=max_nnodes,
        nproc_per_node=_parse_nproc(given),
        max_restarts=_at_least(0, "--max-restarts", given.get("max_restarts", DEFAULT_MAX_RESTARTS)),
        job=check_name("The job", job) if job else "",
        role=given.get("role", "default"),
        checkpoint=checkpoint.spec,
        engine_environment=checkpoint.engine_environment,
        supervisor=supervisor,
        tls=ClientTls(*(str(given.get(name, "")) for name in ("ca_file", "client_cert_file", "client_key_file"))),
        rendezvous=rendezvous,
        node_rank=given.get("node_rank"),
        local_addr=given.get("local_addr") or "",
        host_id=check_name("The host", given["host_id"]) if given.get("host_id") else "",
        state_dir=given.get("state_dir", ""),
        log_dir=given.get("log_dir") or "",
        console=_console(given, notices),
        stop_grace_s=float(given.get("shutdown_timeout", given.get("term_timeout", DEFAULT_STOP_GRACE_S))),
        stop_signals=_stop_signals(given.get("signals_to_handle", "")),
        output=_one_of("-o", given.get("output", "table"), ("table", "json")),
        notices=tuple(notices),
    )


def _notice(flag: Flag, value: object) -> str:
    shown = flag.names[-1] if flag.kind is Kind.SWITCH else f"{flag.names[-1]} {value}"
    return f"{shown}: {flag.about}" if flag.about.startswith("not ") else f"{shown}: not needed: {flag.about}"


_REFUSAL_HINTS = {
    "no_python": "start the program from a small Python script, or run it with torchrun",
    "logs_specs": "use --log-dir, --redirects, --tee and --local-ranks-filter",
    "virtual_local_rank": "let the script pick its device by LOCAL_RANK",
}


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    """torchrun's PET_<FLAG> variables, converted as the flags themselves are."""
    values: dict[str, object] = {}
    for flag in ALL_FLAGS:
        text = environ.get(f"PET_{flag.dest.upper()}")
        if flag.origin is not Origin.TORCHRUN or text is None:
            continue
        try:
            values[flag.dest] = bool(int(text)) if flag.kind is Kind.SWITCH else _TYPES[flag.kind](text)
        except ValueError:
            raise UsageError(
                f"The environment variable PET_{flag.dest.upper()} is {text!r}, which is not a valid "
                f"{'0 or 1' if flag.kind is Kind.SWITCH else flag.kind}.",
                hint="correct or unset it",
            ) from None
        if flag.kind is Kind.SWITCH and not values[flag.dest]:
            del values[flag.dest]
    return values


def _parse_nnodes(text: str, notices: list[str]) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    low = int(match[1]) if match else 0
    high = int(match[2] or low) if match else 0
    if not 1 <= low <= high:
        raise UsageError(f"--nnodes {text} is neither a number of hosts nor MIN:MAX.", hint="for example --nnodes 2")
    if low < high:
        notices.append(
            f"--nnodes {text}: the job runs on {low} host{'s' if low > 1 else ''}; "
            f"up to {high - low} more may join as spares"
        )
    return low, high


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
    if url and not re.fullmatch(r"https?://[^/\s]+/?", url):
        raise UsageError(f"--supervisor {url} is not an address.", hint="for example --supervisor http://10.0.0.1:7370")
    if url and given.get("standalone"):
        raise UsageError("--standalone and --supervisor contradict each other.", hint="leave one of them out")
    return url.rstrip("/")


def _rendezvous(given: Mapping[str, object], nnodes: int, supervisor: str, notices: list[str]) -> str:
    """The "host:port" at which the hosts of a job meet, '' where there is none or it is not needed."""
    named = [name for name in ("rdzv_endpoint", "master_addr", "master_port", "node_rank") if given.get(name)]
    if given.get("standalone"):
        if nnodes > 1:
            raise UsageError(f"--standalone means one host, --nnodes says {nnodes}.", hint="leave one of them out")
        why = "--standalone needs no address"
    elif supervisor:
        why = "the supervisor tells the hosts of each other"
    elif nnodes == 1:
        why = "one host needs no address; the workers get a fresh MASTER_PORT per generation"
    else:
        return _endpoint(given)
    notices.extend(f"--{name.replace('_', '-')} {given[name]}: not needed: {why}" for name in named)
    return ""


def _endpoint(given: Mapping[str, object]) -> str:
    endpoint = str(given.get("rdzv_endpoint", "") or "")
    if not endpoint and given.get("master_addr"):
        endpoint = f"{given['master_addr']}:{given.get('master_port') or 29500}"
    if not endpoint:
        return ""
    host, colon, port = endpoint.rpartition(":")
    if not colon or (not port.isdecimal() and endpoint.count(":") <= 1):
        host, port = endpoint, str(DEFAULT_RENDEZVOUS_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(
            f"--rdzv-endpoint {endpoint} is not HOST:PORT.", hint="for example --rdzv-endpoint 10.0.0.1:29400"
        )
    return f"{host}:{port}"


def _job_from_rendezvous_id(text: str) -> str:
    """A run id that torchrun would take may have letters that a job name has not."""
    if text in ("none", ""):
        return ""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")[:63]


def _console(given: Mapping[str, str], notices: list[str]) -> Console:
    hidden = _streams("--redirects", given.get("redirects", "0"), notices)
    tee = _streams("--tee", given.get("tee", "0"), notices)
    only: tuple[int, ...] = ()
    if given.get("local_ranks_filter"):
        text = given["local_ranks_filter"]
        if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
            raise UsageError(
                f"--local-ranks-filter {text} is not a list of ranks.", hint="for example --local-ranks-filter 0,1"
            )
        only = tuple(int(part) for part in text.split(","))
    return Console(
        only=only,
        hidden=tuple(r for r, on in hidden.items() if on and r >= 0 and not tee.get(r, tee.get(-1, False))),
        all_hidden=hidden.get(-1, False) and not any(tee.values()),
        prefix=any(tee.values()),
    )


def _streams(flag: str, text: str, notices: list[str]) -> dict[int, bool]:
    """torchrun's stream words: "0".."3" for all (key -1), or RANK:WORD,...; true where a rank is meant."""
    if not re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", text):
        raise UsageError(f"{flag} {text} is not of the form 3 or 0:3,1:0.", hint="0 none, 1 stdout, 2 stderr, 3 both")
    words = {-1: text} if ":" not in text else {int(p.partition(":")[0]): p.partition(":")[2] for p in text.split(",")}
    if any(word in "12" for word in words.values()):
        notices.append(f"{flag} {text}: stdout and stderr of a rank share one log file; taken as both")
    return {rank: word != "0" for rank, word in words.items()}


def _stop_signals(text: str) -> tuple[str, ...]:
    names = tuple(part.strip().upper() for part in text.split(",") if part.strip()) or DEFAULT_STOP_SIGNALS
    for name in names:
        if not re.fullmatch(r"SIG[A-Z0-9]+", name) or name in ("SIGKILL", "SIGSTOP", "SIGCHLD"):
            raise UsageError(
                f"--signals-to-handle names {name}, which cannot be handled.", hint="for example SIGTERM,SIGINT,SIGUSR1"
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


def default_job_name(request: RunRequest, suffix: str) -> str:
    """A name for a job that was not given one: the script's name and `suffix`."""
    script = request.argv[0]
    stem = script.rpartition(".")[2] if request.module else PurePath(script).stem
    cleaned = re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._") or "job"
    return check_name("The job", f"{cleaned[: 62 - len(suffix)]}-{suffix}")
