"""The flags of `flyball run` as one table: Flyball's own, torchrun's, and those of the launchers that people come from.
Flags of checkpoint settings name the setting; its type and default are in one place, the struct that has it.

Each flag is honoured; or accepted and named on stderr with the reason why it changes nothing here; or refused with the
next step. docs/coming-from.md shows the same table to people, and a test compares the two.
"""

from __future__ import annotations

from enum import StrEnum
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
    LIST = "list"  # text, and every further one counts too


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
        """All that the parser takes: as given, all dashes, all underscores."""
        words = [name[2:] for name in self.names if name.startswith("--")]
        dashed = [f"--{word.replace('_', '-')}" for word in words]
        underscored = [f"--{word.replace('-', '_')}" for word in words]
        return tuple(dict.fromkeys((*self.names, *dashed, *underscored)))

    @property
    def dest(self) -> str:
        """The flag's longest name as an identifier, as argparse and torchrun's PET_ variables spell it."""
        return max(self.names, key=len).lstrip("-").replace("-", "_")


_T, _I, _N, _S = FlagKind.TEXT, FlagKind.INTEGER, FlagKind.NUMBER, FlagKind.SWITCH
_H, _NOTED, _REFUSED = Use.HONOURED, Use.NOTED, Use.REFUSED

FLYBALL_FLAGS = tuple(
    Flag(names, kind, FlagOrigin.FLYBALL, _H, about, metavar, (), *setting)
    for names, kind, about, metavar, *setting in (
        (("--job",), _T, "name of the job (default: the script's name, and a hash of the command)", "NAME"),
        (("--resume",), _S, "go on with an earlier run: --resume [JOB] (default: the newest), or with a script", ""),
        (("--fresh",), _S, "train anew where the same command would go on from its checkpoints", ""),
        (("--supervisor",), _T, "join the cluster of this supervisor instead of bringing one up", "URL"),
        (("--use-supervisor",), _S, "join the supervisor whose address is in FLYBALL_SUPERVISOR", ""),
        (("--ca-file",), _T, "PEM file of the CA that signed its certificate (default: FLYBALL_CA_FILE)", "FILE"),
        (("--client-cert-file",), _T, "PEM file of the client certificate (default: FLYBALL_CLIENT_CERT_FILE)", "FILE"),
        (("--client-key-file",), _T, "PEM file of that certificate's key (default: FLYBALL_CLIENT_KEY_FILE)", "FILE"),
        (("--ckpt-config",), _T, "TOML file of checkpoint settings: [checkpoint] and [engine]", "FILE"),
        (("--ckpt-every",), _I, "steps between saves to memory; 0: none (default: 1)", "STEPS", "every_steps"),
        (("--ckpt-every-s",), _N, "seconds between saves to memory, as well", "SECONDS", "every_s"),
        (("--ckpt-capture",), _T, "lazy (default), or blocking: copy before save returns", "MODE", "capture"),
        (("--ckpt-when-full",), _T, "while every slot is in use: wait (default) or skip the save", "WORD", "when_full"),
        (
            ("--ckpt-memory-limit",),
            _T,
            "memory for a host's slots, e.g. 64GiB; 0: all it has",
            "SIZE",
            "memory_limit_bytes",
        ),
        (("--replicas",), _I, "hosts that hold a copy of each host's memory (default: 1)", "N", "replicas"),
        (("--replication",), _T, "how these hosts are chosen: ring (default) or clique", "WORD", "replication"),
        (
            ("--peer-bandwidth",),
            _T,
            "bytes per second to these hosts, e.g. 1GB; 0: no limit",
            "RATE",
            "peer_bytes_per_s",
        ),
        (("--no-local-ckpt",), _S, "do not save checkpoints in the state folder", ""),
        (("--local-ckpt-interval-s",), _N, "seconds between saves to the disk", "SECONDS", "disk_every_s"),
        (("--local-ckpt-keep",), _I, "newest steps kept on the disk (default: 2)", "N", "disk_keep_latest"),
        (("--local-ckpt-keep-every",), _I, "keep every step that is a multiple of this", "STEPS", "disk_keep_every"),
        (("--local-ckpt-bandwidth",), _T, "bytes per second to the disk", "RATE", "disk_bytes_per_s"),
        (("--persistent-ckpt-interval-s",), _N, "seconds between saves to the store", "SECONDS", "persistent_every_s"),
        (("--persistent-ckpt-keep",), _I, "newest steps kept in the store (default: 2)", "N", "persistent_keep_latest"),
        (
            ("--persistent-ckpt-keep-every",),
            _I,
            "keep every step that is a multiple of this",
            "STEPS",
            "persistent_keep_every",
        ),
        (("--persistent-ckpt-bandwidth",), _T, "bytes per second to the store", "RATE", "persistent_bytes_per_s"),
        (
            ("--trusted-network",),
            _S,
            "accept hosts at --rdzv-endpoint without a FLYBALL_TOKEN",
            "",
        ),
        (("--env",), FlagKind.LIST, "with a supervisor: pass this variable to the workers; ALL, NONE", "NAME[=VALUE]"),
        (("--never-from-scratch",), _S, "never restart from step 0 once a step was saved: wait for a copy", ""),
        (("--hang-timeout",), _N, "seconds without a step that count as a hang; 0: adaptive (default)", "SECONDS"),
        (("--state-dir",), _T, "folder for state and logs (default: one per job name)", "DIR"),
        (("--host-id",), _T, "stable name of this host (default: its host name)", "NAME"),
        (("-o", "--output"), _T, "output format: table or json", "FORMAT"),
        (("-h", "--help"), _S, "show this help", ""),
    )
)

TORCHRUN_FLAGS = tuple(
    Flag(names, kind, FlagOrigin.TORCHRUN, use, about, metavar, choices)
    for names, kind, use, about, metavar, choices in (
        (("--nnodes",), _T, _H, "hosts, or MIN:MAX: runs on MIN, up to MAX join as spares", "N|MIN:MAX", ()),
        (("--nproc-per-node",), _T, _H, "workers per host: a number, auto, cpu, gpu or xpu (default: 1)", "P", ()),
        (("--rdzv-backend",), _T, _NOTED, "the controller hands out the ranks, there is no rendezvous", "NAME", ()),
        (("--rdzv-endpoint",), _T, _H, "with several hosts: where the supervisor of this job listens", "HOST:PORT", ()),
        (("--rdzv-id",), _T, _H, "name of the job, where --job is not given", "NAME", ()),
        (("--rdzv-conf",), _T, _NOTED, "there is no rendezvous whose timeouts could be set", "K=V,...", ()),
        (("--standalone",), _S, _H, "one host, whatever the rendezvous flags say", "", ()),
        (
            ("--max-restarts",),
            _I,
            _H,
            "restarts of failing workers without progress in between (default: 3; torchrun: 0)",
            "K",
            (),
        ),
        (("--monitor-interval",), _N, _NOTED, "a worker's exit is an event, not a poll", "SECONDS", ()),
        (
            ("--start-method",),
            _T,
            _NOTED,
            "workers are forked from a warm standby that has torch imported",
            "METHOD",
            ("spawn", "fork", "forkserver"),
        ),
        (
            ("--event-log-handler",),
            _T,
            _NOTED,
            "events are kept by the supervisor: GET /v1/events, `flyball goodput`",
            "NAME",
            (),
        ),
        (("--role",), _T, _H, "ROLE_NAME in the workers' environment", "NAME", ()),
        (("-m", "--module"), _S, _H, "the script is a module name, as with python -m", "", ()),
        (("--no-python",), _S, _H, "the script is a program: run it without Python", "", ()),
        (("--run-path",), _S, _H, "run the script with runpy: what Flyball does anyway", "", ()),
        (("--log-dir",), _T, _H, "folder for the ranks' logs (default: in the state folder)", "DIR", ()),
        (("-r", "--redirects"), _T, _H, "1 stdout, 2 stderr, 3 both, or RANK:3,...: to the log only", "STD", ()),
        (("-t", "--tee"), _T, _H, "likewise: to log and terminal, each line with its rank", "STD", ()),
        (("--local-ranks-filter",), _T, _H, "local ranks whose output is shown", "R,R,...", ()),
        (
            ("--duplicate-stdout-filters",),
            _T,
            _NOTED,
            "each rank's whole output is in its log file, where it can be searched",
            "WORDS",
            (),
        ),
        (
            ("--duplicate-stderr-filters",),
            _T,
            _NOTED,
            "each rank's whole output is in its log file, where it can be searched",
            "WORDS",
            (),
        ),
        (("--node-rank",), _I, _H, "0: the supervisor of the rendezvous address runs here", "N", ()),
        (("--master-addr",), _T, _H, "with several hosts: where the supervisor of this job listens", "HOST", ()),
        (("--master-port",), _I, _H, "its port; workers get a fresh MASTER_PORT per generation", "PORT", ()),
        (("--local-addr",), _T, _H, "address by which other hosts reach this one", "IP", ()),
        (("--logs-specs",), _T, _REFUSED, "log classes of torchrun plug-ins cannot be loaded", "NAME", ()),
        (
            ("--numa-binding",),
            _T,
            _NOTED,
            "not supported yet: workers run on any CPU",
            "MODE",
            ("node", "socket", "exclusive", "core-complex"),
        ),
        (("--signals-to-handle",), _T, _H, "signals that end the job cleanly", "SIG,SIG,...", ()),
        (("--shutdown-timeout",), _I, _H, "seconds between SIGTERM and SIGKILL of the workers", "SECONDS", ()),
        (("--virtual-local-rank",), _S, _H, "LOCAL_RANK=0, and CUDA_VISIBLE_DEVICES names the rank's device", "", ()),
    )
)

RESILIENCY_FLAGS = tuple(
    Flag(names, kind, FlagOrigin.RESILIENCY, use, about, metavar, (), *setting)
    for names, kind, use, about, metavar, *setting in (
        (("--enable-optimized-async-ckpt",), _S, _H, "saves are always asynchronous; nothing to switch on", ""),
        (("--local-ckpt-dir",), _T, _H, "folder on this host's disk for checkpoints", "DIR", "disk_dir"),
        (("--local-ckpt-interval",), _I, _H, "steps between saves to it", "STEPS", "disk_every_steps"),
        (
            ("--persistent-ckpt-dir",),
            _T,
            _H,
            "folder or s3://... that outlives every host",
            "DIR",
            "persistent_dir",
        ),
        (("--persistent-ckpt-interval",), _I, _H, "steps between saves to it", "STEPS", "persistent_every_steps"),
        (("--term-timeout",), _N, _H, "seconds between SIGTERM and SIGKILL of the workers", "SECONDS"),
        (
            ("--fault-tol-cfg-path",),
            _T,
            _NOTED,
            "deadlines adapt to what is observed, there is no file of them",
            "FILE",
        ),
        (("--ignore-missing-fault-tol-cfg",), _S, _NOTED, "there is no such file that could be missing", ""),
        (("--ft-param-workload_check_interval",), _N, _NOTED, "exits are events, beacons are read every 50 ms", "S"),
        (("--ft-param-initial_rank_heartbeat_timeout",), _N, _NOTED, "the start has an adapted deadline", "S"),
        (
            ("--ft-param-rank_heartbeat_timeout",),
            _N,
            _NOTED,
            "deadlines adapt to what ranks do; --hang-timeout sets one",
            "S",
        ),
        (("--ft-param-safety_factor",), _N, _NOTED, "the margin is part of the adapted deadlines", "X"),
        (("--ft-param-rank_termination_signal",), _T, _NOTED, "a hung worker is ended with SIGKILL", "SIG"),
        (("--ft-param-log_level",), _T, _NOTED, "logs are structured and complete", "LEVEL"),
    )
)

DLROVER_FLAGS = tuple(
    Flag(names, kind, FlagOrigin.DLROVER, use, about, metavar)
    for names, kind, use, about, metavar in (
        (("--precheck",), _I, _NOTED, "not supported yet: hosts are not measured before the start", "LEVEL"),
        (("--network-check",), _S, _NOTED, "not supported yet: the network is not measured before the start", ""),
        (("--comm-perf-test",), _S, _NOTED, "not supported yet: the network is not measured before the start", ""),
        (("--exclude-straggler",), _S, _NOTED, "not supported yet: slow hosts are kept", ""),
        (("--node_unit",), _I, _NOTED, "the number of hosts does not change while the job runs", "N"),
        (("--auto_config",), _S, _H, "workers per host: one per accelerator, as --nproc-per-node auto", ""),
        (("--auto_tunning",), _S, _NOTED, "batch size and learning rate stay what the script says", ""),
        (
            ("--save_at_breakpoint",),
            _S,
            _NOTED,
            "memory outlives a dead worker, and the newest step is restored from it",
            "",
        ),
        (("--accelerator",), _T, _NOTED, "the script chooses its device", "NAME"),
        (("--training_port",), _I, _NOTED, "a fresh port is found for every generation", "PORT"),
        (("--numa-affinity",), _S, _NOTED, "not supported yet: workers run on any CPU", ""),
        (("--membind-policy",), _T, _NOTED, "not supported yet: memory is not bound to a node", "POLICY"),
        (("--ucp_device_type",), _T, _NOTED, "checkpoints are not converted between layouts", "DEVICE"),
    )
)

ALL_FLAGS = (*FLYBALL_FLAGS, *TORCHRUN_FLAGS, *RESILIENCY_FLAGS, *DLROVER_FLAGS)

# Settings of TRANSOM's checkpoint engine: variables that a job's environment may still carry. Those that have an
# equivalent set it, unless it is set; the others are named on stderr.
TRANSOM_SETTINGS = {
    "CKPT_ENGINE_MEM_LIMIT_GB": "memory_limit_bytes",
    "CKPT_ENGINE_SKIP_BOOTSTRAP": "refill",
}
TRANSOM_VARIABLES = {
    "CKPT_ENGINE_META_CLIENT": "inventories are the engines' own; the supervisor keeps them in its database",
    "CKPT_ENGINE_MYSQL_ADDR": "the database is a setting of the supervisor: flyball up --database-url",
    "CKPT_ENGINE_MYSQL_PORT": "the database is a setting of the supervisor: flyball up --database-url",
    "CKPT_ENGINE_MYSQL_USER": "the database is a setting of the supervisor: flyball up --database-url",
    "CKPT_ENGINE_MYSQL_PASSWORD": "the database is a setting of the supervisor: flyball up --database-url",
    "CKPT_ENGINE_MYSQL_FLUSH": "nothing needs to be emptied: generations and lineage tell old steps from new ones",
    "CKPT_ENGINE_TCP_PORT": "an engine listens on a free port and tells it to its peers",
    "CKPT_ENGINE_HTTP_PORT": "trainer and engine share memory and a Unix socket, no port",
    "CKPT_ENGINE_ENABLE_PERSISTENT": "use --persistent-ckpt-dir and --persistent-ckpt-interval",
    "CKPT_ENGINE_MAX_ITERATION_IN_CACHE": "two to four slots per rank, by the tiers that are on",
    "CKPT_ENGINE_LOG_LEVEL": "the engine's log is complete: <state folder>/engine.log",
    "CKPT_ENGINE_LOG_PATTERN": "the engine's log has one format, JSON lines",
    "TRANSOM_JOBNAME": "use --job",
    "TRANSOM_RANK": "the controller hands out the ranks",
    "TRANSOM_WORLD_SIZE": "use --nnodes",
    "TRANSOM_HOSTS": "hosts join by themselves: flyball host --supervisor URL",
}
