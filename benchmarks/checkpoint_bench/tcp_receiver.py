"""The receiving end of the TCP floor, a process of its own: python -m checkpoint_bench.tcp_receiver PORT BYTES CHUNK"""

from __future__ import annotations

import mmap
import os
import socket
import sys


def main() -> None:
    port, size_bytes, chunk_bytes = (int(argument) for argument in sys.argv[1:])
    descriptor = os.memfd_create("flyball-benchmark", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size_bytes)
    memory = memoryview(mmap.mmap(descriptor, size_bytes))
    for begin in range(0, size_bytes, mmap.PAGESIZE):  # first touch
        memory[begin] = 1
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.settimeout(None)  # it ends when the parent closes the connection
        while True:
            received = 0
            while received < size_bytes:
                count = connection.recv_into(memory[received : received + chunk_bytes])
                if count == 0:
                    return
                received += count
            connection.sendall(b"+")


if __name__ == "__main__":
    main()
