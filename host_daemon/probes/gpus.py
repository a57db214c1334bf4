"""GPUs as NVML sees them: lost, memory errors, slowed down by heat or power.

`gpu_findings` is pure. A folder of fake readings may have `nvml.json` with the answers, see `RecordedNvml`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from flyball.contracts.reports.conditions import Severity
from host_daemon.probes.findings import NotAvailableError, ProbeFinding, Reading

GPU_LOST = "gpu-lost"
CORRECTED_PER_HOUR = 100  # ECC errors of one GPU; more are a trend
HOUR_S = 3_600.0
SLOW_LOOKS = 6  # in a row with the same reason, before it counts: short dips are normal

# Bits of nvmlDeviceGetCurrentClocksThrottleReasons, which newer drivers call event reasons.
THROTTLES: Mapping[int, tuple[str, Severity, str]] = {
    0x40: ("thermal", Severity.WARNING, "slowed down by its hardware, because it is too hot"),
    0x20: ("thermal-limit", Severity.INFO, "slowed down by the driver, to stay cool"),
    0x80: ("power-brake", Severity.WARNING, "slowed down by the power supply"),
}


class Gpu(msgspec.Struct, frozen=True):
    """What NVML says about one GPU. None: not supported."""

    name: str  # its PCI address, as in the kernel's log
    is_lost: bool = False
    corrected: int | None = None  # ECC errors since the driver was loaded
    uncorrected: int | None = None
    is_remap_pending: bool | None = None
    has_remap_failed: bool | None = None
    throttles: int = 0
    celsius: int | None = None


def gpu_findings(gpu: Gpu, corrected_in_hour: int, slow_looks: Mapping[int, int]) -> list[ProbeFinding]:
    """What is wrong with a GPU. `slow_looks`: throttle bit -> how often in a row it was set."""
    if gpu.is_lost:
        message = f"GPU {gpu.name} does not answer any more."
        return [ProbeFinding(GPU_LOST, Severity.CRITICAL, message, gpu.name, is_remembered=True)]
    found = []
    if gpu.has_remap_failed:
        message = f"GPU {gpu.name} could not replace a bad row of its memory: it has to be repaired."
        found.append(ProbeFinding("row-remap-failed", Severity.CRITICAL, message, gpu.name))
    elif gpu.is_remap_pending:
        message = f"GPU {gpu.name} replaces a bad row of its memory with its next reset."
        found.append(ProbeFinding("row-remap-pending", Severity.WARNING, message, gpu.name))
    if gpu.uncorrected:
        message = f"GPU {gpu.name} had ECC errors that it could not correct."
        evidence = {"uncorrected": gpu.uncorrected}
        found.append(ProbeFinding("ecc-uncorrected", Severity.WARNING, message, gpu.name, evidence))
    if corrected_in_hour >= CORRECTED_PER_HOUR:
        message = f"GPU {gpu.name} corrected {CORRECTED_PER_HOUR} ECC errors or more within an hour."
        evidence = {"corrected_in_hour": corrected_in_hour}
        found.append(ProbeFinding("ecc-corrected", Severity.WARNING, message, gpu.name, evidence))
    for bit, (kind, severity, what) in THROTTLES.items():
        if slow_looks.get(bit, 0) >= SLOW_LOOKS:
            found.append(ProbeFinding(kind, severity, f"GPU {gpu.name} is {what}.", gpu.name, {"celsius": gpu.celsius}))
    return found


class Trend:
    """Growth of a counter within the last hour. A reset of the counter, with the driver, is no growth."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=4_096)

    def growth(self, count: int, now_s: float) -> int:
        if self._seen and count < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now_s, count))
        while self._seen[0][0] < now_s - HOUR_S:
            self._seen.popleft()
        return count - self._seen[0][1]


class Gpus:
    source = "probe gpu"
    deadline_s = 20.0  # a driver in trouble may block for long

    def __init__(
        self,
        nvml: Any | None,  # noqa: ANN401 - pynvml has no types
        monotonic_s: Callable[[], float],
        interval_s: float = 5.0,
        lost: Iterable[str] = (),
    ) -> None:
        """`nvml`: what has pynvml's functions; None: pynvml. `lost`: GPUs that an earlier daemon of this boot reported
        as lost, so that they are still known to be missed."""
        self._nvml = nvml
        self.interval_s = interval_s
        self._monotonic_s = monotonic_s
        self._known = set(lost)  # PCI addresses of those that answered once
        self._trends: dict[str, Trend] = {}
        self._slow: dict[str, dict[int, int]] = {}
        self._is_open = False

    def read(self) -> Reading:
        nvml = self._open()
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            self._close(nvml)  # a driver that was loaded again needs a new start
            raise NotAvailableError(f"NVML counts no GPUs: {error}") from error
        if not count and not self._known:
            raise NotAvailableError("NVML knows no GPU")
        now_s = self._monotonic_s()
        found: list[ProbeFinding] = []
        gpus = [gpu for index in range(count) if (gpu := self._look(nvml, index)) is not None]
        missing = self._known - {gpu.name for gpu in gpus}
        for gpu in (*gpus, *(Gpu(name, is_lost=True) for name in sorted(missing))):
            trend = self._trends.setdefault(gpu.name, Trend())
            growth = trend.growth(gpu.corrected, now_s) if gpu.corrected is not None else 0
            slow = self._slow.get(gpu.name, {})
            self._slow[gpu.name] = {bit: slow.get(bit, 0) + 1 for bit in THROTTLES if gpu.throttles & bit}
            found += gpu_findings(gpu, growth, self._slow[gpu.name])
        return Reading(tuple(found))

    def _open(self) -> Any:  # noqa: ANN401
        if self._nvml is None:
            try:
                import pynvml
            except ImportError as error:
                raise NotAvailableError("nvidia-ml-py is not installed") from error
            self._nvml = pynvml
        if not self._is_open:
            try:
                self._nvml.nvmlInit()
            except self._nvml.NVMLError as error:
                raise NotAvailableError(f"NVML does not start: {error}") from error
            self._is_open = True
        return self._nvml

    def _close(self, nvml: Any) -> None:  # noqa: ANN401
        self._is_open = False
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()

    def _look(self, nvml: Any, index: int) -> Gpu | None:  # noqa: ANN401
        """None: NVML says that there is no such GPU any more. Any other error says nothing about the GPU."""
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            address = nvml.nvmlDeviceGetPciInfo(handle).busId
        except nvml.NVMLError as error:
            if getattr(error, "value", None) in (
                getattr(nvml, "NVML_ERROR_GPU_IS_LOST", 15),
                getattr(nvml, "NVML_ERROR_NOT_FOUND", 6),
            ):
                return None
            raise NotAvailableError(f"NVML does not open GPU number {index}: {error}") from error
        name = address.decode() if isinstance(address, bytes) else str(address)
        name = name.lower()[-12:]  # NVML has eight digits for the domain, the kernel four
        self._known.add(name)

        def ask(function: str, *arguments: object) -> Any:  # noqa: ANN401
            try:
                return getattr(nvml, function)(handle, *arguments)
            except (nvml.NVMLError, AttributeError):
                return None

        volatile = getattr(nvml, "NVML_VOLATILE_ECC", 0)
        rows = ask("nvmlDeviceGetRemappedRows")  # corrected, uncorrected, pending, failed
        return Gpu(
            name=name,
            is_lost=self._is_lost(nvml, handle),
            corrected=ask(
                "nvmlDeviceGetTotalEccErrors", getattr(nvml, "NVML_MEMORY_ERROR_TYPE_CORRECTED", 0), volatile
            ),
            uncorrected=ask(
                "nvmlDeviceGetTotalEccErrors", getattr(nvml, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", 1), volatile
            ),
            is_remap_pending=bool(rows[2]) if rows is not None else None,
            has_remap_failed=bool(rows[3]) if rows is not None else None,
            throttles=ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0,
            celsius=ask("nvmlDeviceGetTemperature", getattr(nvml, "NVML_TEMPERATURE_GPU", 0)),
        )

    def _is_lost(self, nvml: Any, handle: Any) -> bool:  # noqa: ANN401
        """NVML has an error of its own for a GPU that fell off the bus; any call raises it."""
        try:
            nvml.nvmlDeviceGetTemperature(handle, getattr(nvml, "NVML_TEMPERATURE_GPU", 0))
        except nvml.NVMLError as error:
            return getattr(error, "value", None) == getattr(nvml, "NVML_ERROR_GPU_IS_LOST", 15)
        return False


class RecordedNvml:
    """NVML's answers from a file, to inject faults where no GPU is: `{"gpus": [{"pci": "00000000:3b:00.0", "lost":
    false, "corrected": 0, "uncorrected": 0, "remapped": [0, 0, 0, 0], "throttles": 0, "celsius": 40}]}`. Without the
    file, NVML does not start."""

    NVML_ERROR_GPU_IS_LOST = 15

    class NVMLError(Exception):
        def __init__(self, value: int, text: str) -> None:
            super().__init__(text)
            self.value = value

    def __init__(self, path: Path) -> None:
        self._path = path

    def nvmlInit(self) -> None:
        self._gpus()

    def nvmlShutdown(self) -> None:
        """Nothing is held open."""

    def nvmlDeviceGetCount(self) -> int:
        return len(self._gpus())

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._answer(index, "pci", lost_too=True)
        return index

    def nvmlDeviceGetPciInfo(self, index: int) -> Any:  # noqa: ANN401
        class PciInfo(msgspec.Struct):
            busId: str

        return PciInfo(self._answer(index, "pci", lost_too=True))

    def nvmlDeviceGetTemperature(self, index: int, _sensor: int) -> Any:  # noqa: ANN401
        return self._answer(index, "celsius")

    def nvmlDeviceGetTotalEccErrors(self, index: int, kind: int, _counter: int) -> Any:  # noqa: ANN401
        return self._answer(index, "uncorrected" if kind else "corrected")

    def nvmlDeviceGetRemappedRows(self, index: int) -> Any:  # noqa: ANN401
        return self._answer(index, "remapped")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, index: int) -> Any:  # noqa: ANN401
        return self._answer(index, "throttles")

    def _gpus(self) -> list[dict[str, Any]]:
        try:
            found = msgspec.json.decode(self._path.read_bytes())
        except (OSError, msgspec.DecodeError) as error:
            raise self.NVMLError(9, f"{self._path}: {error}") from error
        return list(found.get("gpus", []))

    def _answer(self, index: int, name: str, *, lost_too: bool = False) -> Any:  # noqa: ANN401
        gpus = self._gpus()
        if index >= len(gpus):
            raise self.NVMLError(2, "no such GPU")
        if gpus[index].get("lost") and not lost_too:
            raise self.NVMLError(self.NVML_ERROR_GPU_IS_LOST, "GPU is lost")
        if name not in gpus[index]:
            raise self.NVMLError(3, "not supported")
        return gpus[index][name]
