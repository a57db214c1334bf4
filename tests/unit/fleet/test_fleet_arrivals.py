"""When faults happen: one stream for each cause, the same in every process."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice
from statistics import fmean

import pytest

from simulator.fleet.arrivals import arrivals, stream
from simulator.fleet.scenario import Cause

NIC = {"name": "nic", "effect": "host"}


def _first(seed: int, count: int, **fields: object) -> list[float]:
    cause = Cause.model_validate({**NIC, "per_1000_node_days": 1.0, **fields})
    return list(islice(arrivals(cause, 0.01, stream(seed, cause.name)), count))


@pytest.mark.parametrize("shape", [0.7, 1.0, 3.0])
def test_the_mean_time_between_faults_is_that_of_the_rate(shape: float) -> None:
    moments = _first(1, 20_000, distribution="weibull", shape=shape)
    assert fmean(b - a for a, b in zip([0.0, *moments], moments, strict=False)) == pytest.approx(100.0, rel=0.05)


def test_streams_differ_by_seed_and_cause() -> None:
    assert _first(1, 3) != _first(2, 3)
    assert _first(1, 3) != _first(1, 3, name="ssd")


def test_a_trace_is_followed() -> None:
    cause = Cause.model_validate({**NIC, "distribution": "trace", "at_s": [30.0, 10.0]})
    assert list(arrivals(cause, 0.0, stream(1, "nic"))) == [10.0, 30.0]


def test_no_rate_no_faults() -> None:
    cause = Cause.model_validate({**NIC, "count": 0})
    assert list(arrivals(cause, 0.0, stream(1, "nic"))) == []


@pytest.mark.processes
def test_another_hash_seed_gives_the_same_stream() -> None:
    code = "from simulator.fleet.arrivals import stream; print(stream(7, 'nic').random())"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "4711"}, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == stream(7, "nic").random()
