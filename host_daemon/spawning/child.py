"""Turns a worker process into what `python script.py` would be, before the user's script begins.

Runs in a process forked from the warm spawner, or in a fresh interpreter (a cold start). Unless the script fails, these
frames stay below it until the interpreter ends, so atexit handlers and threads behave as usual. The functions here
import nothing late: the daemon's modules are forgotten before the script runs.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import errno
import io
import os
import runpy
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

import msgspec

from flyball.batch_step import end_own_children, ignore_term, leader_of
from flyball.contracts import fault_points
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import ConfigurationError, FlyballError
from flyball.contracts.on_host import worker_env
from flyball.process_title import set_title
from flyball.sdk.rank_claim import own_mark
from flyball.sdk.stack_file import answer_stack_requests
from flyball.state_folder import write_private
from host_daemon.kernel.processes import INHERITED_DESCRIPTOR, ignores_signal, read_stat
from host_daemon.spawning import early_settings
from host_daemon.spawning.spawn_wire import (
    HEADER,
    PERMIT,
    Order,
    StoreOrder,
    WorkerOrder,
    WorkerStreamPaths,
    frame,
    interpreter_of,
    parsed,
)
from host_daemon.spawning.streams import redirect

NOT_PERMITTED_EXIT_CODE = 125
THREADS_AFTER_EXIT_S = 30.0  # a script that ends with a code of its own may still be uploading
THREADS_AFTER_ERROR_S = 10.0  # a restart waits for it
_FRAMES_OF_OURS = (__file__, runpy.__file__, "<frozen runpy>")


def carry_out(order: Order, *, is_warm: bool = False) -> None:
    """Carry out the order in this process. Ends by SystemExit, or returns once the script is done. `is_warm`: torch was
    imported before the script begins."""
    if isinstance(order, StoreOrder):
        redirect(order.log_path, WorkerStreamPaths())
        serve_store(order.job, order.address, order.port)
        return
    if is_warm and not order.program and (setting := early_settings.found_in(_file_of(order))):
        _start_cold(order, setting)
    os.environ.clear()
    os.environ.update(order.environment)
    ignore_term(os.environ)
    if leader_of(os.environ):
        end_own_children(_ignores_term)
    end = _GoodEnd(order.end_file)
    try:
        os.environ[worker_env.WORKER] = own_mark()
        redirect(order.log_path, order.streams)
        os.chdir(order.workdir)
        fault_points.rearm()
        if order.program:
            _become(order.argv)
        answer_stack_requests(order.environment.get(worker_env.BEACON, ""))
        _title(order)
        _reseed_numpy()
        if is_warm:
            _name_late_settings(order)
        _forget_daemon()
        _run(order)
    except SystemExit as request:
        if request.code not in (None, 0):
            _fail(request.code, THREADS_AFTER_EXIT_S)
        end.has_come = True
        raise
    except BaseException as error:  # noqa: BLE001 - this is where the interpreter would print it
        _report(error)
        _fail(1, THREADS_AFTER_ERROR_S)
    end.has_come = True


def _ignores_term(pid: int) -> bool:
    """Whether this is a child of this process, and ignores SIGTERM."""
    stat = read_stat(pid)
    return stat is not None and stat.parent == os.getpid() and ignores_signal(pid, signal.SIGTERM)


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


def _fail(code: object, threads_s: float) -> NoReturn:
    """End a failed worker as python does, and with a deadline: threads that wait for dead peers would block it forever,
    and an orderly exit of an interpreter with torch takes 0.2 s more."""
    if not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    _finish_threads(code, threads_s)
    atexit._run_exitfuncs()
    _end(code)


def _end(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by the script, or its disk is full
            stream.flush()
    os._exit(code & 0xFF)


def _finish_threads(code: int, limit_s: float) -> None:
    """Wait for threads that are no daemons, and for the work of executors; beyond the limit, end without them."""
    if threading.active_count() == 1:
        return
    done = threading.Event()

    def watch() -> None:
        if done.wait(limit_s):
            return
        own = (threading.main_thread(), threading.current_thread())
        names = sorted(one.name for one in threading.enumerate() if not one.daemon and one not in own)
        sys.stderr.write(f"flyball: cut off {limit_s:g} s after the script's end: {', '.join(names)}\n")
        atexit._run_exitfuncs()
        _end(code)

    with contextlib.suppress(RuntimeError):  # no more threads may be started: nothing is waited for
        threading.Thread(target=watch, name="flyball: end", daemon=True).start()
        threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter's own end does
    done.set()


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


def _file_of(order: WorkerOrder) -> Path:
    """The file that runs first, as far as it lies in the working folder or is named."""
    workdir, target = Path(order.workdir), order.argv[0]
    place = workdir.joinpath(*target.split(".")) if order.module else workdir / target
    if place.is_dir():
        return place / "__main__.py"
    return place.with_suffix(".py") if order.module else place


def _start_cold(order: WorkerOrder, setting: str) -> None:
    """Become a fresh interpreter with the same order. The script has not begun. Returns if that is not possible."""
    if order.rank == 0 and order.environment.get("TORCHELASTIC_RESTART_COUNT") == "0":
        redirect(order.log_path, order.streams)
        sys.stderr.write(
            f"flyball: {order.argv[0]} sets {setting} before it imports torch, so its ranks start without the warm "
            "standby, which takes longer (set it in the shell to prevent that)\n"
        )
    with contextlib.suppress(OSError):
        memory = os.memfd_create("order")
        with open(memory, "wb", closefd=False) as file:
            file.write(frame(order) + PERMIT)
        os.lseek(memory, 0, os.SEEK_SET)
        os.dup2(memory, INHERITED_DESCRIPTOR)
        os.set_inheritable(INHERITED_DESCRIPTOR, True)  # it may have had that number already
        os.execve(sys.executable, interpreter_of(__name__), order.environment)


def _name_late_settings(order: WorkerOrder) -> None:
    """Once the script imports torch, say what it has set in vain."""
    usual, before, is_first = builtins.__import__, order.environment, order.rank == 0

    def watching(name: str, *more: Any, **named: Any) -> ModuleType:  # noqa: ANN401 - Python's own
        if name.partition(".")[0] == "torch" and builtins.__import__ is watching:
            builtins.__import__ = usual
            late = early_settings.changed(before, os.environ)
            if late and is_first:
                sys.stderr.write(
                    f"flyball: {', '.join(late)}: set too late, since torch is there when a script begins: set it in "
                    "the shell, or at the top of the script itself\n"
                )
        return usual(name, *more, **named)

    builtins.__import__ = watching


def _run(order: WorkerOrder) -> None:
    sys.argv = list(order.argv)
    # What torchrun would have started: programs start themselves again with it.
    sys.orig_argv = [sys.executable, "-u", *(["-m"] if order.module else []), *order.argv]
    target = order.argv[0]
    if order.module:
        _add_to_path(Path.cwd())
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    elif Path(target).is_dir():
        sys.path.insert(0, target)
        _run_file(Path(target) / "__main__.py")
    elif target.endswith((".zip", ".pyz")):
        runpy.run_path(target, run_name="__main__")
    else:
        _add_to_path(Path(target).resolve().parent)
        _run_file(Path(target))


def _add_to_path(folder: Path) -> None:
    if not sys.flags.safe_path:  # PYTHONSAFEPATH
        sys.path.insert(0, str(folder))


def _run_file(script: Path) -> None:
    """Like runpy.run_path, but the module stays `__main__` until the interpreter ends, as under `python script.py`."""
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
    text = text.encode(errors="backslashreplace").decode()  # a path may have bytes that are not UTF-8
    message = {
        "message": f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode(),
        "extraInfo": {"py_callstack": text, "timestamp": str(int(SystemClock().wall_s()))},
    }
    try:
        write_private(path, msgspec.json.encode({"message": message}), durable=False)  # the daemon reads it at once
    except OSError as failure:  # a full disk must not hide the error itself
        sys.stderr.write(f"flyball: {path} could not be written: {failure}\n")


def _receive(count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = os.read(INHERITED_DESCRIPTOR, count - len(data))
        if not more:
            os._exit(NOT_PERMITTED_EXIT_CODE)  # the daemon died before it permitted this process to run
        data += more
    return data


def main() -> None:
    """Cold start: order and permission come over the inherited socket, or from the memory that a warm start left."""
    set_title("starting worker", ["host_daemon.spawning.child"])
    (length,) = HEADER.unpack(_receive(HEADER.size))
    order = parsed(_receive(length), Order)
    if _receive(len(PERMIT)) != PERMIT:
        os._exit(NOT_PERMITTED_EXIT_CODE)
    os.close(INHERITED_DESCRIPTOR)
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
    ignore_term(os.environ)  # it is killed
    store = TCPStore(address, port, None, True, wait_for_workers=False)
    os.write(1, f"listening on {address}:{store.port}\n".encode())
    while True:
        signal.pause()
