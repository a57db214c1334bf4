"""The demo's uninterrupted run is ended early."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from flyball.cli.demo import reference as demo_reference

DEAF = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(sys.argv[1], str(time.monotonic_ns())).touch()
time.sleep(600)
"""


def test_workers_that_ignore_sigterm_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_reference, "STOP_TIMEOUT_S", 2.0)
    script = tmp_path / "deaf.py"
    script.write_text(DEAF)
    deaf = tmp_path / "deaf"
    deaf.mkdir()

    def look() -> None:
        if len(list(deaf.iterdir())) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo_reference.run_reference(
            script, (str(deaf),), world_size=2, log_file=tmp_path / "log", deadline_s=300, on_wait=look
        )
    left = [p for p in psutil.process_iter(["cmdline"]) if str(script) in (p.info["cmdline"] or ())]
    alive = psutil.wait_procs(left, timeout=60)[1]
    for process in alive:
        process.kill()
    assert alive == []
