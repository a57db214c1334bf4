"""What `flyball ckpt` finds of a real run, during the run and after all its processes were killed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from safetensors import safe_open
from support.commands.flyball import FlyballProcess
from support.stores.checkpoint_site import CheckpointSite

SCRIPT = """
import time
import flyball, torch
job = flyball.attach()
state = {"weight": torch.zeros(50_000), "step": torch.zeros(1)}
start = job.restore(state)
for step in range(start, 1_000_000):
    state["weight"].fill_(step)
    state["step"].fill_(step)
    job.step(step)
    job.save(step, state)
    time.sleep(0.1)  # the test reads what is in memory
"""


class Run(FlyballProcess):
    """`flyball run` with two ranks, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.site = site = CheckpointSite(folder / "site", hosts=())
        (folder / "train.py").write_text(SCRIPT)
        flags = ("--job", "tiny", "--nproc-per-node", "2", "--local-ckpt-dir", "disk", "--local-ckpt-interval", "5")
        where = {"FLYBALL_STATE_DIR": str(site.state), "FLYBALL_SHM_DIR": str(site.shm)}
        super().__init__(folder, "run", *flags, str(folder / "train.py"), cwd=site.root, **where)


@pytest.fixture
def run() -> Iterator[Run]:
    with tempfile.TemporaryDirectory(prefix="fb-") as name:  # short: it contains sockets
        started = Run(Path(name))
        try:
            yield started
        finally:
            started.kill_everything()


def test_a_run_is_seen_alive_and_after_it_was_killed(run: Run) -> None:
    site = run.site

    def listed() -> dict[str, object]:
        code, out, _ = site.call("ls", "-o", "json")
        return msgspec.json.decode(out, type=dict[str, object]) if code == 0 else {}

    def tiers() -> set[str]:
        return {t["tier"] for s in listed().get("steps", []) if s["complete"] for t in s["tiers"]}  # type: ignore[attr-defined]

    run.wait_for(lambda: {"memory", "disk"} <= tiers(), "a step in memory and on disk")
    refused, _, err = site.call("rm", "--memory", "--yes", "--force")
    assert (refused, "in use" in err) == (16, True)
    (supervisor,) = site.state.glob("jobs/tiny/supervisor")
    url = msgspec.json.decode((supervisor / "supervisor.json").read_bytes())["url"]

    def origins() -> list[str]:
        """What the supervisor knows. Slots may have been overwritten while they were listed: then they have no common
        step for once, and the newest one is on disk."""
        code, out, _ = site.call("plan", "latest", "--supervisor", url, "-o", "json")
        planned = msgspec.json.decode(out) if code == 0 else {"shards": []}
        return [shard["sources"][0]["origin"] for shard in planned["shards"]]

    run.wait_for(lambda: origins() == ["local_slot", "local_slot"], "a plan that takes both ranks from their slots")

    run.kill_everything()
    found = site.json("ls")
    assert all(0.0 <= step["age_s"] < 600.0 for step in found["steps"])
    point = found["recovery_point"]
    verified = site.json("verify", "--all")
    assert (verified["bad"], verified["gone"]) == (0, 0)
    restored = site.json("restore", "latest", "--to", "out")
    assert [s["source"]["tier"] for s in restored["shards"]] == ["memory", "memory"]
    for shard in restored["shards"]:
        with safe_open(shard["path"], "np") as file:
            assert set(file.get_tensor("weight").tolist()) == set(file.get_tensor("step").tolist()) == {float(point)}
    site.json("rm", "--memory", "--yes", "--force")
    assert [path for path in site.shm.iterdir() if not path.name.endswith((".beacon", ".seen", ".stacks"))] == []
    rest = site.json("ls")
    assert {t["tier"] for s in rest["steps"] for t in s["tiers"]} == {"disk"}
    # Mostly a multiple of 5: a later step takes the place of one for which the disk was still busy.
    assert 0 <= rest["recovery_point"] <= point
