"""A shard's room in plain memory, where the engine has a slot."""

from __future__ import annotations


class MemoryTarget:
    """Takes what is written at its place."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def __len__(self) -> int:
        return len(self._memory)

    def write(self, data: memoryview, offset: int) -> None:
        self._memory[offset : offset + len(data)] = data
