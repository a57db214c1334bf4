"""An object of a store is read in parts: ahead in windows, or exactly as it is asked for."""

from __future__ import annotations

from ckpt_engine.tiers.persistent import _OpenObject

MIB = 1 << 20


def test_what_is_read_exactly_costs_no_byte_beside_it() -> None:
    asked: list[tuple[int, int]] = []

    def fetch(begin: int, length: int) -> memoryview:
        asked.append((begin, length))
        return memoryview(bytes([begin // MIB]) * length)

    opened = _OpenObject(100 * MIB, fetch)
    target = memoryview(bytearray(3 * MIB))
    opened.read_exactly(target, 40 * MIB)
    assert asked == [(40 * MIB, 3 * MIB)] and target[0] == 40
    opened.read_exactly(memoryview(bytearray(20 * MIB)), 60 * MIB)
    assert asked[1:] == [(60 * MIB, 8 * MIB), (68 * MIB, 8 * MIB), (76 * MIB, 4 * MIB)], "a request's time is limited"
