"""Faults of GPUs, through the recorded readings that a daemon's probes read in place of the machine."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from flyball.contracts.errors import NotFound
from flyball.state_folder import write_private
from simulator.inject.kinds.kind import FaultSite, FaultTarget, Option, Plan, RealFault
from simulator.inject.processes import environment_of

PROBE_ROOT = "FLYBALL_PROBE_ROOT"
PCI = Option("pci", "0000:3b:00.0", "PCI address of the GPU")


def probe_root(site: FaultSite) -> Path | None:
    """The folder of the host's recorded readings; None: its probes read the machine itself."""
    daemon = site.host.daemon()
    folder = environment_of(daemon).get(PROBE_ROOT, "") if daemon is not None else ""
    return Path(folder) if folder not in ("", "/") and Path(folder).is_dir() else None


class _Recorded(RealFault):
    target = FaultTarget.HOST

    def lacks(self, site: FaultSite) -> str:
        if probe_root(site) is None:
            return f"its probes read the machine itself; start its daemon with {PROBE_ROOT}=FOLDER"
        return ""

    def root(self, site: FaultSite) -> Path:
        found = probe_root(site)
        assert found is not None, "lacks() was asked before"
        return found


class Xid(_Recorded):
    name = "xid"
    about = "a line of NVIDIA's driver in the kernel's log. Its condition stands as after a real one: see the number"
    options = (Option("xid", 79, "number of the error"), PCI)
    causes = ("host_condition",)

    def plan(self, site: FaultSite) -> Plan:
        line = f"NVRM: Xid (PCI:{site.text('pci')}): {site.count('xid')}, pid='<unknown>', injected by flyball inject"
        return {"path": str(self.root(site) / "dev/kmsg"), "line": line}

    def inject(self, plan: Plan) -> None:
        path = Path(plan["path"])
        path.parent.mkdir(parents=True, exist_ok=True)
        last = path.read_text().splitlines()[-1:] if path.exists() else []
        number = int(last[0].split(",")[1]) + 1 if last else 1
        with path.open("a") as log:
            log.write(f"6,{number},{number * 1_000_000},-;{plan['line']}\n")
            os.fsync(log.fileno())


_changing = threading.Lock()  # nvml.json, which faults of several GPUs change


class _OfNvml(_Recorded):
    """Changes one GPU's record in nvml.json, and at the end takes back that change alone."""

    lasts_s = 60.0
    causes = ("host_condition",)

    def plan(self, site: FaultSite) -> Plan:
        pci = f"0000{site.text('pci')}"  # NVML has eight digits for the domain
        return {"path": str(self.root(site) / "nvml.json"), "pci": pci}

    def inject(self, plan: Plan) -> None:
        with _changing:
            path = Path(plan["path"])
            recorded = _read(path)
            gpu = _gpu_of(recorded, plan["pci"])
            if gpu is None:
                gpu = {"pci": plan["pci"]}
                recorded.setdefault("gpus", []).append(gpu)
            self.change(gpu, plan)
            write_private(path, json.dumps(recorded).encode(), durable=False)

    def undo(self, plan: Plan) -> None:
        with _changing:
            path = Path(plan["path"])
            recorded = _read(path)
            gpu = _gpu_of(recorded, plan["pci"])
            if gpu is None:
                return  # somebody else removed it since
            before = json.dumps(recorded)
            self.change_back(gpu, plan)
            if json.dumps(recorded) == before:
                return  # it was undone before
            if not gpu.keys() - {"pci"}:
                recorded["gpus"].remove(gpu)  # a fault had added it
            write_private(path, json.dumps(recorded).encode(), durable=False)

    def change(self, gpu: dict[str, Any], plan: Plan) -> None:
        raise NotImplementedError

    def change_back(self, gpu: dict[str, Any], plan: Plan) -> None:
        raise NotImplementedError


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _gpu_of(recorded: dict[str, Any], pci: str) -> dict[str, Any] | None:
    return next((gpu for gpu in recorded.get("gpus", []) if gpu["pci"][-12:] == pci[-12:]), None)


class GpuLost(_OfNvml):
    name = "gpu-lost"
    about = "NVML says that a GPU fell off the bus"
    options = (PCI,)

    def plan(self, site: FaultSite) -> Plan:
        plan = super().plan(site)
        if (_gpu_of(_read(Path(plan["path"])), plan["pci"]) or {}).get("lost"):
            raise NotFound(f"The GPU {site.text('pci')} is lost already.", hint="name another: pci=...")
        return plan

    def change(self, gpu: dict[str, Any], plan: Plan) -> None:
        gpu["lost"] = True

    def change_back(self, gpu: dict[str, Any], plan: Plan) -> None:
        gpu.pop("lost", None)


class Ecc(_OfNvml):
    name = "ecc"
    about = "NVML counts memory errors of a GPU that could not be corrected"
    options = (PCI, Option("uncorrected", 1, "how many more"))

    def plan(self, site: FaultSite) -> Plan:
        return super().plan(site) | {"errors": site.count("uncorrected"), "id": site.injection_id}

    def change(self, gpu: dict[str, Any], plan: Plan) -> None:
        # Which injections are in the count is in the record itself, so that undoing twice subtracts once.
        gpu.setdefault("injected", {"was_counted": "uncorrected" in gpu, "ids": []})["ids"].append(plan["id"])
        gpu["uncorrected"] = gpu.get("uncorrected", 0) + plan["errors"]

    def change_back(self, gpu: dict[str, Any], plan: Plan) -> None:
        injected = gpu.get("injected", {"ids": []})
        if plan["id"] not in injected["ids"]:
            return
        injected["ids"].remove(plan["id"])
        gpu["uncorrected"] -= plan["errors"]
        if not injected["ids"]:
            del gpu["injected"]
            if not (gpu["uncorrected"] or injected["was_counted"]):
                del gpu["uncorrected"]
