"""A lower limit of power, on NVML's recorded answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import ConfigurationError, NotFound, UsageError
from host_daemon.probes.gpus import RecordedNvml
from simulator.inject.kinds import gpu_power
from simulator.inject.kinds.catalog import KINDS
from simulator.inject.kinds.kind import FaultSite, Plan

KIND = KINDS["gpu-power"]


class PowerNvml(RecordedNvml):
    """NVML as it was recorded, with limits of power, which can be set."""

    def __init__(self, path: Path, limits_mw: dict[str, int]) -> None:
        path.write_text(json.dumps({"gpus": [{"pci": pci} for pci in limits_mw]}))
        super().__init__(path)
        self.limits_mw = limits_mw
        self.refuses = ""

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
        self.limits_mw[pci] = limit_mw


A, B = "00000000:3B:00.0", "00000000:86:00.0"


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PowerNvml:
    made = PowerNvml(tmp_path / "nvml.json", {A: 700_000, B: 300_000})
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.setattr(gpu_power, "probe_root", lambda _site: None)
    return made


def site(**options: str) -> FaultSite:
    return FaultSite(None, SystemClock(), "a1", host_id="host-a", values=KIND.values(options))  # type: ignore[arg-type]


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
