"""Workers: started from the warm spawner, their ends seen as events with their true status, stopped without remains."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from flyball.contracts.decisions import UpdateState
from flyball.contracts.signals import WorkerStartFailed

PRINT_ENVIRONMENT = """
import json, os, sys, torch
print(json.dumps({"env": dict(os.environ), "argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(),
                  "threads": torch.get_num_threads(), "main": sys.modules["__main__"].__file__,
                  "group": [os.getsid(0), os.getpgid(0), os.getpid()], "at": time_of_start}), flush=True)
""".replace("import json", "import time; time_of_start = time.time()\nimport json", 1)

WAIT = """
import signal
print("up", flush=True)
signal.pause()
"""


def up(daemon, generation: int = 1, rank: int = 0) -> None:
    from_log = lambda: "up" in daemon.rank_log(generation, rank)  # noqa: E731 - reads better than a function here
    daemon.until("the worker's first line", from_log)


def test_environment_of_a_worker_is_torchruns(daemon, supervisor, make_job):
    daemon.start()
    job = make_job(PRINT_ENVIRONMENT, nproc=2, argv=("train.py", "--lr", "3e-4"), env={"COLOUR": "blue"})
    pids = job.start().result.pids
    seen = {}
    for rank in (0, 1):
        assert supervisor.exit_of(rank).exit_code == 0
        seen[rank] = json.loads(daemon.rank_log(1, rank))
        assert seen[rank]["group"] == [pids[str(rank)]] * 3
    said = seen[1]
    assert said["argv"] == ["train.py", "--lr", "3e-4"]
    assert said["cwd"] == said["path"] == str(job.workdir)
    assert said["main"] == str(job.workdir / "train.py")
    assert said["threads"] == 1
    expected = {
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1", "ROLE_RANK": "1", "ROLE_WORLD_SIZE": "2", "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "job", "OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "COLOUR": "blue", "FLYBALL_JOB": "job", "FLYBALL_GENERATION": "1", "FLYBALL_HOST_ID": "host-a",
        "FLYBALL_RESTORE_STEP": "",
    }  # fmt: skip
    assert {name: said["env"].get(name) for name in expected} == expected
    assert int(said["env"]["MASTER_PORT"]) > 0
