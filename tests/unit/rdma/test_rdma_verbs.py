"""What RDMA a host has, as sysfs tells it, and each reason why it has none."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from support.hosts.rdma import EMPTY, GLOBAL, IPV4, LINK_LOCAL, V1, V2, add_port, add_stack, with_low_memlock

from ckpt_engine.peers.transport.rdma import verbs
from ckpt_engine.peers.transport.rdma.verbs import RdmaUnavailable, Refusal

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def without_pyverbs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    verbs.load_pyverbs.cache_clear()


@pytest.fixture
def of_another_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, without_pyverbs: None) -> None:
    package = tmp_path / "packages" / "pyverbs"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "enums.cpython-27-x86_64-linux-gnu.so").touch()
    monkeypatch.setattr(sys, "path", [str(package.parent)])


def test_ports_of_all_devices_are_read_without_pyverbs(tmp_path: Path) -> None:
    add_port(tmp_path, "mlx5_10", link_layer="InfiniBand", lid="0x1f", gids=((LINK_LOCAL, V1),), numa_node="1")
    add_port(tmp_path, "mlx5_2", 1, state="1: DOWN", numa_node="-1")
    add_port(tmp_path, "mlx5_2", 2)

    down, active, infiniband = verbs.read_ports(tmp_path)

    assert [port.name for port in (down, active, infiniband)] == ["mlx5_2/1", "mlx5_2/2", "mlx5_10/1"]
    assert (down.state, down.is_active, down.numa_node) == ("DOWN", False, -1)
    assert (active.state, active.is_active, active.is_infiniband) == ("ACTIVE", True, False)
    assert (infiniband.is_infiniband, infiniband.lid, infiniband.numa_node) == (True, 31, 1)
    assert infiniband.mtu == 0, "sysfs does not tell it"


@pytest.mark.parametrize(
    ("gids", "chosen"),
    [
        (((LINK_LOCAL, V1), (LINK_LOCAL, V2), (GLOBAL, V2), (IPV4, V1), (IPV4, V2)), 4),
        (((LINK_LOCAL, V1), (LINK_LOCAL, V2), (GLOBAL, V1), (GLOBAL, V2)), 3),
        (((LINK_LOCAL, V1), (LINK_LOCAL, V2)), 1),
        (((LINK_LOCAL, V1), (IPV4, V1)), None),
        (((EMPTY, ""), (EMPTY, ""), (IPV4, V2)), 2),
        (((EMPTY, ""),), None),
        ((), None),
    ],
)
def test_over_ethernet_rocev2_with_an_ipv4_address_comes_first_and_rocev1_is_never_used(
    tmp_path: Path, gids: tuple[tuple[str, str], ...], chosen: int | None
) -> None:
    (port,) = verbs.read_ports(add_port(tmp_path, "rxe0", gids=gids))

    assert (port.gid.index if port.gid else None) == chosen


def test_over_infiniband_the_gid_is_the_ports_own(tmp_path: Path) -> None:
    gids = ((LINK_LOCAL, V1), (GLOBAL, V1))

    (port,) = verbs.read_ports(add_port(tmp_path, "mlx5_0", link_layer="InfiniBand", gids=gids))

    assert port.gid is not None
    assert (port.gid.index, port.gid.text) == (0, LINK_LOCAL)


def test_a_gid_that_appears_later_is_found_when_the_ports_are_read_again(tmp_path: Path) -> None:
    (before,) = verbs.read_ports(add_port(tmp_path, "rxe0", gids=((EMPTY, ""),)))
    (after,) = verbs.read_ports(add_port(tmp_path, "rxe0", gids=((EMPTY, ""), (IPV4, V2))))

    assert before.gid is None
    assert after.gid is not None
    assert (after.gid.is_ipv4, str(after.gid.address.ipv4_mapped)) == (True, "10.0.0.2")


def test_counters_are_numbers_by_name_and_none_once_the_device_is_gone(tmp_path: Path) -> None:
    add_port(tmp_path, "rxe0", counters={"sent_pkts": "17", "rcvd_pkts": "3", "lifespan": "10"})
    (port,) = verbs.read_ports(tmp_path)

    assert verbs.hw_counters(port, tmp_path) == {"sent_pkts": 17, "rcvd_pkts": 3}
    assert verbs.hw_counters(port, tmp_path / "gone") == {}


def test_a_kernel_without_an_rdma_stack_is_named(tmp_path: Path) -> None:
    with pytest.raises(RdmaUnavailable, match="no RDMA stack: /sys/class/infiniband does not exist") as raised:
        verbs.active_ports(tmp_path)

    assert raised.value.reason is Refusal.NO_STACK
    assert "modprobe ib_uverbs" in raised.value.hint


def test_a_stack_without_the_module_for_programs_is_named(tmp_path: Path) -> None:
    add_port(tmp_path, "rxe0")
    (tmp_path / "class" / "infiniband_verbs").rmdir()

    with pytest.raises(RdmaUnavailable, match="ib_uverbs is not loaded") as raised:
        verbs.active_ports(tmp_path)

    assert raised.value.reason is Refusal.NO_STACK


def test_a_stack_without_a_device_is_named(tmp_path: Path) -> None:
    with pytest.raises(RdmaUnavailable, match="no RDMA device") as raised:
        verbs.active_ports(add_stack(tmp_path))

    assert raised.value.reason is Refusal.NO_DEVICE
    assert "rdma link add" in raised.value.hint


def test_ports_that_are_down_are_named_with_their_states(tmp_path: Path) -> None:
    add_port(tmp_path, "rxe0", state="1: DOWN", interface="eth7")
    add_port(tmp_path, "siw0", link_layer="InfiniBand", state="2: INIT")

    with pytest.raises(RdmaUnavailable, match="rxe0/1 is DOWN, siw0/1 is INIT") as raised:
        verbs.active_ports(tmp_path)

    assert raised.value.reason is Refusal.PORT_DOWN
    assert "ip link set eth7 up" in raised.value.hint


def test_an_infiniband_port_that_is_down_wants_a_subnet_manager(tmp_path: Path) -> None:
    with pytest.raises(RdmaUnavailable) as raised:
        verbs.active_ports(add_port(tmp_path, "mlx5_0", link_layer="InfiniBand", state="2: INIT"))

    assert "subnet manager" in raised.value.hint


@pytest.mark.usefixtures("without_pyverbs")
def test_an_active_port_without_pyverbs_says_how_to_install_it(tmp_path: Path) -> None:
    with pytest.raises(RdmaUnavailable, match="pyverbs is not installed") as raised:
        verbs.active_ports(add_port(tmp_path, "rxe0"))

    assert raised.value.reason is Refusal.NO_PYVERBS
    assert raised.value.hint == verbs.INSTALL


@pytest.mark.usefixtures("of_another_python")
def test_pyverbs_of_another_python_is_told_apart_from_none() -> None:
    with pytest.raises(RdmaUnavailable, match=r"not for this Python: it has no module pyverbs\.enums") as raised:
        verbs.load_pyverbs()

    assert raised.value.reason is Refusal.NO_PYVERBS


@pytest.mark.processes
def test_a_low_memlock_limit_is_named_with_what_is_needed() -> None:
    code = (
        "from ckpt_engine.peers.transport.rdma.verbs import RdmaUnavailable, check_memlock, memlock_limit\n"
        "check_memlock(64 << 10)\n"
        "try:\n"
        "    check_memlock((1 << 20) + 1)\n"
        "except RdmaUnavailable as error:\n"
        "    print(memlock_limit(), error.reason, error)\n"
    )

    done = subprocess.run(
        [*with_low_memlock(64 << 10), "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.startswith("65536 memlock This process may lock 64 KiB of memory, and needs 1025 KiB")
    assert "ulimit -l unlimited" in done.stdout
