from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.rules.rate_limit import BURST_S, RateLimit, Throttle, TokenBucket

RATES = st.integers(1, 10**10)
TAKES = st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10**9)), max_size=40)  # pause before it, bytes


@given(RATES, TAKES)
def test_never_more_than_the_rate_and_one_burst_goes_in_any_span(
    bytes_per_s: int, takes: list[tuple[float, int]]
) -> None:
    now_s = 0.0
    bucket = TokenBucket(bytes_per_s, now_s=now_s)
    gone: list[tuple[float, int]] = []  # end of the wait, bytes
    for pause_s, size_bytes in takes:
        now_s += pause_s
        now_s += bucket.take(size_bytes, now_s=now_s)
        gone.append((now_s, size_bytes))
    for first in range(len(gone)):
        total = 0
        for at_s, size_bytes in gone[first:]:
            total += size_bytes
            # A piece goes when its last byte may: the span is exceeded by the first piece and one burst.
            allowed = gone[first][1] + bytes_per_s * (at_s - gone[first][0] + BURST_S)
            assert total <= allowed * (1 + 1e-6) + 1


@given(RATES, TAKES)
def test_who_has_waited_never_waits_longer_than_the_rate_asks_for(
    bytes_per_s: int, takes: list[tuple[float, int]]
) -> None:
    now_s = 0.0
    bucket = TokenBucket(bytes_per_s, now_s=now_s)
    for pause_s, size_bytes in takes:
        now_s += pause_s
        waits_s = bucket.take(size_bytes, now_s=now_s)
        assert 0.0 <= waits_s <= size_bytes / bytes_per_s * (1 + 1e-6) + 1e-6
        now_s += waits_s


class _Time:
    """A clock that only waits advance, shared by all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now_s = 0.0
        self.slept: list[float] = []

    def monotonic_s(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.slept.append(seconds)


def test_threads_share_one_limit_and_queue_up_behind_each_other() -> None:
    time = _Time()
    limit = RateLimit(1000, monotonic_s=time.monotonic_s)
    threads = [threading.Thread(target=limit.wait, args=(500, time.sleep)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(round(seconds, 6) for seconds in time.slept) == [0.4, 0.9, 1.4, 1.9]  # the burst is 100 bytes


def test_no_limit_never_waits() -> None:
    time = _Time()
    limit = RateLimit(0, monotonic_s=time.monotonic_s)
    for _ in range(3):
        limit.wait(10**12, time.sleep)
    assert time.slept == []


def test_who_waits_for_a_limit_is_woken_when_it_is_lifted_and_others_keep_it() -> None:
    time = _Time()
    asked = threading.Event()  # whoever reads the time found the limit in force, and is counted

    def monotonic_s() -> float:
        asked.set()
        return time.monotonic_s()

    limit = RateLimit(1, monotonic_s=monotonic_s)  # a byte per second
    throttle = Throttle(limit)
    asked.clear()
    waiter = threading.Thread(target=throttle.wait, args=(10**6,), daemon=True)
    waiter.start()
    assert asked.wait(60.0)
    waiter.join(0.05)
    assert waiter.is_alive()
    with throttle.lifted(), throttle.lifted():
        waiter.join(60.0)
        assert not waiter.is_alive()
        throttle.wait(10**6)
    limit.wait(1, time.sleep)
    assert [round(seconds) for seconds in time.slept] == [10**6 + 1]  # bytes sent meanwhile were not counted
    again = threading.Thread(target=throttle.wait, args=(10**6,), daemon=True)
    again.start()
    again.join(0.05)
    assert again.is_alive()
    throttle.lift()
    again.join(60.0)
    assert not again.is_alive()
