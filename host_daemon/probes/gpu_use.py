"""Whether processes keep a GPU busy, from NVML. tests/gpu asks a real one; the other tests exercise its seam.

NVML knows little per process: in containers its pids differ, and some drivers report nothing. So this looks at the
devices that a process holds open. A device busy with other work makes an idle process look busy, never the reverse.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import structlog

_DEVICE = re.compile(r"/dev/nvidia(\d+)")

_log = structlog.get_logger(__name__)


class Nvml(Protocol):
    """The functions of pynvml used here."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...  # noqa: ANN401

    def nvmlDeviceGetMinorNumber(self, handle: Any) -> int: ...  # noqa: ANN401

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any: ...  # noqa: ANN401


class GpuUse:
    """Asks NVML, which is opened for the first process that holds a GPU."""

    def __init__(self, nvml: Nvml | None = None) -> None:
        self._nvml = nvml
        self._handles: Mapping[int, Any] | None = None  # by minor number

    def busy(self, pids: Iterable[int]) -> bool | None:
        """Whether a GPU that one of these processes holds open is busy; None if unknown."""
        minors = {minor for pid in pids for minor in held_gpus(pid)}
        if not minors:
            return False
        handles = self._open()
        answers = [self._is_busy(handles.get(minor)) for minor in sorted(minors)]
        if True in answers:
            return True
        return None if None in answers else False

    def _open(self) -> Mapping[int, Any]:
        if self._handles is not None:
            return self._handles
        self._handles = {}
        try:
            if self._nvml is None:
                import pynvml

                self._nvml = pynvml
            nvml: Any = self._nvml
            nvml.nvmlInit()
            devices = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            self._handles = {nvml.nvmlDeviceGetMinorNumber(device): device for device in devices}
        except Exception as error:  # noqa: BLE001 - whatever a driver's library raises, the daemon works without it
            _log.warning("nvml_unusable", error=str(error), note="ranks with a GPU count as working")
        return self._handles

    def _is_busy(self, handle: Any) -> bool | None:  # noqa: ANN401 - NVML's own
        if handle is None or self._nvml is None:
            return None
        try:
            return bool(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu > 0)
        except self._nvml.NVMLError:
            return None


def held_gpus(pid: int) -> set[int]:
    """The minor numbers of the GPUs that a process holds open."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if match := _DEVICE.fullmatch(str(Path(entry.path).readlink())):
                    found.add(int(match[1]))
    return found
