"""Many threads that meet a type for the first time all at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

# The interpreter goes from thread to thread as often as it can. With one decoder made by each thread this process is
# killed by SIGSEGV at once, in msgspec.
MEET = """
import sys, threading
import msgspec
from flyball.contracts import wire
from services.record.codec import load

sys.setswitchinterval(1e-6)
for number in range(60):
    inner = msgspec.defstruct(f"Inner{number}", [(f"a{n}", int | None, None) for n in range(20)])
    outer = msgspec.defstruct(f"Outer{number}", [(f"b{n}", list[inner] | None, None) for n in range(20)])
    both = msgspec.defstruct(f"Both{number}", [("one", inner), ("other", outer)])
    packed = msgspec.msgpack.encode({"b3": [{"a5": 1}]})
    meeting = threading.Barrier(4)
    ways = (
        lambda: wire.decode(b'{"b3": [{"a5": 1}], "b19": [{"a19": 1}]}', outer),
        lambda: load('[{"one": {"a5": 1}, "other": {"b3": [{"a5": 1}]}}]', tuple[both, ...]),
        lambda: wire.convert({"b3": [{"a5": 1}]}, outer),
        lambda: wire.unpack(packed, outer),
    )
    threads = [threading.Thread(target=lambda way=way: (meeting.wait(), way())) for way in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("all met")
"""


def test_a_type_that_many_threads_meet_at_once_crashes_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", MEET], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "all met\n", "")
