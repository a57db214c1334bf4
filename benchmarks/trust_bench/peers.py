"""The launchers of the shoot-out: how each is started, as its own documentation says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from flyball.contracts.errors import UsageError
from host_daemon.workers.worker_environment import COPY_PAST_CACHES
from trust_bench.manager_lmresiliency import PORT_VARIABLE

RACER = Path(__file__).with_name("racer.py")
MAX_RESTARTS = "1000"
ENVIRONMENT = {  # for all alike
    "OMP_NUM_THREADS": "1",
    "GLIBC_TUNABLES": COPY_PAST_CACHES,
    # Without it, restarted gloo jobs of torchrun and of those that are built on it usually hang.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "10",
    "GLOO_SOCKET_IFNAME": "lo",
}


class Course(NamedTuple):
    """What is the same for all: the training, and where it is."""

    folder: Path
    port: int
    hang_timeout_s: float
    save_every: int
    step_floor_s: float = 0.1
    width: int = 128
    layers: int = 6

    def script(self, saver: str, racer: Path = RACER) -> list[str]:
        named = {
            "--saver": saver,
            "--folder": self.folder,
            "--job": "race",
            "--save-every": self.save_every,
            "--hang-timeout-s": self.hang_timeout_s,
            "--step-floor-s": self.step_floor_s,
            "--width": self.width,
            "--layers": self.layers,
        }
        return [str(racer), *(str(word) for pair in named.items() for word in pair)]


class Peer(NamedTuple):
    """`command(course, python, host)`: of one host. `hosts`: how many are there from the beginning. `late_spare`: one
    more is started at the moment in which a host is lost. `module`: without which it is not installed. `cannot`: faults
    that it has no answer to, with the reason. `server`: what the hosts report to, if none of them is that."""

    name: str
    command: Callable[[Course, str, int], list[str]]
    hosts: int
    late_spare: bool
    environment: Mapping[str, str]
    module: str
    cannot: Mapping[str, str] = {}
    server: Callable[[Course, str], list[str]] | None = None


def _flyball(course: Course, python: str, host: int) -> list[str]:
    return [
        *(python, "-P", "-m", "flyball.cli.main", "run", "--nnodes", "2", "--nproc-per-node", "1", "--spares", "2"),
        *("--rdzv-endpoint", f"127.0.0.1:{course.port}", "--rdzv-id", "race", "--node-rank", str(host)),
        *("--host-id", f"host-{host}", "--state-dir", str(course.folder / f"host-{host}")),
        *("--hang-timeout", str(course.hang_timeout_s), "--max-restarts", MAX_RESTARTS),
        *("--local-ckpt-dir", str(course.folder / "checkpoints"), "--local-ckpt-interval", str(course.save_every)),
        *course.script("flyball"),
    ]


def _elastic(course: Course, host: int) -> list[str]:
    """What torchrun and ft_launcher have in common."""
    is_store = "is_host=true" if host == 0 else "is_host=false"
    return [
        *("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", MAX_RESTARTS, "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"127.0.0.1:{course.port}", "--rdzv-id", "race", "--rdzv-conf", is_store),
        *("--local-addr", "127.0.0.1"),
    ]


def _torchrun(course: Course, python: str, host: int) -> list[str]:
    return [python, "-P", "-m", "torch.distributed.run", *_elastic(course, host), *course.script("dcp")]


def _nvrx(course: Course, python: str, host: int) -> list[str]:
    module = "nvidia_resiliency_ext.fault_tolerance.launcher"
    timeouts = (
        *("--ft-initial-rank-heartbeat-timeout", "60", "--ft-rank-heartbeat-timeout", str(course.hang_timeout_s)),
        *("--ft-workload-check-interval", "1"),  # the default is 5 s
    )
    return [python, "-P", "-m", module, *_elastic(course, host), *timeouts, *course.script("nvrx")]


def _torchft(course: Course, python: str, host: int) -> list[str]:
    """One torchrun for each replica group, as in its README; a host that replaces another has that one's group."""
    group = {"REPLICA_GROUP_ID": min(host, 1), "NUM_REPLICA_GROUPS": 2}
    group |= {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{course.port}"}
    return [
        *("env", *(f"{name}={value}" for name, value in group.items()), python, "-P", "-m", "torch.distributed.run"),
        *("--standalone", "--nnodes", "1", "--nproc-per-node", "1", "--max-restarts", MAX_RESTARTS),
        *course.script("torchft", RACER.with_name("racer_torchft.py")),
    ]


def _lighthouse(course: Course, python: str) -> list[str]:
    words = ("--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000")
    return [str(Path(python).with_name("torchft_lighthouse")), *words, "--bind", f"127.0.0.1:{course.port}"]


def _dlrover(course: Course, python: str, host: int) -> list[str]:
    """As its operator starts an agent; one that replaces another has a new id and that one's rank. The name of the job
    is that of the agent's sockets, too, so on one machine each has its own."""
    node = {"NODE_ID": host, "NODE_RANK": min(host, 1), "NODE_NUM": 2}
    node |= {"DLROVER_MASTER_ADDR": f"127.0.0.1:{course.port}", "ELASTIC_JOB_NAME": f"race-{course.port}-{host}"}
    return [
        *("env", *(f"{name}={value}" for name, value in node.items()), python, "-P", "-m"),
        *("dlrover.trainer.torch.elastic_run", "--nnodes", "2", "--nproc-per-node", "1"),
        *("--max-restarts", MAX_RESTARTS, *course.script("dcp")),
    ]


def _dlrover_master(course: Course, python: str) -> list[str]:
    """The line by which `dlrover-run --standalone` starts it, for two nodes."""
    words = ("--port", str(course.port), "--node_num", "2", "--job_name", "race", "--platform", "local")
    return [python, "-P", "-u", "-m", "dlrover.python.master.main", *words]


LMRESILIENCY_HOSTS = 4


def _lmresiliency(course: Course, python: str, host: int) -> list[str]:
    """The first two that are there train; the others are its standbys."""
    machine = {"LM_RESILIENCY_MACHINE_ID_PATH": _machine_id(course, host), PORT_VARIABLE: course.port}
    context = course.folder / f"host-{host}" / "restart-context.json"
    return [
        *("env", *(f"{name}={value}" for name, value in machine.items())),
        *(python, "-P", str(RACER.with_name("agent_lmresiliency.py"))),
        *("--nnodes", f"2:{LMRESILIENCY_HOSTS}", "--nproc-per-node", "1", "--max-restarts", MAX_RESTARTS),
        *("--rdzv-backend", "lm_resiliency", "--rdzv-endpoint", f"127.0.0.1:{course.port}", "--rdzv-id", "race"),
        *("--rdzv-conf", f"store_type=tcp,is_host=false,lm_resiliency_restart_context_path={context}"),
        *("--local-addr", "127.0.0.1", *course.script("lmresiliency", RACER.with_name("racer_lmresiliency.py"))),
    ]


def _lmresiliency_manager(course: Course, python: str) -> list[str]:
    machines = (_machine_id(course, host) for host in range(LMRESILIENCY_HOSTS))
    script = str(RACER.with_name("manager_lmresiliency.py"))
    return [python, "-P", "-u", script, "--port", str(course.port), "--machine-ids", *machines]


def _machine_id(course: Course, host: int) -> str:
    """The file by which its agents on one machine are told apart. The manager writes it."""
    return str(course.folder / f"machine-id-{host}")


TORCHFT_CANNOT = {  # tried: no step within 120 s
    "hang": "the manager of a rank that stands still sends heartbeats, so the lighthouse has no quorum without it",
}
PEERS = {
    peer.name: peer
    for peer in (
        # Two faults take a host, so there are two spares.
        Peer("flyball", _flyball, 4, False, {"FLYBALL_TOKEN": "shoot-out-of-one-machine"}, "flyball"),
        # With a third agent at the door from the beginning, each restart of torchrun was followed by several more, and
        # each of NVRx waited for the 30 s in which its rendezvous takes more nodes.
        Peer("torchrun", _torchrun, 2, True, {}, "torch"),
        Peer("nvrx", _nvrx, 2, True, {}, "nvidia_resiliency_ext"),
        Peer("torchft", _torchft, 2, True, {}, "torchft", TORCHFT_CANNOT, _lighthouse),
        Peer("dlrover", _dlrover, 2, True, {}, "dlrover", server=_dlrover_master),
        # Its standbys have to be there from the beginning.
        Peer("lmresiliency", _lmresiliency, LMRESILIENCY_HOSTS, False, {}, "lm_resiliency", {}, _lmresiliency_manager),
    )
}


def python_of(peer: Peer, given: Mapping[str, str]) -> str:
    """The interpreter that runs a peer: a virtual environment of its own, or this one. Raises UsageError if the peer is
    not installed there."""
    python = given.get(peer.name, sys.executable)
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({peer.module!r}) is None)"
    try:
        subprocess.run([python, "-c", look], check=True, capture_output=True, timeout=120.0)
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(
            f"{peer.name} cannot be run by {python}: {error if isinstance(error, OSError) else 'it is not installed'}.",
            hint=f"install it as docs/explanation/trust.md says, and give --python {peer.name}=FOLDER/bin/python",
        ) from error
    return python
