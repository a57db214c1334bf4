"""The environment variables through which the daemon configures a worker.

The worker also gets torchrun's own: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE,
ROLE_RANK, ROLE_WORLD_SIZE, ROLE_NAME, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RESTART_COUNT, TORCHELASTIC_MAX_RESTARTS,
TORCHELASTIC_RUN_ID, TORCHELASTIC_ERROR_FILE, OMP_NUM_THREADS (1 if a host has several ranks and it is not set).
"""

from __future__ import annotations

JOB = "FLYBALL_JOB"
RUN = "FLYBALL_RUN"  # which submission of the job
GENERATION = "FLYBALL_GENERATION"
HOST_ID = "FLYBALL_HOST_ID"
BEACON = "FLYBALL_BEACON"  # path of this rank's beacon file
SHM_PREFIX = "FLYBALL_SHM_PREFIX"  # path prefix of this host's segments, e.g. /dev/shm/flyball-3f2a9c10
ENGINE_NOTIFY = "FLYBALL_ENGINE_NOTIFY"  # path of the engine's datagram socket; '' without an engine
RESTORE_STEP = "FLYBALL_RESTORE_STEP"  # the step named by the controller; '': start from scratch
CHECKPOINT = "FLYBALL_CHECKPOINT"  # CheckpointSpec as JSON
LINEAGE = "FLYBALL_LINEAGE"  # Lineage as JSON
WORKER = "FLYBALL_WORKER"  # the process that the daemon started, see `flyball.sdk.rank_claim`
ATTACHED = "FLYBALL_ATTACHED"  # set by `flyball.attach`, for what the process starts: which process is which rank
INJECT = "FLYBALL_INJECT"  # where the rank finds faults to commit; '': its job is not injectable
