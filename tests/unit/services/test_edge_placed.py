"""A host may report only the ranks that it was given."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from support.clocks.loops import run_skipping
from support.clocks.manual import ManualClock
from support.hosts.reports import report as made_report
from support.servers.ingests import make_ingest

from flyball.contracts.checkpoints import StoredPoint
from flyball.contracts.cluster import Activity, HostRanks, Phase, RankStatus
from flyball.contracts.decisions import GenerationPlan
from flyball.contracts.reports.rank_columns import CompletedSteps, RankSteps, statuses_in, steps_together
from flyball.contracts.reports.signals import (
    RankMarks,
    RankStalled,
    ReplicasDiffer,
    Report,
    ReportReply,
    Signal,
    SignalBody,
)
from flyball.contracts.reports.training_health import LossDiverged, LossValue, RankCompute, RankLoss
from flyball.contracts.wire import decode, encode
from services.sensor.detector.watched_job import LearnedJob
from services.sensor.reports.report_queue import ReportQueue
from services.sensor.rules import early_steps
from services.sensor.rules.early_steps import EarlySteps
from services.sensor.rules.placed import Placed, given_in
from services.sensor.rules.step_log import StepSummary
from services.store.reports.placements import Placements

HUGE = 2**31 - 1
PLAN = GenerationPlan("job", 3, 2, (HostRanks("a", "", "", (0, 1)), HostRanks("b", "", "", (2, 3))), {}, (), 0)
PLACED = Placed({("job", 3): given_in(PLAN)})


def status(
    rank: int,
    *,
    generation: int = 3,
    step: int = 5,
    age_s: float = 0.1,
    job: str = "job",
    phase: Phase = Phase.STEP,
    activity: Activity = Activity.UNKNOWN,
) -> RankStatus:
    activity_s = age_s if activity else 0.0
    return RankStatus(job, generation, rank, 100 + rank, phase, step, age_s, activity, activity_s)


def steps(rank: int, *, generation: int = 3, step: int = 5) -> RankSteps:
    return RankSteps("job", generation, rank, step, (900.0 + step,))


def marks(rank: int, *, generation: int = 3) -> RankMarks:
    return RankMarks("job", generation, rank, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def report(host_id: str = "a", **parts: Any) -> Report:  # noqa: ANN401 - fields of Report
    return made_report(host_id, **{"incarnation": f"inc-{host_id}", "domain": ""} | parts)


def ranks_in(reported: Report) -> list[RankStatus]:
    return list(statuses_in(reported.workers, reported.progress))


def test_what_a_host_may_say_is_left_as_it_is() -> None:
    plain = report(ranks=(status(0), status(1)), steps=(steps(0), steps(1)))
    for reported in (plain, msgspec.structs.replace(plain), report(steps=(steps(1),)), report()):
        received, stored = PLACED.split(reported)
        assert received is reported
        assert stored is reported


def test_other_ranks_and_generations_that_were_never_granted_are_ignored() -> None:
    lies = report(
        ranks=(status(0), status(2, phase=Phase.EVAL), status(0, generation=HUGE), status(0, job="other")),
        steps=(steps(1), steps(3)),
    )
    for _ in range(2):
        received, stored = PLACED.split(lies)
        assert ranks_in(received) == [status(0)]
        assert received.completed == stored.completed == steps_together([steps(1)])
        assert ranks_in(stored) == ranks_in(lies)  # the controller sees workers that should not be there
    assert PLACED.split(report("nobody", ranks=(status(0),)))[0].workers == ()


def test_losses_and_times_of_other_ranks_are_ignored() -> None:
    losses = tuple(RankLoss("job", 3, rank, 5, 1.0) for rank in (1, 2))
    computes = tuple(RankCompute("job", 3, rank, 9, 0.1) for rank in (1, 2))
    assert [loss.rank for loss in PLACED.own_losses("a", losses)] == [1]
    assert [compute.rank for compute in PLACED.own_computes("a", computes)] == [1]
    assert PLACED.own_losses("c", losses) == ()


def test_ranks_need_not_follow_each_other() -> None:
    apart = Placed({("job", 3): given_in(msgspec.structs.replace(PLAN, hosts=(HostRanks("a", "", "", (0, 5)),)))})
    assert ranks_in(apart.split(report(ranks=tuple(map(status, (0, 3, 5)))))[0]) == [status(0), status(5)]


def test_what_is_reported_once_of_a_generation_that_is_new_here_passes() -> None:
    early = report(ranks=(status(0, generation=4),), steps=(steps(0, generation=4),), marks=(marks(0, generation=4),))
    received, stored = PLACED.split(early)
    assert (received.workers, received.progress, received.completed) == ((), (), ())
    assert (stored.completed, stored.marks) == (early.completed, early.marks)
    assert PLACED.unknown(early) == ("job", 4)
    assert PLACED.early_steps(stored.completed) == early.completed
    many = report(steps=(steps(0, generation=4), steps(0, generation=5)), marks=(marks(2), marks(1)))
    assert PLACED.split(many)[1].completed == steps_together([steps(0, generation=4)])
    assert PLACED.split(many)[1].marks == (marks(1),)


class Rig:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.queue = ReportQueue(max_items=1000, max_size_bytes=1_000_000)
        self.ingest = make_ingest(self.queue, self.clock)

    def know(self, placements: Placements, *, until_read: int = 1) -> None:
        """Let the sensor read these placements."""

        async def read() -> None:
            loop, came = asyncio.get_running_loop(), asyncio.Semaphore(0)

            def look() -> Placements:
                loop.call_soon_threadsafe(came.release)
                return placements

            reading = asyncio.create_task(self.ingest.run_placements(look))
            for _ in range(until_read + 1):  # earlier placements are taken in
                await asyncio.wait_for(came.acquire(), 60.0)
            reading.cancel()

        run_skipping(read())

    def learned(self) -> dict[str, LearnedJob]:
        """What the sensor stores of what it learned."""

        async def write() -> Mapping[str, LearnedJob]:
            loop, reported = asyncio.get_running_loop(), asyncio.Queue[Mapping[str, LearnedJob]]()
            writing = asyncio.create_task(
                self.ingest.run_learned(lambda known, _: loop.call_soon_threadsafe(reported.put_nowait, known) and None)
            )
            try:
                return await asyncio.wait_for(reported.get(), 60.0)
            finally:
                writing.cancel()

        return dict(run_skipping(write()))

    def say(self, host_id: str, **parts: object) -> ReportReply:
        return self.ingest.accept(report(host_id, sent_at=self.clock.now_s, **parts), host_id=host_id, size_bytes=10)

    def pass_a_second(self) -> None:
        for _ in range(20):
            self.clock.now_s += 0.05
            self.ingest.tick(self.clock.now_s)

    def stalled(self) -> list[RankStalled]:
        """Each once: uncommitted signals are handed on again and again."""
        items = self.queue.take(max_hosts=0, timeout_s=0.0).signals
        reported = {s.seq: s.body for item in items for s in item.signals}
        return [body for body in reported.values() if isinstance(body, RankStalled)]


@pytest.mark.parametrize("lie", [{"generation": HUGE}, {"step": 2**40}])
def test_a_stall_is_found_whatever_another_host_claims(lie: Mapping[str, int]) -> None:
    rig = Rig()
    rig.know(Placements({}, PLACED))
    for step in range(30):
        for host_id, ranks in (("a", (0, 1)), ("b", (2, 3))):
            reported = tuple(status(rank, step=step) for rank in ranks)
            rig.say(host_id, ranks=reported, steps=tuple(steps(rank, step=step) for rank in ranks))
        rig.say("c", ranks=(status(0, **lie),))  # type: ignore[arg-type]
        rig.pass_a_second()
    for late in range(60):
        for host_id, ranks in (("a", (0, 1)), ("b", (2, 3))):
            doing = {3: Activity.STOPPED}
            reported = tuple(status(r, step=29, age_s=float(late), activity=doing.get(r, Activity.IDLE)) for r in ranks)
            rig.say(host_id, ranks=reported)
        rig.say("c", ranks=(status(0, **lie, age_s=0.0),))  # type: ignore[arg-type]
        rig.pass_a_second()
    (found,) = rig.stalled()
    assert (found.generation, found.step, found.ranks) == (3, 29, (3,))


@pytest.mark.parametrize(("here", "is_found"), [("ab", True), ("a", False)])
def test_ranks_that_wait_may_wait_for_those_that_report_to_another_sensor(here: str, is_found: bool) -> None:
    rig = Rig()
    rig.know(Placements({}, PLACED))
    for late in range(400):
        for host_id in here:
            step, age_s = min(late, 29), max(0.0, late - 29.0)
            ranks = {"a": (0, 1), "b": (2, 3)}[host_id]
            reported = tuple(status(r, step=step, age_s=age_s, activity=Activity.IDLE) for r in ranks)
            rig.say(host_id, ranks=reported, steps=tuple(steps(r, step=step) for r in ranks) if late < 30 else ())
        rig.clock.now_s += 1.0
    assert bool(rig.stalled()) is is_found


def test_a_sensor_continues_with_what_its_predecessor_stored() -> None:
    first, second = Rig(), Rig()
    first.know(Placements({}, PLACED))
    for step in range(30):
        first.say("a", ranks=(status(0, step=step), status(1, step=step)), steps=(steps(0, step=step),))
        first.pass_a_second()
    stored = first.learned()
    assert stored["job"].stepped_to == 29 and stored["job"].pace.steps_seen > 20
    second.say("a", ranks=(status(0, step=29), status(1, step=29)))
    second.know(Placements({}, PLACED, learned=stored))
    second.pass_a_second()
    second.say("a", ranks=(status(0, step=29), status(1, step=29)))
    assert second.learned()["job"].pace.steps == stored["job"].pace.steps


def test_replies_name_what_is_stored_of_the_jobs_that_a_host_runs() -> None:
    rig = Rig()
    rig.know(Placements({}, PLACED, stored_points={"job": StoredPoint(20, 2), "another": StoredPoint(5, 1)}))
    reported = rig.say("a", ranks=(status(0), status(1)))
    assert reported.stored_points == {"job": StoredPoint(20, 2)}
    assert decode(encode(reported), ReportReply) == reported
    rig.clock.now_s += 1.0
    assert rig.say("a").stored_points == {}, "it runs nothing"
    assert rig.say("c", ranks=(status(0),)).stored_points == {}, "of ranks of another host"
    other = Rig()
    other.know(Placements({}, PLACED))
    assert other.say("a", ranks=(status(0),)) == ReportReply({}), "of a job that has no such tier"


def test_a_generation_that_is_new_to_the_sensor_is_looked_for_at_once() -> None:
    rig = Rig()
    rig.know(Placements({}, PLACED))
    rig.say("a", ranks=(status(0, generation=4),))
    assert rig.ingest._is_generation_new.is_set()
    rig.ingest._is_generation_new.clear()
    rig.clock.now_s += 1.0
    rig.say("a", ranks=(status(0, generation=4),))
    assert not rig.ingest._is_generation_new.is_set()  # and once: a host that lies is answered at the usual pace


NEXT = msgspec.structs.replace(PLAN, generation=4, parent=3)
KNOWN = Placed({("job", 3): given_in(PLAN), ("job", 4): given_in(NEXT)})


def summed_up(rig: Rig, *, after_s: float = 1.0) -> list[StepSummary]:
    """The summaries up to then."""
    rig.clock.now_s += after_s
    rig.ingest.tick(rig.clock.now_s)
    return list(rig.queue.take(max_hosts=1000, timeout_s=0.0).steps)


def test_steps_of_a_generation_are_not_logged_before_its_hosts_are_known() -> None:
    rig = Rig()
    rig.ingest.know(PLACED)
    rig.say("liar", steps=(steps(0, generation=4, step=60), RankSteps("job", 4, 1, 5, (990.0,))))
    rig.say("b", steps=(steps(0, generation=4, step=55), steps(2, generation=4), steps(3, generation=4)))
    rig.say("a", steps=(steps(0, generation=4), steps(1, generation=4)))
    assert summed_up(rig) == []
    rig.ingest.know(KNOWN)
    (summary,) = summed_up(rig)
    assert (summary.generation, summary.first_step, summary.ranks, summary.slowest_step) == (4, 5, 4, 5)
    assert summary.completed_at == (905.0,), "times invented by others do not count"
    rig.say("liar", steps=(steps(1, generation=4, step=61),))
    rig.say("a", steps=(steps(0, generation=4, step=6), steps(1, generation=4, step=6)))
    (summary,) = summed_up(rig)
    assert (summary.first_step, len(summary.completed_at), summary.ranks, summary.slowest_step) == (6, 1, 4, 5)


def test_moments_of_a_generation_that_is_not_known_hold_back_nobody_elses() -> None:
    rig = Rig()
    rig.ingest.know(PLACED)
    made_up = RankMarks("job", 4, 0, 1.0, 1.0, 1.0, 1.0, 1.0, 1e6)
    rig.say("liar", marks=(made_up,))
    rig.ingest.know(KNOWN)
    rig.say("a", marks=(marks(0, generation=4),))
    reported = rig.queue.take(max_hosts=1000, timeout_s=0.0).reports
    assert {item.report.facts.host_id: item.report.marks for item in reported if item.report is not None} == {
        "liar": (made_up,),  # the store knows which host was given what
        "a": (marks(0, generation=4),),
    }
    assert summed_up(rig) == []


def test_the_last_steps_of_a_job_that_has_just_ended_are_logged() -> None:
    rig = Rig()
    rig.ingest.know(PLACED)
    rig.say("a", steps=(steps(0), steps(1)))
    summed_up(rig)
    rig.ingest.know(Placed({}))
    rig.clock.now_s += 0.1
    rig.say("a", steps=(steps(0, step=6), steps(1, step=6)))
    rig.say("b", steps=(steps(0, step=60),))
    (summary,) = summed_up(rig)
    assert (summary.first_step, len(summary.completed_at), summary.slowest_step) == (6, 1, 6)


def test_what_waits_is_bounded() -> None:
    waiting = EarlySteps()
    for number in range(early_steps.MAX_MOMENTS + 10):
        waiting.wait("liar", CompletedSteps("job", 4 + number, (0,), 1, ((1.0,),)), 0.0)
    waiting.wait("a", CompletedSteps("job", 4, (0,), 1, ((1.0,),)), 0.0)
    assert len(waiting) == early_steps.MAX_MOMENTS + 1
    assert waiting.take(KNOWN, early_steps.WAIT_S) == [("a", steps_together([steps_at(4)]))]
    assert len(waiting) == early_steps.MAX_MOMENTS - 1, "generations that may still be granted"
    assert waiting.take(KNOWN, early_steps.WAIT_S + 1.0) == []
    assert len(waiting) == 0


def steps_at(generation: int) -> RankSteps:
    return RankSteps("job", generation, 0, 1, (1.0,))


def test_hosts_learn_up_to_which_step_replicas_were_equal_until_the_next_generation() -> None:
    rig = Rig()
    rig.ingest.know(PLACED)
    odd = ReplicasDiffer("job", 3, 30, ("w",), 1, (0,), (1,), equal_step=20)

    def say(host_id: str, *bodies: SignalBody, generation: int = 3) -> Mapping[str, int]:
        rig.clock.now_s += 1.0
        signals = tuple(Signal(host_id, f"spool-{rig.clock.now_s}", n, 1.0, body) for n, body in enumerate(bodies, 1))
        ranks = [status(rank, generation=generation) for rank in ((0, 1) if host_id == "a" else (2, 3))]
        return rig.say(host_id, ranks=ranks, signals=signals).clean_steps

    assert say("a", msgspec.structs.replace(odd, equal_step=-1)) == {}, "never equal: on record only"
    assert say("a", msgspec.structs.replace(odd, job="other")) == {}
    assert say("a", odd) == {"job": 20} == say("a")
    assert say("a", msgspec.structs.replace(odd, equal_step=10)) == {"job": 10}
    assert say("a", odd) == {"job": 10}, "the older one counts"
    following = msgspec.structs.replace(PLAN, generation=4)
    rig.ingest.know(Placed({("job", 3): given_in(PLAN), ("job", 4): given_in(following)}))
    assert say("b", generation=4) == {} == say("a"), "a harm is over with its generation"
    rig.ingest.know(PLACED)
    assert say("a", odd) == {"job": 20}
    rig.ingest.know(Placed({}))
    assert say("a") == {}, "the job has ended"


def test_a_loss_that_stays_bad_is_a_signal_and_hosts_learn_which_steps_are_clean() -> None:
    rig = Rig()
    rig.know(Placements({}, PLACED))

    def say(step: int, loss: LossValue) -> Mapping[str, int]:
        rig.clock.now_s += 1.0
        return rig.say("a", ranks=(status(0), status(1)), losses=(RankLoss("job", 3, 0, step, loss),)).clean_steps

    assert [say(step, 2.0) for step in range(20)] == [{}] * 20
    rig.say("c", ranks=(), losses=(RankLoss("job", 3, 0, 20, "nan"),))  # not of a rank of that host
    assert [say(step, "nan") for step in range(20, 24)] == [{"job": 17}] * 4
    items = rig.queue.take(max_hosts=0, timeout_s=0.0).signals
    (found,) = {s.seq: s.body for item in items for s in item.signals}.values()
    assert isinstance(found, LossDiverged)
    assert (found.clean_step, found.first_step, found.step) == (17, 20, 22)
    assert [say(step, 2.0) for step in range(24, 27)] == [{"job": 17}, {"job": 17}, {}]
