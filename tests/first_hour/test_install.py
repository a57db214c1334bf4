"""pip install: the wheel is complete, and leaves the user's environment unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.commands.users_machine import ROOT, Installation, User

PACKAGES = ("flyball", "services", "host_daemon", "ckpt_engine", "goodput", "simulator")
DEVELOPERS_TOOLS = {"pytest", "mypy", "ruff", "hypothesis", "import-linter", "moto", "schemathesis"}

TRAIN = """
import os, torch, torch.distributed as dist, flyball

dist.init_process_group("gloo")
job = flyball.attach()
weight = torch.zeros(4)
for step in range(job.restore({"weight": weight}), 20):
    dist.all_reduce(weight.add_(1))
    job.step(step, loss=weight.sum())
    job.save(step, {"weight": weight})
if job.rank == 0:
    print("flyball from", flyball.__file__, "in", os.getcwd())
job.close()
dist.barrier()
dist.destroy_process_group()
"""


def test_the_wheel_has_every_file_of_the_packages(installation: Installation) -> None:
    """Migrations, templates, the page's scripts, markers for type checkers, the example that the demo runs."""
    tracked = subprocess.run(
        ["git", "ls-files", *PACKAGES, "examples/train_gpt.py"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    expected = {name if not name.startswith("examples/") else f"flyball/{name}" for name in tracked}
    assert len(expected) > 400
    assert expected - set(zipfile.ZipFile(installation.wheel).namelist()) == set()


def test_a_job_runs_from_the_wheel_in_another_folder(user: User) -> None:
    user.script("train.py", TRAIN)
    output = user.run("flyball run --nproc-per-node 2 train.py")
    place = user.installation.site_packages / "flyball" / "__init__.py"
    assert f"flyball from {place} in {user.work}" in output
    assert "succeeded" in output


def test_every_package_comes_from_the_wheel(user: User) -> None:
    code = f"import json; print(json.dumps([__import__(name).__file__ for name in {PACKAGES}]))"
    done = subprocess.run(
        [user.installation.python, "-c", code], cwd=user.work, env=user.environment(), capture_output=True, check=True
    )
    site_packages = user.installation.site_packages
    assert json.loads(done.stdout) == [str(site_packages / name / "__init__.py") for name in PACKAGES]


def test_torch_is_unchanged_and_no_developer_tool_is_installed(installation: Installation) -> None:
    if not installation.full:
        pytest.skip("only an installation of everything shows it: make first-hour")
    listed = subprocess.run(
        [installation.python, "-m", "pip", "list", "--format", "json"], capture_output=True, check=True, timeout=60
    )
    assert {package["name"].lower() for package in json.loads(listed.stdout)} & DEVELOPERS_TOOLS == set()
    assert installation.torch_untouched
    command = [installation.python, "-m", "pip", "check"]
    checked = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout


def test_a_failed_set_up_prints_the_reason(tmp_path: Path) -> None:
    """The first step of `make demo`, without network access."""
    nowhere = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        [sys.executable, str(ROOT / "deploy" / "set_up_venv.py"), str(tmp_path / "venv")],
        env={**os.environ, **nowhere},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "[1/3] virtual environment  done" in done.stdout
    assert "[2/3] PyTorch  FAILED" in done.stdout
    assert "ERROR: " in done.stderr
    assert "torch==2.13.0" in done.stderr
    assert "Next step: " in done.stderr
