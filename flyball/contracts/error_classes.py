"""What kind of error ended a worker: one table from the lines that PyTorch, NCCL, gloo and the kernel print. Pure.

The daemon classifies, since it has the log; the controller does so for exits that an older daemon reported. Recorded
lines, with their sources, are in tests/support/jobs/error_lines.py.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Final

_CRASHES: Final = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})


class ErrorClass(StrEnum):
    """The kind of error that ended a worker."""

    CONNECTION_LOST = "connection_lost"
    COLLECTIVE_TIMEOUT = "collective_timeout"
    GPU_HARDWARE = "gpu_hardware"
    GPU_OUT_OF_MEMORY = "gpu_out_of_memory"
    DEVICE_ASSERT = "device_assert"
    HOST_OUT_OF_MEMORY = "host_out_of_memory"
    SHARED_MEMORY = "shared_memory"
    NCCL_ERROR = "nccl_error"
    CUDA_ERROR = "cuda_error"
    GLOO_ERROR = "gloo_error"
    IMPORT_ERROR = "import_error"
    STORAGE = "storage"
    DATA_LOADER = "data_loader"
    USER_EXCEPTION = "user_exception"
    EXIT_CODE = "exit_code"
    CRASH = "crash"
    KILLED = "killed"
    UNKNOWN = "unknown"


# Caused by the failure of another rank: they do not show the cause.
SECONDARY: Final = frozenset({ErrorClass.CONNECTION_LOST, ErrorClass.COLLECTIVE_TIMEOUT})

# Completes "This is ..."; classes without an entry say no more than the failure's own sentence.
MEANINGS: Final[Mapping[ErrorClass, str]] = {
    ErrorClass.GPU_HARDWARE: "a fault of the GPU or its link, reported by the driver",
    ErrorClass.GPU_OUT_OF_MEMORY: "a lack of GPU memory",
    ErrorClass.DEVICE_ASSERT: "an assertion in a CUDA kernel, usually an index out of range in the script's data",
    ErrorClass.HOST_OUT_OF_MEMORY: "a lack of host memory",
    ErrorClass.SHARED_MEMORY: "a lack of shared memory (/dev/shm)",
    ErrorClass.NCCL_ERROR: "an error of NCCL: the network, a GPU link or the driver",
    ErrorClass.CUDA_ERROR: "a CUDA error: a kernel or the driver failed",
    ErrorClass.GLOO_ERROR: "an error of gloo, the collectives on CPUs",
    ErrorClass.IMPORT_ERROR: "a module or library that cannot be loaded on that host",
    ErrorClass.STORAGE: "an error of a disk or a network file system",
    ErrorClass.DATA_LOADER: "the end of a data loader's worker process",
    ErrorClass.CRASH: "a crash in native code",
}

# The first row that matches decides, so a particular error comes before the general one whose words it contains.
# Patterns ignore case. An exception's line is "Class: message".
_TABLE: Final = tuple(
    (error_class, re.compile(pattern, re.IGNORECASE))
    for error_class, pattern in (
        (ErrorClass.COLLECTIVE_TIMEOUT, r"watchdog caught collective operation timeout"),
        (ErrorClass.COLLECTIVE_TIMEOUT, r"timed out waiting|application timeout caused pair closure"),
        (
            ErrorClass.CONNECTION_LOST,
            r"connection closed by (?:remote )?peer|connection reset by peer|connection was likely closed"
            r"|connection refused|broken pipe|socket closed|gloo connectfullmesh failed"
            r"|ncclremoteerror|remote process exit|communicator was aborted",
        ),
        (ErrorClass.CONNECTION_LOST, r"^(?:\w+\.)*(?:DistNetworkError|DistStoreError)\b"),
        (
            ErrorClass.GPU_HARDWARE,
            r"uncorrectable (?:ecc|nvlink) error|fallen off the bus|cuda_error_ecc_uncorrectable"
            r"|device not responding|gpu is lost|NVRM: Xid",
        ),
        (
            ErrorClass.GPU_OUT_OF_MEMORY,
            r"(?:cuda|hip|xpu) out of memory|cuda error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
            r"|cuda_error_out_of_memory|cuda failure 2 'out of memory'",
        ),
        (ErrorClass.DEVICE_ASSERT, r"device-side assert triggered"),
        (
            ErrorClass.SHARED_MEMORY,
            r"out of shared memory|insufficient shared memory|unable to (?:open|mmap|write to) (?:a )?shared memory"
            r"|unable to write to file </torch_|no space left on device.{0,40}/dev/shm",
        ),
        (
            ErrorClass.HOST_OUT_OF_MEMORY,
            r"out of memory: killed process|oom[-_]kill|oom killed|defaultcpuallocator: (?:can't|not enough)"
            r"|cannot allocate memory|^(?:\w+\.)*_?(?:Array)?MemoryError\b|std::bad_alloc",
        ),
        (
            ErrorClass.NCCL_ERROR,
            r"nccl error|nccl(?:Unhandled|System|Internal|Invalid\w*)(?:Cuda)?(?:Error|Usage|Argument)",
        ),
        (ErrorClass.CUDA_ERROR, r"cuda error|CUBLAS_STATUS_|CUDNN_STATUS_|cudnn error|cuda driver error|CUDA failure"),
        (ErrorClass.GLOO_ERROR, r"third_party/gloo|gloo/transport|::gloo::"),
        (
            ErrorClass.IMPORT_ERROR,
            r"^(?:\w+\.)*(?:ImportError|ModuleNotFoundError)\b|caught (?:ImportError|ModuleNotFoundError) in"
            r"|cannot open shared object file|undefined symbol: ",
        ),
        (
            ErrorClass.STORAGE,
            r"no space left on device|disk quota exceeded|stale file handle|input/output error|read-only file system"
            r"|transport endpoint is not connected|remote i/o error|pytorchstreamwriter failed|file write failed"
            r"|unexpected pos \d+ vs|\[errno 121\]|host is down",
        ),
        (
            ErrorClass.DATA_LOADER,
            r"dataloader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed by signal|exited unexpectedly)",
        ),
    )
)

# An unindented line "module.Class: message" of a chained traceback.
_EXCEPTION: Final = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception)(?:: .*)?$", re.MULTILINE)
_SIZE: Final = re.compile(r"this process has ([\d.]+ [KMGT]iB) memory in use")


@lru_cache(maxsize=1024)  # all ranks that lose the same one say the same, and rules ask again
def error_class_of(line: str) -> ErrorClass | None:
    """The class that a line shows; None if the table has none for it."""
    return next((error_class for error_class, pattern in _TABLE if pattern.search(line)), None)


def classify(
    *,
    exit_code: int | None,
    signal_number: int | None,
    kind: str = "",
    message: str = "",
    traceback: str = "",
    log_lines: Iterable[str] = (),
    kernel: str = "",
) -> ErrorClass:
    """Classify the end of a worker.

    `kind` and `message` are those of its exception; `log_lines` the last of its log, oldest first; `kernel` is what the
    kernel said about its end. The log counts only if there is no exception: it may contain errors that the worker
    survived. A killed worker's log shows nothing, except for a launcher's line about a lack of memory.
    """
    if kernel and (found := error_class_of(kernel)) is not None:
        return found
    if kind or message:
        chained = reversed(_EXCEPTION.findall(traceback))
        lines = (f"{kind}: {message}" if kind else message, *chained)
        own = next((found for line in lines if (found := error_class_of(line)) is not None), None)
        return own or (ErrorClass.CRASH if signal_number in _CRASHES else ErrorClass.USER_EXCEPTION)
    newest_first = [found for line in reversed(tuple(log_lines)) if (found := error_class_of(line)) is not None]
    if signal_number is None and exit_code is None:
        return ErrorClass.UNKNOWN
    if signal_number is None:  # a script may lose any connection, and say so, before it ends by itself
        return next((found for found in newest_first if found not in SECONDARY), ErrorClass.EXIT_CODE)
    if signal_number in _CRASHES:
        return newest_first[0] if newest_first else ErrorClass.CRASH
    return ErrorClass.HOST_OUT_OF_MEMORY if ErrorClass.HOST_OUT_OF_MEMORY in newest_first else ErrorClass.KILLED


def gpu_memory_in_use(message: str) -> str:
    """How much GPU memory the process had, from the message of PyTorch's allocator: "75.31 GiB"; '' if it has none."""
    found = _SIZE.search(message)
    return found[1] if found else ""
