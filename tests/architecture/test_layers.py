"""The layout is the architecture: who imports whom, and what a training process carries with it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WHAT_USERS_IMPORT = {"flyball": ["flyball/__init__.py"], "ckpt_engine": ["ckpt_engine/dcp/__init__.py"]}
PACKAGES = ("flyball", "services", "host_daemon", "ckpt_engine", "goodput", "simulator")


def modules_after(statement: str) -> set[str]:
    """Names in sys.modules of a fresh interpreter that ran `statement`."""
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.split())


def test_import_contracts_hold() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([str(linter)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_init_files_are_empty(package: str) -> None:
    full = [str(p.relative_to(ROOT)) for p in (ROOT / package).rglob("__init__.py") if p.read_text().strip()]
    assert full == WHAT_USERS_IMPORT.get(package, [])


def test_a_class_name_stands_for_one_class() -> None:
    places: dict[str, list[str]] = {}
    for path in (path for folder in PACKAGES for path in sorted((ROOT / folder).rglob("*.py"))):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_one_place_has_msgspec_look_at_a_type() -> None:
    """Elsewhere two threads may do so at once: see flyball.contracts.wire.decoder_of."""
    elsewhere = []
    for path in (path for folder in (*PACKAGES, "benchmarks") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                is_typed = name.endswith(".decode") and any(k.arg == "type" for k in node.keywords)
                if is_typed or name.endswith(".Decoder") or name == "msgspec.convert":
                    elsewhere.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert all(line.startswith("flyball/contracts/wire.py:") for line in elsewhere), elsewhere
    assert len(elsewhere) == 3, "the test looks for what there is"


@pytest.mark.processes
def test_importing_flyball_is_cheap() -> None:
    loaded = modules_after("import flyball")
    assert not loaded & {"torch", "msgspec", "numpy", "sqlalchemy", "fastapi"}


@pytest.mark.processes
def test_a_training_process_carries_only_flyball_and_the_engine() -> None:
    loaded = modules_after("import flyball; flyball.attach")
    ours = {name.split(".")[0] for name in loaded} & set(PACKAGES)
    assert ours <= {"flyball", "ckpt_engine"}
    assert "flyball.cli" not in loaded


@pytest.mark.processes
@pytest.mark.parametrize(
    "module", ["ckpt_engine.host.server", "host_daemon.agent", "services.main", "goodput.calculator"]
)
def test_no_torch_outside_the_trainer(module: str) -> None:
    assert "torch" not in modules_after(f"import {module}")


def test_mutation_testing_covers_the_files_and_tests_that_it_names() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]
    assert [pattern for pattern in settings["only_mutate"] if not any(ROOT.glob(pattern))] == []
    arguments = settings["pytest_add_cli_args"]
    words = set(re.findall(r"\w+", arguments[arguments.index("-k") + 1])) - {"and", "or", "not"}
    tests = [path.name for room in ("unit", "property") for path in (ROOT / "tests" / room).rglob("test_*.py")]
    assert {word for word in words if not any(word in name for name in tests)} == set()
