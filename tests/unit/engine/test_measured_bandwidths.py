"""What an engine has measured of store and network: the median of the newest, also after a restart, for a day."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from support.clocks.manual import ManualClock

from ckpt_engine.peers.broadcast import bandwidths
from ckpt_engine.peers.broadcast.bandwidths import MeasuredBandwidths, Way

MIB = 1 << 20


class Monotonic:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Monotonic:
    made = Monotonic()
    monkeypatch.setattr(bandwidths, "time", made)
    return made


def transfer(measured: MeasuredBandwidths, time: Monotonic, size_bytes: int, seconds: float) -> None:
    with measured.measuring(Way.STORE) as count:
        time.now += seconds
        count(size_bytes)


def test_the_median_of_the_newest_counts_until_it_is_a_day_old(tmp_path: Path, time: Monotonic) -> None:
    clock = ManualClock(1_000_000.0)
    measured = MeasuredBandwidths(tmp_path / "file", clock)
    assert measured.known(Way.STORE) is None
    for seconds in (50.0, 1.0, 2.0, 1.0, 1.0, 0.5, 1.0, 1.0, 0.1):  # the first of nine is forgotten
        transfer(measured, time, MIB, seconds)
    found = measured.known(Way.STORE)
    assert found is not None and found.bytes_per_s == MIB
    assert measured.known(Way.NETWORK) is None
    clock.now_s += 86_401.0
    assert measured.known(Way.STORE) is None


def test_a_few_bytes_measure_nothing(tmp_path: Path, time: Monotonic) -> None:
    measured = MeasuredBandwidths(tmp_path / "file", ManualClock(1_000_000.0))
    transfer(measured, time, MIB - 1, 1.0)
    assert measured.known(Way.STORE) is None


def test_transfers_at_the_same_time_are_one_measurement(tmp_path: Path, time: Monotonic) -> None:
    measured = MeasuredBandwidths(tmp_path / "file", ManualClock(1_000_000.0))
    begun, go_on = threading.Event(), threading.Event()

    def other() -> None:
        with measured.measuring(Way.STORE) as count:
            begun.set()
            go_on.wait(60.0)
            count(3 * MIB)

    thread = threading.Thread(target=other)
    with measured.measuring(Way.STORE) as count:
        thread.start()
        assert begun.wait(60.0)
        time.now += 2.0
        count(MIB)
    go_on.set()
    thread.join(60.0)
    found = measured.known(Way.STORE)
    assert found is not None and found.bytes_per_s == 2 * MIB


def test_the_next_engine_knows_what_this_one_measured(tmp_path: Path, time: Monotonic) -> None:
    clock = ManualClock(1_000_000.0)
    measured = MeasuredBandwidths(tmp_path / "file", clock)
    transfer(measured, time, 4 * MIB, 2.0)
    measured.store()
    again = MeasuredBandwidths(tmp_path / "file", clock)
    assert again.known(Way.STORE) == measured.known(Way.STORE) is not None


def test_an_unreadable_file_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"{torn")
    assert MeasuredBandwidths(tmp_path / "file", ManualClock(1_000_000.0)).known(Way.STORE) is None
