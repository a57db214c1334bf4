"""What `flyball run` starts when: what takes longest begins first, and what fails later leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from flyball.contracts.errors import ConfigurationError
from flyball.contracts.on_host.segments import DEFAULT_SHM_DIR, shm_prefix
from host_daemon.kernel.reaper import Reaper
from host_daemon.spawning.spawn_wire import WorkerOrder
from host_daemon.spawning.spawner_client import SpawnerProcess
from host_daemon.spawning.spawner_start import start_spawner
from host_daemon.workers.worker_environment import expected_environment

DEADLINE_S = 240.0
HEAVY = ("fastapi", "sqlalchemy", "uvicorn", "httpx", "structlog", "services.main")

RUN = """
import sys
from flyball.cli import main
from flyball.cli.run import host_process
start = host_process.HostProcess.start

def noted(process):
    print("imported before the daemon:", sorted(set(sys.modules) & set(%r)), flush=True)
    start(process)

host_process.HostProcess.start = noted
sys.exit(main.run_cli(["run", *sys.argv[1:]]))
"""

DAEMON = """
import json, sys
import host_daemon.__main__ as daemon
from flyball.contracts.errors import FlyballError

def noted(**_):
    print(json.dumps(sorted({"asyncio", "structlog", "httpx", "host_daemon.agent"} & set(sys.modules))))
    raise FlyballError("This is as far as it goes.")

daemon.start_spawner = noted
sys.exit(daemon.main())
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder whose path leaves room for sockets inside it."""
    with TemporaryDirectory(prefix="fb-") as folder:
        yield Path(folder).resolve()


def start(program: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", program, *map(str, arguments)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def processes_of(folder: Path) -> list[list[str]]:
    """Command lines that name the folder."""
    found = [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
    return [words for words in found if any(str(folder) in word for word in words)]


def test_the_daemon_starts_before_the_supervisor_is_imported(place: Path) -> None:
    (place / "train.py").write_text("print('trained', flush=True)\n")
    done = start(RUN % (HEAVY,), "--state-dir", place / "state", place / "train.py")
    assert done.returncode == 0, done.stderr
    assert "imported before the daemon: []" in done.stdout
    assert "trained" in done.stdout
    assert processes_of(place) == []


def test_a_supervisor_that_cannot_start_ends_the_daemon_and_says_why(place: Path) -> None:
    (place / "train.py").touch()
    state = place / "state"
    done = start(RUN % (HEAVY,), "--state-dir", state, place / "train.py", FLYBALL_LOG_LEVEL="shout")
    assert done.returncode == ConfigurationError.exit_code
    assert "imported before the daemon: []" in done.stdout  # so it had been started
    assert "log_level" in done.stderr
    assert "Next step:" in done.stderr
    assert processes_of(place) == []
    segments = Path(shm_prefix(str(state / "host"), DEFAULT_SHM_DIR))
    assert list(segments.parent.glob(f"{segments.name}.*")) == []


def test_a_folder_in_use_is_refused_before_anything_is_started(place: Path) -> None:
    """Else the end of this run would end the processes of the other one."""
    (place / "train.py").touch()
    holder = subprocess.Popen(
        [
            *(sys.executable, "-P", "-c"),
            "import sys, pathlib\nfrom services.runtime.claim import Claim\n"
            "claim = Claim(pathlib.Path(sys.argv[1]), host='127.0.0.1', port=0)\nprint('held', flush=True)\ninput()",
            str(place / "state" / "supervisor"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        done = start(RUN % (HEAVY,), "--state-dir", place / "state", place / "train.py")
        assert done.returncode == ConfigurationError.exit_code
        assert "Another supervisor" in done.stderr
        assert "imported before" not in done.stdout
        assert holder.poll() is None
    finally:
        holder.communicate("\n", timeout=DEADLINE_S)


def test_the_daemon_starts_its_standby_before_it_imports_its_own_parts(place: Path) -> None:
    (place / "token").write_text("t" * 32)
    done = start(
        DAEMON,
        *("--state-dir", place / "host", "--host-id", "h", "--supervisor", "http://127.0.0.1:9"),
        *("--token-file", place / "token", "--warm-nproc", "2"),
    )
    assert done.stderr == "error: This is as far as it goes.\n"
    assert json.loads(done.stdout) == []


def test_what_a_start_need_not_wait_for_is_imported_while_the_standby_is_idle(place: Path) -> None:
    script = place / "look.py"
    script.write_text("import sys\nprint('torch' in sys.modules, 'torch._dynamo' in sys.modules)\n")
    environment = expected_environment(os.environ, 1)

    async def look(spawner: SpawnerProcess, number: int) -> str:
        log = place / f"{number}.log"
        process = await spawner.spawn(
            WorkerOrder("job", 1, 0, (str(script),), False, str(place), environment, str(log))
        )
        process.permit()
        await asyncio.wait_for(process.exit_status, DEADLINE_S)
        return log.read_text()

    async def main() -> list[str]:
        reaper = Reaper()
        reaper.start()
        started = start_spawner(environment=environment, log_path=place / "spawner.log", state_dir=place)
        spawner = await SpawnerProcess.of(started, reaper)
        try:
            assert await spawner.unfit() == ""
            seen = [await look(spawner, 0)]
            deadline_s = time.monotonic() + DEADLINE_S
            while seen[-1] != "True True\n" and time.monotonic() < deadline_s:
                await asyncio.sleep(3.0)  # it is idle for so long
                seen.append(await look(spawner, len(seen)))
            return seen
        finally:
            spawner.close()
            await spawner.wait_dead()
            reaper.stop()

    seen = asyncio.run(main())
    assert (seen[0], seen[-1]) == ("True False\n", "True True\n")
