"""What the commands of a job print: each thing once, at the time at which it happens."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands.flyball import FlyballProcess
from support.servers.own_servers import free_port

SECRET = "0123456789abcdef0123456789abcdef"

FAILS_ONCE = """
import os, sys, time, flyball
job = flyball.attach()
rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for step in range(20):
    print(f"rank {rank} step {step} start {restarts}", flush=True)
    job.step(step)
    time.sleep(0.05)
    if (rank, restarts, step) == (1, 0, 10):
        sys.exit(7)
job.close()
"""


def test_with_spares_each_line_and_each_decision_is_in_a_batch_jobs_output_once(place: Path) -> None:
    (place / "train.py").write_text(FAILS_ONCE)
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "once")
    line = ("run", "--nnodes", "2", "--nproc-per-node", "1", "--spares", "1", *where, "train.py")
    nodes = [FlyballProcess(place, *line, FLYBALL_TOKEN=SECRET) for _ in range(3)]
    assert [node.end() for node in nodes] == [0, 0, 0], "".join(node.text for node in nodes)
    text = "".join(node.text for node in nodes)
    for rank in (0, 1):
        assert text.count(f"rank {rank} step 19 start 1\n") == 1, text
        assert text.count(f"rank {rank} step 5 start 0\n") == 1, text
    assert text.count(" restart_in_place at ") == 1, text


UNFINISHED = """
import os, sys, time
print(f"OUT-{os.environ['RANK']}.", end="")
sys.stderr.write(f"ERR-{os.environ['RANK']}.")
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
sys.stdout.write(f"LAST-{os.environ['RANK']}.")
os._exit(0) if os.environ["RANK"] == "0" else os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("streams", [(), ("--redirects", "0", "--tee", "2")])
def test_text_without_a_line_end_is_shown_at_once_and_no_hard_end_loses_it(
    place: Path, streams: tuple[str, ...]
) -> None:
    (place / "train.py").write_text(UNFINISHED)
    words = ("--nproc-per-node", "2", "--max-restarts", "0", *streams, "train.py", str(place / "go"))
    with FlyballProcess(place, "run", *words) as run:
        run.wait_for(lambda: all(f"OUT-{rank}." in run.out for rank in (0, 1)), "what has no line end")
        (place / "go").touch()
        run.end()
        for rank in (0, 1):
            assert f"LAST-{rank}." in run.out and f"ERR-{rank}." in run.err, run.text
