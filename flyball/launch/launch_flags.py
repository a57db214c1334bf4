"""The flags of `flyball run` as one table: Flyball's own, torchrun's, and those of other launchers.

Each flag is honoured; or accepted, and named on stderr with the reason why it has no effect; or refused with the next
step. docs/how-to/coming-from.md shows the same table, and a test compares the two. A flag for a checkpoint setting
names the setting, whose struct has the type and default.
"""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import NamedTuple


class Use(StrEnum):
    HONOURED = "honoured"
    NOTED = "noted"  # accepted, and named on stderr with the reason
    REFUSED = "refused"


class FlagOrigin(StrEnum):
    FLYBALL = "Flyball"
    TORCHRUN = "torchrun"
    RESILIENCY = "Google's resiliency library"
    DLROVER = "dlrover-run"


class FlagKind(StrEnum):
    TEXT = "text"
    INTEGER = "integer"
    NUMBER = "number"
    SWITCH = "switch"
    LIST = "list"  # text; may be repeated


class Flag(NamedTuple):
    """One flag. `names` are spelled as its origin spells them."""

    names: tuple[str, ...]
    kind: FlagKind
    origin: FlagOrigin
    use: Use
    about: str  # help text; for a noted or refused flag, the reason
    metavar: str = ""
    choices: tuple[str, ...] = ()
    setting: str = ""  # a field of CheckpointSpec or EngineSettings

    @property
    def spellings(self) -> tuple[str, ...]:
        """All spellings that the parser accepts: as given, all dashes, all underscores."""
        words = [name[2:] for name in self.names if name.startswith("--")]
        dashed = [f"--{word.replace('_', '-')}" for word in words]
        underscored = [f"--{word.replace('-', '_')}" for word in words]
        return tuple(dict.fromkeys((*self.names, *dashed, *underscored)))

    @property
    def dest(self) -> str:
        """The flag's longest name as an identifier, as argparse and torchrun's PET_ variables spell it."""
        return max(self.names, key=len).lstrip("-").replace("-", "_")


def _flag(  # noqa: PLR0917 - one row of the table
    origin: FlagOrigin,
    use: Use,
    names: str,
    kind: FlagKind,
    metavar: str,
    about: str,
    *,
    setting: str = "",
    choices: tuple[str, ...] = (),
) -> Flag:
    return Flag(tuple(names.split()), kind, origin, use, about, metavar, choices, setting)


_T, _I, _N, _S, _LIST = FlagKind.TEXT, FlagKind.INTEGER, FlagKind.NUMBER, FlagKind.SWITCH, FlagKind.LIST

_own = partial(_flag, FlagOrigin.FLYBALL, Use.HONOURED)
FLYBALL_FLAGS = (
    _own("--job", _T, "NAME", "name (default: the script's, and a hash of the command)"),
    _own("--resume", _S, "", "go on with an earlier run: [JOB], or the newest"),
    _own("--fresh", _S, "", "start over instead of from the job's checkpoints"),
    _own("--supervisor", _T, "URL", "join this supervisor's cluster"),
    _own("--use-supervisor", _S, "", "join the supervisor whose address is in FLYBALL_SUPERVISOR"),
    _own("--ca-file", _T, "FILE", "PEM file of the CA that signed its certificate (default: FLYBALL_CA_FILE)"),
    _own("--client-cert-file", _T, "FILE", "PEM file of the client certificate (default: FLYBALL_CLIENT_CERT_FILE)"),
    _own("--client-key-file", _T, "FILE", "PEM file of that certificate's key (default: FLYBALL_CLIENT_KEY_FILE)"),
    _own("--ckpt-config", _T, "FILE", "TOML file of checkpoint settings: [checkpoint] and [engine]"),
    _own("--ckpt-every", _I, "STEPS", "steps between saves to memory (1; 0: none)", setting="every_steps"),
    _own("--ckpt-every-s", _N, "SECONDS", "also save to memory after this many seconds", setting="every_s"),
    _own(
        "--ckpt-when-full", _T, "WORD", "if all slots are in use: wait (default) or skip the save", setting="when_full"
    ),
    _own(
        "--ckpt-memory-limit",
        _T,
        "SIZE",
        "memory for a host's slots, e.g. 64GiB; 0: all of it",
        setting="memory_limit_bytes",
    ),
    _own("--replicas", _I, "N", "hosts that copy each host's memory (default: 1)", setting="replicas"),
    _own("--replication", _T, "WORD", "how these hosts are chosen: ring (default) or clique", setting="replication"),
    _own(
        "--peer-bandwidth",
        _T,
        "RATE",
        "bytes per second to these hosts, e.g. 1GB; 0: no limit",
        setting="peer_bytes_per_s",
    ),
    _own("--no-local-ckpt", _S, "", "do not save checkpoints in the state folder"),
    _own("--local-ckpt-interval-s", _N, "SECONDS", "seconds between saves to the disk", setting="disk_every_s"),
    _own("--local-ckpt-keep", _I, "N", "newest steps kept on the disk (default: 2)", setting="disk_keep_latest"),
    _own("--local-ckpt-keep-every", _I, "STEPS", "also keep all multiples of this step", setting="disk_keep_every"),
    _own("--local-ckpt-bandwidth", _T, "RATE", "bytes per second to the disk", setting="disk_bytes_per_s"),
    _own(
        "--persistent-ckpt-interval-s",
        _N,
        "SECONDS",
        "seconds between saves to the store",
        setting="persistent_every_s",
    ),
    _own(
        "--persistent-ckpt-keep",
        _I,
        "N",
        "newest steps kept in the store (default: 2)",
        setting="persistent_keep_latest",
    ),
    _own(
        "--persistent-ckpt-keep-every",
        _I,
        "STEPS",
        "also keep all multiples of this step",
        setting="persistent_keep_every",
    ),
    _own("--persistent-ckpt-bandwidth", _T, "RATE", "bytes per second to the store", setting="persistent_bytes_per_s"),
    _own("--batch", _S, "", "a batch system signals all processes of the job (default: if its variables are set)"),
    _own("--notice-s", _N, "SECONDS", "from the batch system's SIGTERM to its SIGKILL (default: as it says, or 30)"),
    _own("--trusted-network", _S, "", "accept hosts at --rdzv-endpoint without a FLYBALL_TOKEN"),
    _own("--env", _LIST, "NAME[=VALUE]", "with a supervisor: pass this variable to the workers; ALL, NONE"),
    _own("--min-nodes", _I, "N", "go on with so few hosts if there is no spare"),
    _own("--spares", _I, "N", "keep so many hosts free of later jobs (default: 0)"),
    _own("--never-from-scratch", _S, "", "once a step was saved, never restart from step 0: wait for a copy"),
    _own("--injectable", _S, "", "let `flyball inject` break this job on purpose"),
    _own("--check-nodes", _S, "", "before the first step, check the hosts: only those that pass get ranks"),
    _own("--exclude-stragglers", _S, "", "likewise, and leave out hosts that compute slower than the others"),
    _own("--policy", _T, "FILE", "TOML file of policy settings for this job: how the controller decides about it"),
    _own("--hang-timeout", _N, "SECONDS", "seconds without a step that are a hang (0: adapts)"),
    _own("--state-dir", _T, "DIR", "folder for state and logs (default: one per job)"),
    _own("--host-id", _T, "NAME", "stable name of this host (default: its host name)"),
    _own("-o --output", _T, "FORMAT", "output format: table or json"),
    _own("-h --help", _S, "", "show the flags that most jobs need"),
    _own("--help-all", _S, "", "show all flags, other launchers' as well"),
)

_honours = partial(_flag, FlagOrigin.TORCHRUN, Use.HONOURED)
_notes = partial(_flag, FlagOrigin.TORCHRUN, Use.NOTED)
_refuses = partial(_flag, FlagOrigin.TORCHRUN, Use.REFUSED)
TORCHRUN_FLAGS = (
    _honours("--nnodes", _T, "N|MIN:MAX", "hosts, or MIN:MAX: goes on with MIN when hosts are lost"),
    _honours("--nproc-per-node", _T, "P", "workers per host: a number, auto, cpu, gpu or xpu (default: 1)"),
    _notes("--rdzv-backend", _T, "NAME", "the controller assigns the ranks, there is no rendezvous"),
    _honours("--rdzv-endpoint", _T, "HOST:PORT", "with several hosts: where the supervisor of this job listens"),
    _honours("--rdzv-id", _T, "NAME", "name of the job, unless --job is given"),
    _notes("--rdzv-conf", _T, "K=V,...", "there is no rendezvous, and no timeouts of it"),
    _honours("--standalone", _S, "", "one host, whatever the rendezvous flags are"),
    _honours(
        "--max-restarts", _I, "K", "restarts of failing workers without progress in between (default: 3; torchrun: 0)"
    ),
    _notes("--monitor-interval", _N, "SECONDS", "a worker's exit is an event, not a poll"),
    _notes(
        "--start-method",
        _T,
        "METHOD",
        "workers are forked from a warm standby that has torch imported",
        choices=("spawn", "fork", "forkserver"),
    ),
    _notes("--event-log-handler", _T, "NAME", "the supervisor keeps events: GET /v1/events, `flyball goodput`"),
    _honours("--role", _T, "NAME", "ROLE_NAME in the workers' environment"),
    _honours("-m --module", _S, "", "the script is a module name, as with python -m"),
    _honours("--no-python", _S, "", "the script is a program: run it without Python"),
    _honours("--run-path", _S, "", "run the script with runpy, which Flyball does anyway"),
    _honours("--log-dir", _T, "DIR", "folder for the ranks' logs (default: in the state folder)"),
    _honours("-r --redirects", _T, "STD", "1 stdout, 2 stderr, 3 both, or RANK:3,...: to the log only"),
    _honours("-t --tee", _T, "STD", "likewise: to log and terminal, each line with its rank"),
    _honours("--local-ranks-filter", _T, "R,R,...", "local ranks whose output is shown"),
    _notes("--duplicate-stdout-filters", _T, "WORDS", "each rank's log file has its whole output: search there"),
    _notes("--duplicate-stderr-filters", _T, "WORDS", "each rank's log file has its whole output: search there"),
    _honours("--node-rank", _I, "N", "0: the supervisor of the rendezvous address runs here"),
    _honours("--master-addr", _T, "HOST", "with several hosts: where the supervisor of this job listens"),
    _honours("--master-port", _I, "PORT", "its port; workers get a fresh MASTER_PORT per generation"),
    _honours("--local-addr", _T, "IP", "address at which other hosts reach this one"),
    _refuses("--logs-specs", _T, "NAME", "log classes of torchrun plug-ins cannot be loaded"),
    _notes(
        "--numa-binding",
        _T,
        "MODE",
        "not supported yet: workers run on any CPU",
        choices=("node", "socket", "exclusive", "core-complex"),
    ),
    _honours("--signals-to-handle", _T, "SIG,SIG,...", "signals that end the job cleanly"),
    _honours("--shutdown-timeout", _I, "SECONDS", "seconds between SIGTERM and SIGKILL of the workers"),
    _honours("--virtual-local-rank", _S, "", "LOCAL_RANK=0, and CUDA_VISIBLE_DEVICES names the rank's device"),
)

_honours = partial(_flag, FlagOrigin.RESILIENCY, Use.HONOURED)
_notes = partial(_flag, FlagOrigin.RESILIENCY, Use.NOTED)
RESILIENCY_FLAGS = (
    _honours("--enable-optimized-async-ckpt", _S, "", "saves are always asynchronous; there is nothing to switch on"),
    _honours("--local-ckpt-dir", _T, "DIR", "folder on this host's disk for checkpoints", setting="disk_dir"),
    _honours("--local-ckpt-interval", _I, "STEPS", "steps between saves to it", setting="disk_every_steps"),
    _honours(
        "--persistent-ckpt-dir", _T, "DIR", "folder or s3://... that outlives every host", setting="persistent_dir"
    ),
    _honours("--persistent-ckpt-interval", _I, "STEPS", "steps between saves to it", setting="persistent_every_steps"),
    _honours("--term-timeout", _N, "SECONDS", "seconds between SIGTERM and SIGKILL of the workers"),
    _notes("--fault-tol-cfg-path", _T, "FILE", "deadlines adapt to the job, no file sets them"),
    _notes("--ignore-missing-fault-tol-cfg", _S, "", "there is no such file that could be missing"),
    _notes("--ft-param-workload_check_interval", _N, "S", "exits are events, beacons are read every 50 ms"),
    _notes("--ft-param-initial_rank_heartbeat_timeout", _N, "S", "the deadline of the start adapts to the job"),
    _notes("--ft-param-rank_heartbeat_timeout", _N, "S", "deadlines adapt to the ranks; --hang-timeout sets one"),
    _notes("--ft-param-safety_factor", _N, "X", "the adaptive deadlines include a margin"),
    _notes("--ft-param-rank_termination_signal", _T, "SIG", "a hung worker is ended with SIGKILL"),
    _notes("--ft-param-log_level", _T, "LEVEL", "logs are structured and complete"),
)

_honours = partial(_flag, FlagOrigin.DLROVER, Use.HONOURED)
_notes = partial(_flag, FlagOrigin.DLROVER, Use.NOTED)
DLROVER_FLAGS = (
    _honours("--precheck", _I, "LEVEL", "1 or more: as --check-nodes"),
    _honours("--network-check --node_check", _S, "", "as --check-nodes"),
    _honours("--comm-perf-test", _S, "", "as --check-nodes, which measures an all-reduce; `flyball status` shows it"),
    _honours("--exclude-straggler", _S, "", "as --exclude-stragglers"),
    _notes("--node_unit", _I, "N", "the number of hosts does not change while the job runs"),
    _honours("--auto_config", _S, "", "workers per host: one per accelerator, as --nproc-per-node auto"),
    _notes("--auto_tunning", _S, "", "batch size and learning rate stay as the script sets them"),
    _notes("--save_at_breakpoint", _S, "", "memory outlives a dead worker, and the newest step is restored from it"),
    _notes("--accelerator", _T, "NAME", "the script chooses its device"),
    _notes("--training_port", _I, "PORT", "a fresh port is found for every generation"),
    _notes("--numa-affinity", _S, "", "not supported yet: workers run on any CPU"),
    _notes("--membind-policy", _T, "POLICY", "not supported yet: memory is not bound to a node"),
    _notes("--ucp_device_type", _T, "DEVICE", "checkpoints are not converted between layouts"),
)

ALL_FLAGS = (*FLYBALL_FLAGS, *TORCHRUN_FLAGS, *RESILIENCY_FLAGS, *DLROVER_FLAGS)

# Variables of TRANSOM's checkpoint engine that a job's environment may still contain. Those with an equivalent setting
# set it, unless it is given; the others are named on stderr.
TRANSOM_SETTINGS = {
    "CKPT_ENGINE_MEM_LIMIT_GB": "memory_limit_bytes",
    "CKPT_ENGINE_SKIP_BOOTSTRAP": "refill",
}
TRANSOM_VARIABLES = {
    "CKPT_ENGINE_META_CLIENT": "engines keep the inventories themselves, and the supervisor has them in its database",
    "CKPT_ENGINE_MYSQL_ADDR": "the database is a setting of the supervisor: flyball up --database-url",
    "CKPT_ENGINE_MYSQL_PORT": "the database is a setting of the supervisor: flyball up --database-url",
    "CKPT_ENGINE_MYSQL_USER": "the database is a setting of the supervisor: flyball up --database-url",
    "CKPT_ENGINE_MYSQL_PASSWORD": "the database is a setting of the supervisor: flyball up --database-url",
    "CKPT_ENGINE_MYSQL_FLUSH": "nothing needs emptying: generations and lineage tell old steps from new ones",
    "CKPT_ENGINE_TCP_PORT": "an engine listens on a free port, which its peers learn",
    "CKPT_ENGINE_HTTP_PORT": "trainer and engine share memory and a Unix socket, no port",
    "CKPT_ENGINE_ENABLE_PERSISTENT": "use --persistent-ckpt-dir and --persistent-ckpt-interval",
    "CKPT_ENGINE_MAX_ITERATION_IN_CACHE": "a rank has two to four slots, depending on the tiers in use",
    "CKPT_ENGINE_LOG_LEVEL": "the engine's log is complete: <state folder>/engine.log",
    "CKPT_ENGINE_LOG_PATTERN": "the engine's log has one format, JSON lines",
    "TRANSOM_JOBNAME": "use --job",
    "TRANSOM_RANK": "the controller assigns the ranks",
    "TRANSOM_WORLD_SIZE": "use --nnodes",
    "TRANSOM_HOSTS": "each host joins by itself: flyball host --supervisor URL",
}
