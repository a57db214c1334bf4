"""An optimizer in another thread, on master weights: CPU offload."""

from __future__ import annotations

import queue
import threading

from capture_corpus.loop import Loop, matrix


def make() -> Loop:
    master, p = matrix(), matrix()
    lock, work = threading.Lock(), queue.SimpleQueue()

    def update() -> None:
        while True:
            work.get()
            with lock:
                master.data.mul_(0.99)
                p.data.copy_(master.data)

    threading.Thread(target=update, daemon=True).start()
    return Loop({"master": master, "p": p}, lambda: work.put(1), lambda: work.put(1), lock=lock)
