"""The warm standby: a single-threaded process with torch imported, from which workers are forked.

The daemon runs its `main` with `--state-dir DIR` and the job's environment, because thread counts set after an import
are ignored. It forks on request, reports how its children ended, and exits when the daemon is gone. Its own
death does not end its children: each is in a session of its own.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

from flyball.batch_step import ignore_term, leader_of
from flyball.process_start import without_collector
from flyball.process_title import set_title
from host_daemon.kernel.processes import INHERITED_DESCRIPTOR
from host_daemon.spawning.child import NOT_PERMITTED_EXIT_CODE, carry_out
from host_daemon.spawning.spawn_wire import (
    HEADER,
    MAX_FRAME_BYTES,
    PERMIT,
    Exited,
    Order,
    Permit,
    Ready,
    Spawn,
    Spawned,
    SpawnerNotice,
    SpawnerRequest,
    frame,
    parsed,
)

# What a training script imports first: a job waits for these.
PRELOAD = ("torch.distributed", "torch.nn.parallel", "torch.optim", "flyball.sdk.trainer")
# What DistributedDataParallel and the optimizers import on first use: as much again as torch itself. A restart must
# find it here, but the first start need not wait for it. It is imported while there are no requests, in pieces, because
# a request waits for the piece being imported.
PRELOAD_LATER = (
    "sympy",
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
)
QUIET_S = 1.0  # after a request, before the next piece; the pieces after that follow at once
UNUSED_S = 10.0  # before the first piece if there was no request: while a job starts, others need the processor
SEND_TIMEOUT_S = 10.0


def _thread_count() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def preload() -> str:
    """Import what workers need. Returns why this process must not be forked, '' if it may be."""
    if _thread_count() > 1:
        return f"the job's environment started {_thread_count() - 1} threads before anything was imported"
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # looking for a GPU must not initialise CUDA
    with without_collector():
        importlib.import_module("torch")
        bare = _thread_count()  # BLAS may have its own threads, which it stops and restarts around a fork
        return _import_all(PRELOAD, bare)


def preload_later() -> Iterator[str]:
    """Import the rest, one piece per turn of this generator, which yields what `preload` returns. It ends early if a
    piece cannot be imported: a script that needs it then gets the error."""
    threads = _thread_count()
    for name in PRELOAD_LATER:
        try:
            with without_collector():
                unfit = _import_all([name], threads)
        except Exception:  # noqa: BLE001 - whatever the module raises; the standby works without it
            traceback.print_exc()
            return
        yield unfit


def _import_all(names: Iterable[str], threads: int) -> str:
    """As `preload`; this process may have up to `threads` threads afterwards."""
    for name in names:
        if importlib.util.find_spec(name) is not None:  # not every build of torch has all of them
            importlib.import_module(name)
    if _thread_count() > threads:
        return f"the preload left {_thread_count() - threads} threads more than a bare import of torch"
    torch = importlib.import_module("torch")
    if torch.cuda.is_initialized() or _cuda_is_lost_in_children():
        return "CUDA was initialised during the preload"
    gc.freeze()  # or the collector would write to, and so copy, every page of every module in every child
    return ""


def _cuda_is_lost_in_children() -> bool:
    """Whether something merely counted the GPUs: torch then refuses CUDA in forked processes."""
    from torch.cuda import _is_in_bad_fork

    pid = os.fork()
    if pid == 0:
        os._exit(int(_is_in_bad_fork()))
    return os.waitpid(pid, 0)[1] != 0


class Spawner:
    """Serves one daemon over its socket."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._later: Iterator[str] = iter(())
        self._quiet_s: float | None = None  # wait for a request before the next piece; None: forever
        self._unfit = ""
        self._received = b""
        self._permits: dict[int, int] = {}  # pid -> the pipe on which it waits for permission to run
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        control.settimeout(SEND_TIMEOUT_S)
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)

    def serve(self, later: Iterator[str] = iter(())) -> Order | None:  # noqa: B008 - an empty one has no state
        """Return None in the spawner once the daemon is gone, and the order in each child that is permitted to run.
        `later` is advanced while there are no requests; it yields why this process must not be forked, '' if it may."""
        self._later, self._quiet_s = later, UNUSED_S
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in self._selector.select(self._quiet_s)}
            if not ready:
                self._preload_piece()
            if self._wake_reader in ready:
                self._wake_reader.recv(4096)
                self._report_exits()
            if self._control in ready:
                requests = self._receive()
                if requests is None:
                    return None
                self._quiet_s = None if self._quiet_s is None else QUIET_S
                for request in requests:
                    if isinstance(request, Permit):
                        self._permit(request)
                    elif self._spawn(request):
                        return request.order

    def _preload_piece(self) -> None:
        unfit = next(self._later, None)
        self._unfit = self._unfit or unfit or ""
        # After the last piece, or one that made this process unfit, there is no next one.
        self._quiet_s = 0.0 if unfit == "" else None

    def send(self, notice: SpawnerNotice) -> None:
        try:
            self._control.sendall(frame(notice))
        except OSError:
            return  # the daemon is gone; the end of its stream shows that too

    def _receive(self) -> list[SpawnerRequest] | None:
        """Return complete requests, or None at the end of the stream."""
        try:
            data = self._control.recv(1 << 16)
        except OSError:
            return None
        if not data:
            return None
        self._received += data
        requests = []
        while len(self._received) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._received)
            if length > MAX_FRAME_BYTES:
                return None
            end = HEADER.size + length
            if len(self._received) < end:
                break
            requests.append(parsed(self._received[HEADER.size : end], SpawnerRequest))
            self._received = self._received[end:]
        return requests

    def _spawn(self, request: Spawn) -> bool:
        """Fork. Returns True in the child, once it is permitted to run."""
        if self._unfit:
            self.send(Spawned(request.request_id, 0, self._unfit))  # the daemon then starts it cold
            return False
        try:
            awaited, given = os.pipe()
        except OSError as error:
            self.send(Spawned(request.request_id, 0, f"pipe: {error.strerror}"))
            return False
        try:
            pid = os.fork()
        except OSError as error:
            os.close(awaited)
            os.close(given)
            self.send(Spawned(request.request_id, 0, f"fork: {error.strerror}"))
            return False
        if pid == 0:
            os.close(given)
            self._become_child()
            if os.read(awaited, 1) != PERMIT:
                os._exit(NOT_PERMITTED_EXIT_CODE)
            os.close(awaited)
            return True
        os.close(awaited)
        self._permits[pid] = given
        self.send(Spawned(request.request_id, pid))
        return False

    def _become_child(self) -> None:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if not leader_of(os.environ):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._selector.close()
        for end in (self._control, self._wake_reader, self._wake_writer):
            end.close()
        for other in self._permits.values():  # or a sibling would wait forever when the spawner dies
            os.close(other)

    def _permit(self, permit: Permit) -> None:
        descriptor = self._permits.pop(permit.pid, None)
        if descriptor is None:
            return
        try:
            if permit.granted:
                os.write(descriptor, PERMIT)
        except BrokenPipeError:
            return  # it was killed while it waited
        finally:
            os.close(descriptor)

    def _report_exits(self) -> None:
        while True:
            try:
                # Report before reaping: if we are killed in between, the daemon inherits the zombie and its status.
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if info is None:
                return
            exited = info.si_code == os.CLD_EXITED
            code, number = (info.si_status, None) if exited else (None, info.si_status)
            self.send(Exited(info.si_pid, code, number, core_dumped=info.si_code == os.CLD_DUMPED))
            self._permit(Permit(info.si_pid, granted=False))
            os.waitpid(info.si_pid, 0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the daemon
    ignore_term(os.environ)  # it ends with the daemon
    set_title("spawner", ["host_daemon.spawning.spawner", *sys.argv[1:]])
    spawner = Spawner(socket.socket(fileno=INHERITED_DESCRIPTOR))
    unfit = preload()
    sys.stdout.flush()
    spawner.send(Ready(unfit))
    order = spawner.serve(preload_later() if not unfit else iter(()))
    if order is not None:
        carry_out(order, is_warm=True)
