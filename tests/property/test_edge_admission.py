"""In whatever order reports arrive, an honest daemon is never stuck, and nothing is accepted twice."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from flyball.contracts.cluster import HostFacts
from flyball.contracts.errors import FlyballError, WrongClock
from flyball.contracts.reports.signals import EngineStatus, Report
from flyball.contracts.wire import WIRE_VERSION
from services.sensor.rules.admission import Admission

START = 1_700_000_000.0
FACTS = HostFacts("host-a", "10.0.0.1", "", "", 0, "", 1)

events = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.floats(0.0, 90.0)),
        st.tuples(st.just("jump"), st.floats(-200_000.0, 200_000.0)),  # the host's clock is set
        st.tuples(st.just("restart"), st.just(0)),
        st.tuples(st.just("send"), st.just(0)),
        st.tuples(st.just("replay"), st.integers(0, 30)),  # an earlier report arrives again
    ),
    max_size=40,
)


class Daemon:
    """Numbers its reports, and adopts the supervisor's time from refusals, like host_daemon."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = f"i{incarnation}"
        self.succeeds = tuple(f"i{before}" for before in range(incarnation - 1, max(incarnation - 5, -1), -1))
        self.seq = 0
        self.offset_s = 0.0

    def report(self, host_time: float) -> Report:
        self.seq += 1
        return Report(
            version=WIRE_VERSION,
            incarnation=self.incarnation,
            sent_at=host_time + self.offset_s,
            interval_s=1.0,
            facts=FACTS,
            engine=EngineStatus(True),
            succeeds=self.succeeds,
            seq=self.seq,
        )


@settings(max_examples=150, deadline=None)
@given(events)
def test_an_honest_daemon_is_accepted_and_a_repetition_is_not(course: list[tuple[str, float]]) -> None:
    admission = Admission()
    now_s, jump_s = 0.0, 0.0
    daemon, restarts = Daemon(0), 0
    sent: list[Report] = []

    def arrive(report: Report) -> FlyballError | None:
        before = msgspec.structs.asdict(report)
        try:
            admission.check(report, host_id="host-a", now=START + now_s, now_s=now_s)
        except FlyballError as error:
            return error
        finally:
            assert msgspec.structs.asdict(report) == before
        admission.accepted(report, now_s=now_s)
        return None

    for kind, value in course:
        if kind == "wait":
            now_s += value
        elif kind == "jump":
            jump_s = value
        elif kind == "restart":
            restarts += 1
            daemon = Daemon(restarts)
        elif kind == "send":
            host_time = START + now_s + jump_s
            sent.append(daemon.report(host_time))
            error = arrive(sent[-1])
            if isinstance(error, WrongClock):
                daemon.offset_s = error.server_time - host_time
                sent.append(daemon.report(host_time))
                error = arrive(sent[-1])
            assert error is None
        elif kind == "replay" and sent:
            assert arrive(sent[int(value) % len(sent)]) is not None
