"""What the documentation says of defaults, flags, variables and exit codes is what the code has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.documentation import ROOT, pages

from flyball.cli.commands import as_click
from flyball.cli.main import BUG, INTERRUPTED
from flyball.contracts.errors import FlyballError
from flyball.launch.launch_flags import ALL_FLAGS
from flyball.layered_settings import VARIABLES, unread_variables
from host_daemon.settings import URL_FLAGS, VALUE_FLAGS
from services.settings import ENV_PREFIX, FROM_FILES, Settings
from simulator.swarm.verdicts import EXIT_CODES

PRODUCT = ("flyball", "services", "host_daemon", "ckpt_engine", "goodput", "simulator")
CONFIGURATION = (ROOT / "docs" / "reference" / "configuration.md").read_text()
PAGES = pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)


@cache
def sources(*folders: str) -> str:
    return "\n".join(path.read_text() for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))


def options(command: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - click's
    for parameter in command.params:
        yield from ((name, parameter.default) for name in (*parameter.opts, *parameter.secondary_opts))
    for below in getattr(command, "commands", {}).values():
        yield from options(below)


def subclasses(kind: type[FlyballError]) -> Iterator[type[FlyballError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from subclasses(below)


OPTIONS = tuple(options(as_click()))
CODES = {kind.exit_code for kind in subclasses(FlyballError)} | set(EXIT_CODES.values())


def test_the_variables_that_are_known_are_those_that_something_reads() -> None:
    fields = {name.upper() for name in Settings.model_fields} | {f"{name.upper()}_FILE" for name in FROM_FILES}
    daemon = {name.upper().replace("-", "_") for name, _ in (*URL_FLAGS, *VALUE_FLAGS)}
    read = set(re.findall(rf'"{ENV_PREFIX}([A-Z_]+[A-Z])"', sources(*PRODUCT)))
    assert set(VARIABLES) == {name for name in fields | daemon | read if not name.startswith("CKPT_")}


def test_a_variable_that_nothing_reads_is_named_with_the_nearest() -> None:
    given = ("FLYBALL_PORTT", "FLYBALL_XYZZY", "FLYBALL_PORT", "FLYBALL_POLICY__REFILL_STEPS", "PATH")
    assert unread_variables(given) == [
        "FLYBALL_PORTT: not used: did you mean FLYBALL_PORT?",
        "FLYBALL_XYZZY: not used: no part reads it",
    ]


@pytest.mark.parametrize("page", [page for page in pages() if page.stem != "upgrading"], ids=lambda page: page.stem)
def test_a_variable_that_a_page_names_is_read(page: Path) -> None:
    """By a part, or by what developers run."""
    named = set(re.findall(r"FLYBALL_[A-Z_]+[A-Z]\b(?!\.\.\.)", page.read_text()))
    wrong = unread_variables(name for name in named if not re.fullmatch(r"FLYBALL_(POLICY|DETECTOR|RETENTION)", name))
    others = sources("tests", "deploy", "benchmarks") + (ROOT / "Makefile").read_text()
    assert [line for line in wrong if f"{line.partition(':')[0]}" not in others] == []


@pytest.mark.parametrize("page", [page for page in pages() if page.stem != "coming-from"], ids=lambda page: page.stem)
def test_a_flag_that_a_page_names_exists(page: Path) -> None:
    """Of ours, of torchrun and the launchers that a page compares with, or of a script in the repository."""
    known = {name for name, _ in OPTIONS} | {name for flag in ALL_FLAGS for name in flag.spellings}
    known |= {f"--{name}" for name, _ in (*URL_FLAGS, *VALUE_FLAGS)} | set(OF_OTHER_PROGRAMS)
    named = set(re.findall(r"`(--[a-z][a-z0-9-]+)", page.read_text()))
    others = sources("benchmarks", "deploy", "examples", "services", "host_daemon", "simulator", "tests")
    assert sorted(name for name in named - known if f'"{name}"' not in others) == []


OF_OTHER_PROGRAMS = (  # Slurm's, docker's, pytest's, torchft's, Megatron's
    *("--no-kill", "--kill-on-bad-exit", "--signal", "--requeue", "--open-mode", "--shm-size", "--ulimit", "--volumes"),
    *("--hypothesis-profile", "--heartbeat", "--log-interval"),
)


@PAGES
def test_a_default_that_a_page_names_is_the_codes(page: Path) -> None:
    """`setting` (10 s), `--flag` (10 s), and the rows of tables: | `setting` | 10 | meaning |."""
    defaults: dict[str, set[str]] = {}  # of a setting by its name, of a flag by its own
    for name, said in re.findall(r"^\| `(?:--)?([\w-]+)` \| ([^|]+?) \|", CONFIGURATION, re.MULTILINE):
        defaults.setdefault(name, set()).add(said)
    for name, value in OPTIONS:
        said = f"{value:g}" if isinstance(value, int | float) else str(value).rstrip("smhd")
        defaults.setdefault(name, set()).add(said)
    text = page.read_text()
    named = re.findall(r"`((?:--)?[a-z][\w-]+)` ?\((?:default:? )?([\d.,]*\d)", text)
    named += re.findall(r"^\| `((?:--)?[a-z][\w-]+)`[^|]*\| ([\d.,]*\d|on|off|none) \|", text, re.MULTILINE)
    for name, value in named:
        setting = name.removeprefix("--")
        known = {one for key in (name, setting, setting.replace("-", "_")) for one in defaults.get(key, ())}
        assert not known or value.replace(",", "") in known, f"`{name}` is {known}, not {value}"


@PAGES
def test_an_exit_code_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(r"(?:exit code|exit status|exits with|exits with code|ends with code) (\d+)", page.read_text())
    assert {int(code) for code in named} <= CODES | {0, 1, BUG, INTERRUPTED, 129, 138, 143}


def test_the_table_of_exit_codes_has_all() -> None:
    cli = (ROOT / "docs" / "reference" / "cli.md").read_text()
    table = {int(code) for code in re.findall(r"^\| (\d+) \|", cli.partition("## Exit codes")[2], re.MULTILINE)}
    table |= set(range(20, 25)) if "| 20 to 24 |" in cli else set()
    assert table == (CODES - set(EXIT_CODES.values())) | {0, 1, BUG}


def needed_by(name: str, found: set[str]) -> set[str]:
    """What pip installs for a package here, itself included."""
    if name not in found:
        found.add(name)
        for line in requires(name) or ():
            wanted = Requirement(line)
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                needed_by(canonicalize_name(wanted.name), found)
    return found


def test_the_packages_that_the_readme_counts() -> None:
    readme = (ROOT / "README.md").read_text()
    [count] = re.findall(r"adds (\d+) packages", readme)
    found = needed_by("flyball", set()) - needed_by("torch", set())
    assert abs(len(found) - int(count)) <= 2, "another Python may need one more or less"
