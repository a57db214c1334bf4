"""Turns a worker process into what `python script.py` would be, before the user's script begins.

Runs in a process forked from the warm spawner, or as `python -P -m host_daemon.spawning.child` in a fresh interpreter
(a cold start). Unless the script fails, these frames stay below it until the interpreter ends, so atexit handlers and
threads behave as usual. The functions here import nothing late: the daemon's modules are forgotten before the script
runs.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import os
import runpy
import signal
import socket
import stat
import sys
import traceback
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn, TextIO

import msgspec

from flyball.contracts import fault_points, wire
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import ConfigurationError, FlyballError
from flyball.contracts.on_host import worker_env
from flyball.process_title import set_title
from flyball.sdk.stack_file import answer_stack_requests
from flyball.state_folder import write_private
from host_daemon.kernel.processes import INHERITED_DESCRIPTOR
from host_daemon.spawning.spawn_wire import HEADER, PERMIT, Order, StoreOrder, WorkerOrder, WorkerStreamPaths

NOT_PERMITTED_EXIT_CODE = 125
_FRAMES_OF_OURS = (__file__, runpy.__file__, "<frozen runpy>")


def carry_out(order: Order) -> None:
    """Carry out the order in this process. Ends by SystemExit, or returns once the script is done."""
    if isinstance(order, StoreOrder):
        redirect(order.log_path, WorkerStreamPaths())
        serve_store(order.job, order.address, order.port)
        return
    os.environ.clear()
    os.environ.update(order.environment)
    end = _GoodEnd(order.end_file)
    try:
        redirect(order.log_path, order.streams)
        os.chdir(order.workdir)
        fault_points.rearm()
        if order.program:
            _become(order.argv)
        answer_stack_requests(order.environment.get(worker_env.BEACON, ""))
        _title(order)
        _reseed_numpy()
        _forget_daemon()
        _run(order)
    except SystemExit as request:
        if request.code not in (None, 0):
            _fail(request.code)
        end.has_come = True
        raise
    except BaseException as error:  # noqa: BLE001 - this is where the interpreter would print it
        _report(error)
        _fail(1)
    end.has_come = True


class _GoodEnd:
    """Marks a good end in a file, last of all: a daemon that was started meanwhile cannot know the exit status."""

    def __init__(self, path: str) -> None:
        """Call it before the script can register atexit handlers: the first one registered runs last."""
        self.has_come = False
        self._path = path
        self._pid = os.getpid()
        atexit.register(self._write)

    def _write(self) -> None:
        if self.has_come and self._path and os.getpid() == self._pid:  # not in processes that the script forked
            with contextlib.suppress(OSError):
                Path(self._path).touch()


def _fail(code: object) -> NoReturn:
    """End a failed worker at once: an orderly exit of an interpreter with torch takes 0.2 s, and threads that wait for
    dead peers would block it forever."""
    if not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by the script, or its disk is full
            stream.flush()
    os._exit(code & 0xFF)


def _become(argv: tuple[str, ...]) -> NoReturn:
    """Replace this process by a program, so that its pid, signals and exit code are the rank's own."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the program would inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        why = (
            "it needs a first line such as #!/bin/sh"
            if error.errno == errno.ENOEXEC
            else "check that you can run it by hand"
        )
        raise ConfigurationError(f"The program {argv[0]} cannot be run: {error.strerror}.", hint=why) from error


def _title(order: WorkerOrder) -> None:
    """Have ps show whose process this is and what torchrun would show, not the spawner's command line."""
    python = ("python", "-m") if order.module else ("python",)
    set_title(f"{order.job} rank {order.rank} gen {order.generation}", (*python, *order.argv))


def _reseed_numpy() -> None:
    """Ranks forked from one process would draw the same numbers from numpy's unseeded global generator."""
    mtrand = sys.modules.get("numpy.random.mtrand")
    if mtrand is not None:
        mtrand.seed()


def _forget_daemon() -> None:
    """Forget the daemon's modules: the user may have a package of that name beside the script."""
    for name in [n for n in sys.modules if n == "host_daemon" or n.startswith("host_daemon.")]:
        del sys.modules[name]


def _run(order: WorkerOrder) -> None:
    sys.argv = list(order.argv)
    target = order.argv[0]
    if order.module:
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    elif Path(target).is_dir() or target.endswith((".zip", ".pyz")):
        runpy.run_path(target, run_name="__main__")
    else:
        _run_file(Path(target))


def _run_file(script: Path) -> None:
    """Like runpy.run_path, but the module stays `__main__` until the interpreter ends, as under `python script.py`."""
    sys.path.insert(0, str(script.resolve().parent))
    main = ModuleType("__main__")
    main.__file__ = str(script.absolute())
    sys.modules["__main__"] = main
    with io.open_code(str(script.absolute())) as file:
        code = compile(file.read(), main.__file__, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _report(error: BaseException) -> None:
    shown = _without_our_frames(error.__traceback__)
    error.__traceback__ = shown
    _write_error_file(error, shown)
    if isinstance(error, FlyballError):  # it names its cause and the next step; the frames are in the error file
        sys.stderr.write(f"flyball: {type(error).__name__}: {error}\n")
    else:
        sys.excepthook(type(error), error, shown)


def _without_our_frames(tb: TracebackType | None) -> TracebackType | None:
    while tb is not None and tb.tb_frame.f_code.co_filename in _FRAMES_OF_OURS:
        tb = tb.tb_next
    return tb


def _write_error_file(error: BaseException, tb: TracebackType | None) -> None:
    """Write an error file in torch's format, unless the script's own @record already did."""
    path = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if not path.name or path.exists():
        return
    text = "".join(traceback.format_exception(type(error), error, tb))
    message = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {"py_callstack": text, "timestamp": str(int(SystemClock().wall_s()))},
    }
    try:
        write_private(path, msgspec.json.encode({"message": message}), durable=False)  # the daemon reads it at once
    except OSError as failure:  # a full disk must not hide the error itself
        sys.stderr.write(f"flyball: {path} could not be written: {failure}\n")


def _receive(control: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = control.recv(count - len(data))
        if not more:
            os._exit(NOT_PERMITTED_EXIT_CODE)  # the daemon died before it permitted this process to run
        data += more
    return data


def main() -> None:
    """Cold start: order and permission come over the inherited socket."""
    set_title("starting worker", ["host_daemon.spawning.child"])
    with socket.socket(fileno=INHERITED_DESCRIPTOR) as control:
        (length,) = HEADER.unpack(_receive(control, HEADER.size))
        order = wire.decoder_of(Order).decode(_receive(control, length))
        if _receive(control, len(PERMIT)) != PERMIT:
            os._exit(NOT_PERMITTED_EXIT_CODE)
    carry_out(order)


# --- the rendezvous store --------------------------------------------------------------------------------------------

# A process hosts a generation's TCPStore, so that it listens before the first rank connects.
#
# A refused connection costs a rank half a second or more (torch's own back-off), and with the store inside rank 0
# every restart races for it. A fresh process per generation also means a fresh store, without stale keys.


def serve_store(job: str, address: str, port: int) -> None:
    """Listen until killed. Raises an exception if the port is taken."""
    from torch._C._distributed_c10d import TCPStore

    set_title(f"{job} rendezvous store", [f"{address}:{port}"])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    store = TCPStore(address, port, None, True, wait_for_workers=False)
    os.write(1, f"listening on {address}:{store.port}\n".encode())
    while True:
        signal.pause()


# --- standard streams ------------------------------------------------------------------------------------------------

_LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
_NOBODY_THERE = (errno.EIO, errno.EPIPE)  # from a write when the pump is dead: to a terminal, to a pipe


def redirect(log_path: str, streams: WorkerStreamPaths) -> None:
    """Send this process's output where the order says, or to its log if that is gone."""
    log = os.open(log_path, _LOG_FLAGS, 0o600)
    for descriptor, path in ((1, streams.stdout), (2, streams.stderr)):
        device = _open(path, os.O_WRONLY)
        os.dup2(log if device is None else device, descriptor)
        if device is not None:
            os.close(device)
    os.close(log)
    given = _open(streams.stdin, os.O_RDONLY)
    if given is not None:
        os.dup2(given, 0)
        os.close(given)
    if streams.stdout or streams.stderr:
        for name, number in (("stdout", 1), ("stderr", 2)):
            stream = _lasting(getattr(sys, name), number, log_path)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # logs are read while written, and the writer may be killed


def _open(path: str, access: int) -> int | None:
    """Open a terminal for reading and writing, or a pipe or file for `access`. Returns None if it is gone."""
    if not path:
        return None
    try:
        is_terminal = stat.S_ISCHR(Path(path).stat().st_mode)
        # not as the controlling terminal: the pump's death must not raise a signal here
        flags = (os.O_RDWR if is_terminal else access) | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags)
    except OSError:
        return None
    os.set_blocking(descriptor, True)
    return descriptor


def _lasting(old: TextIO, descriptor: int, log_path: str) -> io.TextIOWrapper:
    raw = _Lasting(descriptor, log_path)
    raw.name = old.name  # '<stdout>'
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=old.encoding, errors=old.errors, newline="\n", line_buffering=True
    )


class _Lasting(io.FileIO):
    """A stream that continues in the log when the pump dies, so that a killed pump does not end training."""

    def __init__(self, descriptor: int, log_path: str) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._log_path = log_path

    def write(self, data: Any, /) -> int:  # noqa: ANN401 - any buffer
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _NOBODY_THERE:
                raise
        log = os.open(self._log_path, _LOG_FLAGS, 0o600)
        os.dup2(log, self.fileno())
        os.close(log)
        return super().write(data)


if __name__ == "__main__":
    main()
