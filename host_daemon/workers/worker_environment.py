"""The environment of a worker: the daemon's own, the job's, torchrun's variables and Flyball's. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from flyball.contracts import wire
from flyball.contracts.cluster import HostRanks, JobSpec, Placement
from flyball.contracts.errors import ConfigurationError
from flyball.contracts.on_host import worker_env
from flyball.contracts.on_host.injected import injected_base
from flyball.contracts.on_host.segments import beacon_path

# The size from which memcpy bypasses the caches. glibc derives it from the processor's cache sizes, and virtual
# machines report odd ones (240 MiB here). Copying a state then evicts the trainer's data from the caches: the step
# beside it loses 10 ms per 0.5 GiB instead of 3.
COPY_PAST_CACHES = "glibc.cpu.x86_non_temporal_threshold=0x100000"


def job_environment(base: Mapping[str, str], spec: JobSpec, secrets: Mapping[str, str] = {}) -> dict[str, str]:
    """The environment that all workers of a job share, and that the spawner already has when it imports torch.
    `secrets` are the unsealed values of `spec.sealed_env`."""
    own = {name: value for name, value in base.items() if name != "FLYBALL_TOKEN"}
    environment = {**own, **spec.user_env, **secrets, **spec.env}
    if spec.nproc_per_node > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: N ranks with N threads each would crawl
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    # torch resolves the name of every address that it connects to. One lost reply of the name server would delay a
    # rendezvous, and so every restart, by the resolver's default of 5 s.
    environment.setdefault("RES_OPTIONS", "timeout:1 attempts:5")
    environment.setdefault("GLIBC_TUNABLES", COPY_PAST_CACHES)
    return environment


def expected_environment(base: Mapping[str, str], nproc_per_node: int) -> dict[str, str]:
    """The environment of jobs that bring none of their own, before one comes."""
    return job_environment(base, JobSpec(job="any", argv=("-",), workdir="/", nproc_per_node=nproc_per_node))


def rank_environment(
    environment: Mapping[str, str],
    *,
    spec: JobSpec,
    placement: Placement,
    host: HostRanks,
    local_rank: int,
    shm_prefix: str,
    engine_notify: str,
    error_file: str,
    inject_folder: str = "",
) -> dict[str, str]:
    """The complete environment of one rank. `environment` is its job's; `inject_folder`: for an injectable one."""
    rank = host.ranks[local_rank]
    restore = placement.restore
    torchrun = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": placement.world_size,
        "LOCAL_WORLD_SIZE": len(host.ranks),
        "GROUP_RANK": host.ranks[0] // spec.nproc_per_node,
        "GROUP_WORLD_SIZE": placement.world_size // spec.nproc_per_node,
        "ROLE_NAME": spec.env.get("ROLE_NAME", "default"),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": placement.world_size,
        "MASTER_ADDR": placement.master_address,
        "MASTER_PORT": placement.master_port,
        "TORCHELASTIC_RESTART_COUNT": placement.restart_count,
        "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
        "TORCHELASTIC_RUN_ID": placement.job,
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the store is a process of its own, see spawning/child.py
    }
    flyball = {
        worker_env.JOB: placement.job,
        worker_env.RUN: placement.run,
        worker_env.GENERATION: placement.generation,
        worker_env.HOST_ID: host.host_id,
        worker_env.BEACON: beacon_path(shm_prefix, placement.job, placement.generation, rank),
        worker_env.SHM_PREFIX: shm_prefix,
        worker_env.ENGINE_NOTIFY: engine_notify,
        worker_env.RESTORE_STEP: "" if restore is None else restore.step,
        worker_env.CHECKPOINT: wire.encode(spec.checkpoint).decode(),
        worker_env.LINEAGE: wire.encode(placement.lineage).decode(),
        worker_env.INJECT: injected_base(inject_folder, spec.job, rank) if spec.injectable else "",
    }
    if spec.virtual_local_rank:
        torchrun |= {"LOCAL_RANK": 0, "CUDA_VISIBLE_DEVICES": _device_of(local_rank, environment)}
    return {**environment, **{name: str(value) for name, value in (torchrun | flyball).items()}}


def _device_of(local_rank: int, environment: Mapping[str, str]) -> str:
    """The rank's device, as with torchrun's --virtual-local-rank. Raises ConfigurationError."""
    devices = environment.get("CUDA_VISIBLE_DEVICES")
    if devices is None:
        return str(local_rank)
    listed = devices.split(",")
    if local_rank >= len(listed):
        raise ConfigurationError(
            f"CUDA_VISIBLE_DEVICES={devices} has no device for local rank {local_rank}.",
            hint="name a device for every worker of the host, or start fewer with --nproc-per-node",
        )
    return listed[local_rank].strip()
