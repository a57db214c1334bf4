"""What each process of Flyball must not import before it is needed: imports are most of the time that a start takes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

DEADLINE_S = 120.0
HEAVY = ("torch", "fastapi", "uvicorn", "sqlalchemy", "alembic", "plotly", "numpy", "redis", "nvidia")
SAY = "import json, sys; print('\\n' + json.dumps(sorted(sys.modules)))"


def loaded_by(program: str) -> set[str]:
    """The modules that a Python process has after this program."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{program}\n{SAY}"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def packages(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"], ["status", "--help"]])
def test_the_command_line_imports_nothing_heavy_to_print_help(arguments: list[str]) -> None:
    found = loaded_by(f"from flyball.cli.main import run_cli\nassert run_cli({arguments!r}) == 0")
    assert packages(found) & set(HEAVY) == set()


def test_run_needs_neither_typer_nor_what_that_needs() -> None:
    found = packages(loaded_by("from flyball.cli.main import run_cli\nassert run_cli(['run', '--help']) == 0"))
    assert found & set({"typer", "click", "rich", "pygments"}) == set()


@pytest.mark.parametrize("module", ["host_daemon.__main__", "ckpt_engine.host.server"])
def test_the_processes_of_a_host_import_nothing_heavy(module: str) -> None:
    found = packages(loaded_by(f"import {module}"))
    assert found & set({*HEAVY, "typer", "click", "rich", "pygments", "services"} - {"numpy"}) == set()


def test_a_supervisor_without_redis_and_pages_imports_neither_client_nor_alembic() -> None:
    found = packages(loaded_by("import services.main"))
    assert found & set({"redis", "alembic", "torch", "plotly", "pymysql", "jinja2"}) == set()


def test_lean_libraries_leave_the_extras_to_whoever_wants_them() -> None:
    program = """
from flyball.process_start import import_lean
import_lean("structlog", "httpx")
import sys
assert "rich" not in sys.modules and "httpx._main" not in sys.modules
import rich.console, httpx, structlog
assert structlog.get_logger() is not None and httpx.Client is not None
"""
    found = loaded_by(program)
    assert "rich.console" in found
    assert "httpx._main" not in found
