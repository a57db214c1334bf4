"""The process that hosts a generation's TCPStore, so that it listens before the first rank looks for it.

A refused connection costs a rank half a second or more (torch's own back-off), and with the store inside rank 0 every
restart races for it. A fresh process per generation also means a fresh store: nothing stale is ever met.
"""

from __future__ import annotations

import os
import signal

from flyball.process_title import set_title


def serve_store(job: str, address: str, port: int) -> None:
    """Listen until killed. Ends with an exception if the port is taken."""
    from torch._C._distributed_c10d import TCPStore

    set_title(f"{job} rendezvous store", [f"{address}:{port}"])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    store = TCPStore(address, port, None, True, wait_for_workers=False)
    os.write(1, f"listening on {address}:{store.port}\n".encode())
    while True:
        signal.pause()
