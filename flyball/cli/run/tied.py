"""Run a module that ends with its parent: `python -P -m flyball.cli.run.tied PARENT_PID MODULE arguments...`.

The kernel sends SIGTERM when the parent dies, even by SIGKILL. So a killed `flyball run` leaves no host daemon behind,
and the daemon in turn ends its engine and its workers.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

from flyball.batch_step import block_term, leader_of
from flyball.process_start import end_with_parent, prefer_own_packages


def main() -> None:
    parent, module = int(sys.argv[1]), sys.argv[2]
    if leader_of(os.environ):
        block_term()
    end_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # the parent died before the call above
        sys.exit(128 + signal.SIGTERM)
    prefer_own_packages()
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
