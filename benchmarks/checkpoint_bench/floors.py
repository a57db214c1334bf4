"""Measures the machine's own limits, beside every engine: copies in memory, sequential writes, loopback TCP."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

from checkpoint_bench.measure import seconds
from checkpoint_bench.state import size_bytes

WRITE_BYTES = 8 << 20  # per write call
RECEIVE_BYTES = 4 << 20
_ALIGNMENT = 4096


class SharedBuffer:
    """A warm shared mapping as large as the state, with a view for each tensor. Its file has no name, so nothing stays
    behind."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.size_bytes = -(-size_bytes(tensors) // _ALIGNMENT) * _ALIGNMENT
        self.descriptor = os.memfd_create("flyball-benchmark", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, self.size_bytes)
        self.memory = mmap.mmap(self.descriptor, self.size_bytes)
        whole = torch.frombuffer(self.memory, dtype=torch.uint8)
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # source, view
        begin = 0
        for tensor in sorted((t.detach() for t in tensors), key=lambda t: -t.element_size()):
            end = begin + tensor.numel() * tensor.element_size()
            self._pairs.append((tensor, whole[begin:end].view(tensor.dtype).view(tensor.shape)))
            begin = end
        self.copy()  # first touch

    def memcpy(self) -> None:
        """Copy the state into the mapping, by memcpy in this thread."""
        for source, view in self._pairs:
            if not source.is_contiguous():
                raise ValueError("memcpy needs contiguous tensors")
            ctypes.memmove(view.data_ptr(), source.data_ptr(), source.numel() * source.element_size())

    def copy(self) -> None:
        """Copy the state into the mapping, by torch's copy with its present number of threads."""
        for source, view in self._pairs:
            view.copy_(source)

    def memcpy_s(self) -> float:
        return seconds(self.memcpy)

    def copy2_s(self) -> float:
        """Return the seconds that `torch.Tensor.copy_` takes with two threads."""
        threads = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            return seconds(self.copy)
        finally:
            torch.set_num_threads(threads)


class DiskWrite:
    """Writes a new file of the buffer's size sequentially, then calls fsync."""

    def __init__(self, folder: Path, buffer: SharedBuffer) -> None:
        self._path = folder / "sequential"
        self._buffer = buffer

    def buffered_s(self) -> float:
        """Return the seconds of a write through the page cache."""
        return self._write_s(0)

    def direct_s(self) -> float:
        """Return the seconds of a write with O_DIRECT. Raises OSError if the file system does not support it."""
        return self._write_s(os.O_DIRECT)

    def _write_s(self, flags: int) -> float:
        view = memoryview(self._buffer.memory)

        def write() -> None:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o600)
            try:
                written = 0
                while written < len(view):
                    written += os.write(descriptor, view[written : written + WRITE_BYTES])
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

        try:
            return seconds(write)
        finally:
            self._path.unlink(missing_ok=True)
            view.release()


class LoopbackTransfer:
    """Sends with sendfile from this process; another process receives into a warm shared mapping."""

    def __init__(self, buffer: SharedBuffer) -> None:
        self._buffer = buffer
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(60)
            command = [sys.executable, "-m", "checkpoint_bench.tcp_receiver", str(server.getsockname()[1])]
            self._receiver = subprocess.Popen([*command, str(buffer.size_bytes), str(RECEIVE_BYTES)])
            self._socket, _ = server.accept()
        self._socket.settimeout(None)  # sendfile needs a blocking socket; it fails once the receiver is gone

    def transfer_s(self) -> float:
        """Return the seconds until the receiver has confirmed all bytes."""
        return seconds(self._transfer)

    def _transfer(self) -> None:
        sent = 0
        while sent < self._buffer.size_bytes:
            sent += os.sendfile(self._socket.fileno(), self._buffer.descriptor, sent, self._buffer.size_bytes - sent)
        if self._socket.recv(1) != b"+":
            raise ConnectionError("the receiver of the TCP floor ended")

    def close(self) -> None:
        self._socket.close()
        self._receiver.wait(30)
