"""What a worker process does before the user's script: become what `python script.py` would be.

Runs in a process forked from the warm spawner, or as `python -P -m host_daemon.child` in a fresh interpreter (a cold
start). Its frames stay below the script's until the interpreter ends, so that atexit handlers and threads are treated
as always, unless it failed. The functions here import nothing late: the daemon's own modules are forgotten before the
script runs.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import runpy
import socket
import sys
import traceback
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn

import msgspec

from flyball.contracts import fault_points, wire
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import FlyballError
from host_daemon.processes import INHERITED_DESCRIPTOR
from host_daemon.spawn_wire import HEADER, LEAVE, Order, StoreOrder, WorkerOrder
from host_daemon.store_server import serve_store

NO_LEAVE_EXIT_CODE = 125
_FRAMES_OF_OURS = (__file__, runpy.__file__, "<frozen runpy>")


def carry_out(order: Order) -> None:
    """Run what was ordered, in this process; ends by SystemExit, or by returning when the script is through."""
    if isinstance(order, StoreOrder):
        _redirect(order.log_path)
        serve_store(order.address, order.port)
        return
    os.environ.clear()
    os.environ.update(order.environment)
    try:
        _redirect(order.log_path)
        os.chdir(order.workdir)
        fault_points.rearm()
        _name_process(f"r{order.rank} {Path(order.argv[0]).name}")
        _reseed_numpy()
        _forget_daemon()
        _run(order)
    except SystemExit as request:
        if request.code not in (None, 0):
            _fail(request.code)
        raise
    except BaseException as error:  # noqa: BLE001 - this is where the interpreter would print it
        _report(error)
        _fail(1)


def _fail(code: object) -> NoReturn:
    """End a failed worker at once: taking down an interpreter with torch in it costs 0.2 s, and threads that wait for
    dead peers would hold it up for ever."""
    if not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by the script, or its disk is full
            stream.flush()
    os._exit(code & 0xFF)


def _redirect(log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a log is read while it is written, and its writer may be killed


def _name_process(name: str) -> None:
    """What ps and top show, in place of the spawner's name."""
    with contextlib.suppress(OSError):  # a convenience, and some containers mount /proc read-only
        Path("/proc/self/comm").write_text(name[:15])


def _reseed_numpy() -> None:
    """Ranks forked from one process would draw the same numbers from numpy's unseeded global generator."""
    mtrand = sys.modules.get("numpy.random.mtrand")
    if mtrand is not None:
        mtrand.seed()


def _forget_daemon() -> None:
    """A user may well have a package of that name beside the script."""
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
    """As runpy.run_path, but the module stays `__main__` until the interpreter ends, as under `python script.py`."""
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
    if isinstance(error, FlyballError):  # it says its cause and the next step; the frames are in the error file
        sys.stderr.write(f"flyball: {type(error).__name__}: {error}\n")
    else:
        sys.excepthook(type(error), error, shown)


def _without_our_frames(tb: TracebackType | None) -> TracebackType | None:
    while tb is not None and tb.tb_frame.f_code.co_filename in _FRAMES_OF_OURS:
        tb = tb.tb_next
    return tb


def _write_error_file(error: BaseException, tb: TracebackType | None) -> None:
    """The format of torch's error files, unless the script's own @record was faster."""
    path = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if not path.name or path.exists():
        return
    text = "".join(traceback.format_exception(type(error), error, tb))
    message = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {"py_callstack": text, "timestamp": str(int(SystemClock().wall_s()))},
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(msgspec.json.encode({"message": message}))
        temporary.rename(path)
    except OSError as failure:  # a full disk must not hide the error itself
        sys.stderr.write(f"flyball: {path} could not be written: {failure}\n")


def _receive(control: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = control.recv(count - len(data))
        if not more:
            os._exit(NO_LEAVE_EXIT_CODE)  # the daemon died before it gave leave
        data += more
    return data


def main() -> None:
    """A cold start: the order and the leave come over the inherited socket."""
    with socket.socket(fileno=INHERITED_DESCRIPTOR) as control:
        (length,) = HEADER.unpack(_receive(control, HEADER.size))
        order = wire.decoder_of(Order).decode(_receive(control, length))
        if _receive(control, len(LEAVE)) != LEAVE:
            os._exit(NO_LEAVE_EXIT_CODE)
    carry_out(order)


if __name__ == "__main__":
    main()
