"""Tests on a real RDMA device, with a marker. `make test-rdma` runs them in virtual machines that have one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from engine_site import SiteSettings
    from two_devices import Machine
    from two_engines import Begin, Sites, TwoEngines

# Tests are not packages: the modules next to this one are found by path, and with --confcutdir those of tests/ too.
sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]
pytest.register_assert_rewrite("other_host", "raw_verbs", "engine_hosts", "two_engines")

from other_host import OtherMachine  # noqa: E402 - found by the path above


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.rdma)


@pytest.fixture(autouse=True)
def rdma_device() -> None:
    """Skips where this host has no RDMA device."""
    if not any(Path("/sys/class/infiniband").glob("*")):
        pytest.skip("no RDMA device here; `make test-rdma` runs this in virtual machines")


@pytest.fixture(autouse=True)
def no_open_device() -> Iterator[None]:
    """A test may take the device away, and Soft-RoCE waits until nobody has it open."""
    yield
    close_nics()


def close_nics() -> None:
    if transport := sys.modules.get("tests.rdma.rdma_transport"):
        transport.close_nics()


@pytest.fixture
def other_host() -> Iterator[OtherMachine]:
    """Where the peer of a test runs: the second virtual machine, or this host where there is none."""
    with OtherMachine.of_this_run() as host:
        yield host


@pytest.fixture
def this_host() -> Iterator[OtherMachine]:
    """For a peer beside the test."""
    with OtherMachine.of_one_host() as host:
        yield host


@pytest.fixture(scope="session")
def sites() -> Iterator[Sites]:
    """Of two hosts with an engine each."""
    from two_engines import Sites  # only here: it imports for seconds where processors are emulated

    with OtherMachine.of_one_host() as here, OtherMachine.of_this_run() as there:
        yield Sites(here, there)


@pytest.fixture
def begin(sites: Sites) -> Iterator[Begin]:
    """Starts two engines with these settings: of both, or of a and of b. See `two_engines`."""
    from two_engines import TwoEngines

    with ExitStack() as stack:

        def start(a: SiteSettings, b: SiteSettings | None = None) -> TwoEngines:
            job = TwoEngines(sites, {"a": a, "b": b or a})
            stack.callback(job.close)
            return job

        yield start


@pytest.fixture
def second_devices() -> Iterator[tuple[Machine, Machine]]:
    """This machine and the other one, each with a second RDMA device. To be asked for before what uses the device."""
    from two_devices import two_devices

    if "FLYBALL_VM" not in os.environ or not Path("/sys/class/net/eth1").exists():
        pytest.skip("it takes virtual machines with two interfaces: deploy/rdma_vm.py --nics 2")
    with two_devices() as machines:
        yield machines
        close_nics()
