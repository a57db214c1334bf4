"""What a worker can reach is not mapped by the daemon and the engine, and opened by `flyball.worker_files` alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAPS = {  # who may map files, or memory
    "ckpt_engine/dcp/shard_writing.py": "a trainer's own memory",
    "ckpt_engine/format/verified_read.py": "memory without a file",
    "ckpt_engine/path_saves/finish.py": "memory without a file",
    "ckpt_engine/tiers/verified_pieces.py": "memory without a file",
    "ckpt_engine/slots/control_segment.py": "a trainer's words, with mapped=True",
    "ckpt_engine/slots/rank_segments.py": "a trainer's slots, by payload and begin_write",
    "ckpt_engine/slots/segment_files.py": "populates pages by madvise, and touches none",
    "ckpt_engine/peers/transport/rdma/landing.py": "memory without a file",
    "ckpt_engine/peers/transport/rdma/queue_pair.py": "memory without a file",
    "ckpt_engine/peers/transport/rdma/registrations.py": "for the NIC: no byte is touched by a processor",
}
OPENS = {  # who may open files in another way: what a worker cannot make
    "host_daemon/checks/check_files.py": "of the daemon's own check processes",
    "host_daemon/engine/engine_process.py": "the engine's pid",
    "host_daemon/kernel/activity.py": "/proc",
    "host_daemon/kernel/become.py": "an open file of the daemon's",
    "host_daemon/kernel/free_ports.py": "/proc",
    "host_daemon/kernel/kin.py": "/proc",
    "host_daemon/kernel/oom_kills.py": "/dev/kmsg and cgroups",
    "host_daemon/kernel/processes.py": "/proc",
    "host_daemon/kernel/system_calls.py": "/proc",
    "host_daemon/kernel/thread_waits.py": "/proc",
    "host_daemon/probes/condition_files.py": "what open_operators_file has opened",
    "host_daemon/probes/gpus.py": "an operator's file, for tests",
    "host_daemon/probes/kernel_log.py": "/dev/kmsg and /sys",
    "host_daemon/probes/links.py": "/sys",
    "host_daemon/probes/notices/node_taints.py": "Kubernetes' token",
    "host_daemon/probes/notices/preemption.py": "the scheduler's notice",
    "host_daemon/probes/pressure.py": "/proc and cgroups",
    "host_daemon/probes/suite.py": "/proc",
    "host_daemon/settings.py": "the operator's token",
    "host_daemon/spawning/child.py": "runs in the worker",
    "host_daemon/spawning/early_settings.py": "runs in the worker",
    "host_daemon/spawning/streams.py": "runs in the worker",
    "host_daemon/store/reserve.py": "in the state folder",
    "host_daemon/workers/pump.py": "a process of its own, which imports nothing of ours",
    "host_daemon/workers/stacks.py": "/proc",
    "host_daemon/workers/terminals.py": "FIFOs that it has just made, without waiting",
    "ckpt_engine/host/server.py": "the cluster's key",
    "ckpt_engine/host/state_dir.py": "in the state folder",
    "ckpt_engine/path_saves/pending_mark.py": "/proc",
    "ckpt_engine/peers/broadcast/bandwidths.py": "in the state folder",
    "ckpt_engine/peers/gathered_shard.py": "a new file, and without waiting a link of its own",
    "ckpt_engine/peers/transport/rdma/verbs.py": "/sys",
    "ckpt_engine/slots/memory_limits.py": "/proc and cgroups",
    "ckpt_engine/slots/segment_files.py": "a new file, and /proc",
    "ckpt_engine/tiers/durable_files.py": "a new file of its own",
}
OF_THE_DAEMON_AND_THE_ENGINE = (
    "host_daemon",
    *(f"ckpt_engine/{folder}" for folder in ("host", "peers", "slots", "tiers", "world", "path_saves")),
)
OPENERS = {"read_bytes", "read_text", "open", "fdopen"}


def modules(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def test_only_trainers_map_what_a_script_can_shorten() -> None:
    found = {
        name
        for name, tree in modules("host_daemon", "ckpt_engine")
        if "ckpt_engine/trainer/" not in name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import) and any(alias.name == "mmap" for alias in node.names)
    }
    assert found == set(MAPS)


def test_the_engine_takes_no_mapping_of_a_slot() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name, tree in modules("ckpt_engine")
        if not name.startswith(("ckpt_engine/trainer/", "ckpt_engine/slots/rank_segments.py"))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (
            (node.func.attr in ("payload", "begin_write") and "segments" in ast.unparse(node.func.value))
            or any(keyword.arg == "mapped" for keyword in node.keywords)
        )
    ]
    assert found == []


def test_files_of_workers_are_opened_in_one_way() -> None:
    found = {
        name
        for name, tree in modules(*OF_THE_DAEMON_AND_THE_ENGINE)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _opens(node.func)
    }
    assert found == set(OPENS)


def _opens(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id == "open"
    if not isinstance(function, ast.Attribute) or function.attr not in OPENERS:
        return False
    owner = ast.unparse(function.value)
    return function.attr != "open" or owner == "os" or "path" in owner.lower() or "Path(" in owner
