"""A lower limit of power, on NVML's recorded answers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import ConfigurationError, Forbidden, NotFound, UsageError
from host_daemon.probes.gpus import RecordedNvml
from host_daemon.store.database import HostDatabase
from simulator.inject.host_files import HostFiles
from simulator.inject.kinds import gpu_power
from simulator.inject.kinds.catalog import KINDS
from simulator.inject.kinds.kind import FaultSite, Plan
from simulator.inject.processes import LiveProcess, look_at

KIND = KINDS["gpu-power"]


class PowerNvml(RecordedNvml):
    """NVML as it was recorded, with limits of power, which can be set."""

    def __init__(self, path: Path, limits_mw: dict[str, int]) -> None:
        path.write_text(json.dumps({"gpus": [{"pci": pci} for pci in limits_mw]}))
        super().__init__(path)
        self.limits_mw = limits_mw
        self.usual_mw = dict(limits_mw)
        self.step_mw = 1  # to which the driver rounds
        self.refuses = ""
        self.users: dict[int, list[int]] = {}  # pids by index

    def nvmlDeviceGetMinorNumber(self, index: int) -> int:
        return index

    def nvmlDeviceGetPowerManagementDefaultLimit(self, index: int) -> int:
        return list(self.usual_mw.values())[index]

    def nvmlDeviceGetComputeRunningProcesses(self, index: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid) for pid in self.users.get(index, [])]

    def nvmlDeviceGetHandleByPciBusId(self, pci: bytes) -> int:
        return list(self.limits_mw).index(pci.decode())

    def nvmlDeviceGetPowerManagementLimit(self, index: int) -> int:
        return list(self.limits_mw.values())[index]

    def nvmlDeviceGetPowerManagementLimitConstraints(self, _index: int) -> tuple[int, int]:
        return 200_000, 700_000

    def nvmlDeviceSetPowerManagementLimit(self, index: int, limit_mw: int) -> None:
        pci = list(self.limits_mw)[index]
        if pci == self.refuses:
            raise self.NVMLError(4, "Insufficient Permissions")
        self.limits_mw[pci] = limit_mw // self.step_mw * self.step_mw


A, B = "00000000:3B:00.0", "00000000:86:00.0"


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PowerNvml:
    made = PowerNvml(tmp_path / "nvml.json", {A: 700_000, B: 300_000})
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.setattr(gpu_power, "probe_root", lambda _site: None)
    own = look_at(os.getpid())
    monkeypatch.setattr(HostFiles, "worker_processes", lambda files: [own] if files.root.name == "host-a" else [OTHER])
    monkeypatch.setattr(gpu_power, "held_gpus", lambda pid: {0, 1, 2} if pid == os.getpid() else {1})
    monkeypatch.setattr(gpu_power, "own_processes", lambda: [])
    monkeypatch.setitem(globals(), "FOLDER", tmp_path)
    return made


OTHER = LiveProcess(pid=1, start_ticks=1, session=1, argv=())
FOLDER = Path()


def host(name: str) -> HostFiles:
    folder = FOLDER / name
    folder.mkdir(exist_ok=True)
    (folder / "VERSION").write_text("1\n")
    HostDatabase(folder / "daemon.sqlite").close()
    return HostFiles(folder)


def site(**options: str) -> FaultSite:
    return FaultSite(
        None,  # type: ignore[arg-type] - nothing is asked
        SystemClock(),
        "a1",
        host_id="host-a",
        files=host("host-a"),
        values=KIND.values(options),
    )


def planned(**options: str) -> Plan:
    return dict(json.loads(json.dumps(KIND.plan(site(**options)))))


def test_gpus_get_less_power_and_then_what_they_had(nvml: PowerNvml) -> None:
    assert KIND.lacks(site()) == ""
    plan = planned()
    assert nvml.limits_mw == {A: 700_000, B: 300_000}
    KIND.inject(plan)
    assert nvml.limits_mw == {A: 350_000, B: 200_000}, "not below the least"
    KIND.undo(plan)
    KIND.undo(plan)
    assert nvml.limits_mw == {A: 700_000, B: 300_000}


def test_one_gpu_by_its_address_and_a_limit_that_somebody_set_since_stays(nvml: PowerNvml) -> None:
    plan = planned(pci="0000:3b:00.0", share="0.9")
    KIND.inject(plan)
    assert nvml.limits_mw == {A: 630_000, B: 300_000}
    nvml.limits_mw[A] = 400_000
    KIND.undo(plan)
    assert nvml.limits_mw == {A: 400_000, B: 300_000}


def test_a_second_fault_at_the_same_time_is_refused_and_the_first_gives_all_power_back(nvml: PowerNvml) -> None:
    plan = planned()
    KIND.inject(plan)
    with pytest.raises(NotFound, match=f"{A} is held to less than its usual power already"):
        planned(share="0.9")
    KIND.undo(plan)
    assert nvml.limits_mw == {A: 700_000, B: 300_000} and planned(share="0.9")


@pytest.mark.parametrize("step_mw", [900, 40_000])
def test_what_the_driver_rounds_is_put_back_all_the_same(nvml: PowerNvml, step_mw: int) -> None:
    plan = planned(pci=A, share="0.51")
    nvml.limits_mw[A], nvml.step_mw = 700_000, step_mw
    if step_mw < gpu_power.WATT:
        KIND.inject(plan)
        assert 356_000 < nvml.limits_mw[A] < 357_000
    else:
        nvml.usual_mw[A] = plan["gpus"][0]["before_mw"] = nvml.limits_mw[A] = 720_000
        with pytest.raises(ConfigurationError, match="to another limit than 357 W"):
            KIND.inject(plan)
    nvml.step_mw = 1
    KIND.undo(plan)
    assert nvml.limits_mw[A] == nvml.usual_mw[A]


def test_only_gpus_of_the_hosts_workers_and_of_nobody_else_are_slowed_down(
    nvml: PowerNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.users = {0: [os.getpid()], 1: [os.getpid(), 4_000_000]}
    with pytest.raises(Forbidden, match=f"{B} is also used by the process 4000000"):
        planned()
    assert [gpu["pci"] for gpu in planned(pci=A)["gpus"]] == [A]
    nvml.users = {}
    daemon = LiveProcess(pid=1, start_ticks=1, session=1, argv=("host_daemon",))
    monkeypatch.setattr(gpu_power, "own_processes", lambda: [daemon])
    monkeypatch.setattr(gpu_power, "state_dir_of", lambda _: host("host-b").root)
    with pytest.raises(Forbidden, match=f"{B} is also used by a worker of .*host-b"):
        planned()
    monkeypatch.setattr(gpu_power, "held_gpus", lambda _: {1})
    with pytest.raises(NotFound, match="that a worker of host-a uses"):
        planned(pci=A)


def test_a_gpu_that_refuses_keeps_no_other_from_its_limit_and_is_named(nvml: PowerNvml) -> None:
    plan = planned()
    KIND.inject(plan)
    nvml.refuses = A
    with pytest.raises(ConfigurationError, match=f"could not be put back: {A} .*Insufficient Permissions"):
        KIND.undo(plan)
    assert nvml.limits_mw == {A: 350_000, B: 300_000}


def test_what_cannot_be_done_is_said(nvml: PowerNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for share in ("0", "1", "-1", "nan"):
        with pytest.raises(UsageError, match="share"):
            planned(share=share)
    with pytest.raises(NotFound, match="No such GPU"):
        planned(pci="0000:ff:00.0")
    (tmp_path / "nvml.json").unlink()
    assert "NVML refused" in KIND.lacks(site())
    monkeypatch.setattr(gpu_power, "probe_root", lambda _site: tmp_path)
    assert "recorded readings" in KIND.lacks(site())
    monkeypatch.setattr(gpu_power, "probe_root", lambda _site: None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert KIND.lacks(site()) == "nvidia-ml-py is not installed"
