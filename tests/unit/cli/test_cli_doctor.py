"""`flyball doctor`: each thing that a host can lack is one line with what mends it, and never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands.here import run_here
from support.commands.left_runs import left
from support.hosts.rdma import EMPTY, IPV4, LINK_LOCAL, V1, V2, add_port, add_stack, with_low_memlock

from ckpt_engine.peers.transport.rdma import verbs
from ckpt_engine.peers.transport.rdma.verbs import RdmaUnavailable
from flyball.cli.doctor import rdma_checks
from flyball.cli.doctor.findings import Check, CheckedHost, Finding, Level, exit_code, findings, ok
from flyball.cli.doctor.fix_rdma import link_pyverbs
from flyball.contracts.errors import ConfigurationError, NotFound

ROOT = Path(__file__).resolve().parents[3]
OURS = sysconfig.get_config_var("EXT_SUFFIX")
RDMA_CHECKS = (Check("rdma devices", rdma_checks.devices), Check("rdma ports", rdma_checks.ports))
no_stack_here = pytest.mark.skipif(Path("/sys/class/infiniband").exists(), reason="this machine has an RDMA stack")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    base = {k: v for k, v in os.environ.items() if not k.startswith("FLYBALL_")}
    return base | {"FLYBALL_STATE_DIR": str(tmp_path / "state")}


@pytest.fixture
def fresh_pyverbs() -> Iterator[None]:
    verbs.load_pyverbs.cache_clear()
    yield
    verbs.load_pyverbs.cache_clear()


ALL_BUT_TORCH = (  # its import takes seconds
    *("python", "settings", "shared memory", "state folder", "open files", "clock", "stacks", "cgroup", "loopback"),
    *("host name", "port", "supervisor", "database", "probes", "pyverbs", "rdma devices", "rdma ports", "memlock"),
)


def reported(environment: dict[str, str], *subjects: str, **more: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code, and the findings by subject."""
    done = run_here("doctor", *subjects, "-o", "json", environment=environment | more)
    found = json.loads(done.stdout)
    assert done.returncode == found["exit_code"]
    return done.returncode, {finding["subject"]: finding for finding in found["findings"]}


def of_rdma(root: Path, **environ: str) -> list[Finding]:
    return list(findings(RDMA_CHECKS, CheckedHost(environ, sysfs=root)))


@no_stack_here
def test_a_host_without_an_rdma_stack_is_told_so_and_uses_tcp(environment: dict[str, str]) -> None:
    code, found = reported(environment, *ALL_BUT_TORCH)

    assert code == 0
    assert found["rdma devices"]["detail"].startswith("not available here: The kernel has no RDMA stack")
    assert found["pyverbs"]["level"] == "ok"
    assert {found[name]["level"] for name in ("python", "settings", "loopback", "state folder", "memlock")} == {"ok"}
    assert found["supervisor"]["detail"].startswith("not available here: FLYBALL_SUPERVISOR names none")
    assert found["database"]["detail"].startswith("not available here: FLYBALL_DATABASE_URL names none")
    assert found.keys() >= {"open files", "clock", "stacks", "cgroup", "host name", "port", "probe gpu"}
    assert not found.keys() & {"rdma ports", "rdma write"}


@no_stack_here
def test_where_rdma_is_required_a_host_without_it_is_an_error(environment: dict[str, str]) -> None:
    code, found = reported(environment, "rdma devices", FLYBALL_CKPT_TRANSPORT="rdma")

    assert (code, found["rdma devices"]["level"]) == (3, "error")


def test_the_report_for_people_has_a_line_per_finding_and_a_sum(environment: dict[str, str]) -> None:
    done = run_here(*("doctor", "settings", "shared memory"), environment=environment | {"FLYBALL_SHM_DIR": "/nowhere"})

    lines = done.stdout.splitlines()
    assert done.returncode == 3
    assert lines[1] == "error    shared memory    /nowhere is not a folder that this user can write to."
    assert lines[2].strip() == "Next step: mount a tmpfs there, or set FLYBALL_SHM_DIR"
    assert lines[3:] == ["1 ok, 0 warnings, 1 errors"]


def test_a_state_folder_that_cannot_be_made_is_an_error(environment: dict[str, str]) -> None:
    code, found = reported(environment, "state folder", FLYBALL_STATE_DIR="/proc/nowhere")

    assert (code, found["state folder"]["level"]) == (3, "error")
    assert "FLYBALL_STATE_DIR" in found["state folder"]["mend"]


def test_looking_makes_no_state_folder(environment: dict[str, str], tmp_path: Path) -> None:
    reported(environment, "state folder", "port", "probes")

    assert list(tmp_path.iterdir()) == []


def test_a_misspelt_setting_is_an_error_that_names_the_right_one(environment: dict[str, str]) -> None:
    code, found = reported(environment, "settings", FLYBALL_CKPT_TRANSPROT="rdma")

    assert (code, found["settings"]["level"]) == (3, "error")
    assert "FLYBALL_CKPT_TRANSPORT" in found["settings"]["mend"]


def test_a_configured_database_is_asked(environment: dict[str, str], tmp_path: Path) -> None:
    folder = left(tmp_path / "state", "llama", at=1000.0) / "supervisor"

    code, found = reported(environment, "database", FLYBALL_DATABASE_URL=f"sqlite:///{folder / 'flyball.sqlite'}")
    missing_code, missing = reported(environment, "database", FLYBALL_DATABASE_URL="sqlite:////nowhere/flyball.sqlite")

    assert (code, found["database"]["level"]) == (0, "ok")
    assert (missing_code, missing["database"]["level"]) == (8, "error")


def test_a_configured_supervisor_that_does_not_answer_is_an_error(environment: dict[str, str]) -> None:
    code, found = reported(environment, "supervisor", FLYBALL_SUPERVISOR="http://127.0.0.1:9", FLYBALL_TOKEN="secret")

    assert (code, found["supervisor"]["level"]) == (10, "error")


def test_a_check_that_does_not_exist_is_refused_with_those_that_do(environment: dict[str, str]) -> None:
    done = run_here("doctor", "torhc", environment=environment)

    assert done.returncode == 2
    assert "There is no check 'torhc'." in done.stderr and "python, torch, settings" in done.stderr


def test_a_check_that_hangs_is_given_up_and_the_others_run() -> None:
    ends = threading.Event()

    def hangs(_: CheckedHost) -> Iterator[Finding]:
        ends.wait()
        yield from ()

    def fine(_: CheckedHost) -> Iterator[Finding]:
        yield ok("fine", "it is")

    found = list(findings((Check("disk", hangs, deadline_s=0.05), Check("fine", fine)), CheckedHost({})))
    ends.set()

    assert [(one.subject, one.level) for one in found] == [("disk", Level.ERROR), ("fine", Level.OK)]
    assert (found[0].detail, found[0].exit_code) == ("The check has not ended within 0.05 s.", 10)


def test_a_check_that_breaks_is_an_error_and_the_others_run() -> None:
    def breaks(_: CheckedHost) -> Iterator[Finding]:
        yield ok("disk", "so far")
        raise IndexError("list index out of range")

    found = list(
        findings((Check("disk", breaks), Check("fine", lambda _: iter([ok("fine", "it is")]))), CheckedHost({}))
    )

    assert [(one.subject, one.level) for one in found] == [
        ("disk", Level.OK),
        ("disk", Level.ERROR),
        ("fine", Level.OK),
    ]
    assert "list index out of range" in found[1].detail and exit_code(found)


def test_the_exit_code_is_that_of_the_first_error() -> None:
    found = [
        Finding("a", Level.WARNING, "missing", "mend it"),
        Finding("b", Level.ERROR, "too small", "enlarge it", 7),
        Finding("c", Level.ERROR, "wrong", "correct it", 3),
    ]

    assert exit_code(found) == 7
    assert exit_code(found[:1]) == 0


def test_a_stack_without_a_device_is_told_apart_from_none(tmp_path: Path) -> None:
    (found,) = of_rdma(add_stack(tmp_path))

    assert (found.level, found.detail) == (Level.WARNING, "The kernel has an RDMA stack, but no RDMA device.")


def test_a_port_that_is_down_is_named_with_the_command_that_sets_it_up(tmp_path: Path) -> None:
    device, port = of_rdma(add_port(tmp_path, "rxe0", state="1: DOWN", interface="eth3"))

    assert (device.level, device.detail) == (Level.OK, "rxe0")
    assert (port.level, port.detail) == (Level.WARNING, "No RDMA port is active: rxe0/1 is DOWN.")
    assert port.mend.startswith("ip link set eth3 up")


def test_one_port_down_beside_an_active_one_is_a_warning_even_where_rdma_is_required(tmp_path: Path) -> None:
    add_port(tmp_path, "mlx5_0", numa_node="1")
    add_port(tmp_path, "mlx5_1", state="1: DOWN")

    _, active, gid, down = of_rdma(tmp_path, FLYBALL_CKPT_TRANSPORT="rdma")

    assert (active.level, active.detail) == (Level.OK, "mlx5_0/1 is ACTIVE (Ethernet, interface eth0, NUMA node 1)")
    assert (gid.level, gid.detail) == (Level.OK, "mlx5_0/1: GID 3, RoCE v2, 10.0.0.2")
    assert (down.level, down.detail) == (Level.WARNING, "mlx5_1/1 is DOWN")


def test_only_devices_that_may_be_used_are_looked_at_and_a_wrong_name_is_a_warning(tmp_path: Path) -> None:
    add_port(tmp_path, "mlx5_0", state="1: DOWN")
    add_port(tmp_path, "mlx5_1")

    devices, unknown, port, _ = of_rdma(tmp_path, FLYBALL_CKPT_RDMA_DEVICES="mlx5_1,mlx5_7")

    assert (devices.level, devices.detail) == (Level.OK, "mlx5_0, mlx5_1")
    assert (unknown.level, unknown.detail.split(",")[0]) == (
        Level.WARNING,
        "FLYBALL_CKPT_RDMA_DEVICES names mlx5_7",
    )
    assert port.detail.startswith("mlx5_1/1 is ACTIVE")


def test_if_no_device_that_may_be_used_is_there_rdma_is_not_possible(tmp_path: Path) -> None:
    environ = {"FLYBALL_CKPT_RDMA_DEVICES": "mlx5_7", "FLYBALL_CKPT_TRANSPORT": "rdma"}

    _, none = of_rdma(add_port(tmp_path, "mlx5_0"), **environ)

    assert (none.level, none.mend) == (Level.ERROR, "correct FLYBALL_CKPT_RDMA_DEVICES; this host has mlx5_0")


@pytest.mark.parametrize("gids", [((EMPTY, ""),), ((LINK_LOCAL, V1), (IPV4, V1))])
def test_an_active_port_without_a_gid_to_use_wants_an_address(
    tmp_path: Path, gids: tuple[tuple[str, str], ...]
) -> None:
    *_, gid = of_rdma(add_port(tmp_path, "rxe0", gids=gids))

    assert (gid.level, gid.mend) == (Level.WARNING, "ip addr add IP/BITS dev eth0")


@pytest.mark.processes
def test_too_low_a_memlock_limit_is_told_apart(tmp_path: Path) -> None:
    add_port(tmp_path, "rxe0", gids=((LINK_LOCAL, V1), (LINK_LOCAL, V2)))
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from flyball.cli.doctor.findings import CheckedHost\nfrom flyball.cli.doctor.rdma_checks import memlock\n"
        "print(*memlock(CheckedHost({}, Path(sys.argv[1]))))"
    )

    done = subprocess.run(
        [*with_low_memlock(64 << 10), "-c", code, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip

    assert "'warning'" in done.stdout and "may lock 64 KiB of memory" in done.stdout
    assert "ulimit -l unlimited" in done.stdout


@pytest.mark.usefixtures("fresh_pyverbs")
@pytest.mark.skipif(verbs.is_importable(), reason="pyverbs is there")
class TestLinkingPyverbs:
    def test_without_the_package_it_names_the_one_to_install(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound) as raised:
            link_pyverbs(tmp_path / "pyverbs", tmp_path)

        assert "apt install python3-pyverbs ibverbs-providers" in raised.value.hint

    def test_a_package_of_another_python_is_not_linked(self, tmp_path: Path) -> None:
        package, site = _package(tmp_path, ".cpython-27-x86_64-linux-gnu.so")

        with pytest.raises(ConfigurationError, match=r"built for another Python \(\.?cpython-27"):
            link_pyverbs(package, site)

        assert list(site.iterdir()) == []

    def test_a_package_that_cannot_be_loaded_is_not_left_linked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package, site = _package(tmp_path, OURS)
        monkeypatch.setattr(sys, "path", [*sys.path, str(site)])

        with pytest.raises(RdmaUnavailable, match="installed, but"):
            link_pyverbs(package, site)

        assert list(site.iterdir()) == []

    def test_a_broken_folder_of_that_name_is_left_alone(self, tmp_path: Path) -> None:
        package, site = _package(tmp_path, OURS)
        (site / "pyverbs").mkdir()

        with pytest.raises(ConfigurationError, match="there already"):
            link_pyverbs(package, site)

        assert not (site / "pyverbs").is_symlink()

    def test_the_command_says_what_to_install(self, environment: dict[str, str]) -> None:
        if Path("/usr/lib/python3/dist-packages/pyverbs").exists():
            pytest.skip("the package is installed")

        done = run_here("doctor", "--fix", "rdma", environment=environment)

        assert done.returncode == NotFound.exit_code
        assert "apt install python3-pyverbs" in done.stderr
        assert "Traceback" not in done.stderr


def _package(tmp_path: Path, suffix: str) -> tuple[Path, Path]:
    """A folder like Debian's, with modules that no Python can load, and an environment's folder of packages."""
    package, site = tmp_path / "dist-packages" / "pyverbs", tmp_path / "site"
    package.mkdir(parents=True)
    site.mkdir()
    (package / "__init__.py").touch()
    for name in ("enums", "device"):
        (package / f"{name}{suffix}").touch()
    return package, site
