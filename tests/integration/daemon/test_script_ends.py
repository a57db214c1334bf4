"""How a script that fails ends: as under python, with a deadline."""

from __future__ import annotations

import subprocess
import sys

END = """
import atexit, threading, time
from host_daemon.spawning import child
atexit.register(print, "at exit", flush=True)
threading.Thread(target=time.sleep, args=(600,), name="stuck").start()
def until_main_ends():
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    print("saw the end", flush=True)
threading.Thread(target=until_main_ends).start()
child._fail(3, 1.0)
"""


def test_threads_that_never_end_are_cut_off_at_the_deadline() -> None:
    done = subprocess.run([sys.executable, "-c", END], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (3, "saw the end\nat exit\n")
    assert done.stderr == "flyball: cut off 1 s after the script's end: stuck\n"
