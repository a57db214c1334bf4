"""`python -m host_daemon`, but with the patience that emulated processors need: nothing else differs.

An engine has 20 s to start, and torch two minutes to be imported, where processors are real.
"""

from __future__ import annotations

import sys

from host_daemon import __main__ as daemon
from host_daemon.engine import engine_process
from host_daemon.spawning import spawner_client

engine_process.START_TIMEOUT_S = 600.0
engine_process.HANG_TIMEOUT_S = 120.0
spawner_client.READY_TIMEOUT_S = 1200.0

if __name__ == "__main__":
    sys.exit(daemon.main())
