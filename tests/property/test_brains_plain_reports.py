"""Reports that say little new cost little, and mean what they would mean if every part was looked at."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyball.contracts.checkpoints import ShardCopy, Tier
from flyball.contracts.cluster import HostFacts, Phase, RankStatus
from flyball.contracts.errors import InvalidMessage
from flyball.contracts.reports.rank_columns import RankSteps, Workers, in_columns, statuses_in, steps_in, steps_together
from flyball.contracts.reports.signals import EngineStatus, PreemptionNotice, Report, Signal
from flyball.contracts.wire import WIRE_VERSION, decode, encode
from services.sensor.detector.patience import StallSettings
from services.sensor.detector.rank_stalls import StallWatch
from services.sensor.reports import report_decoding
from services.sensor.reports.report_decoding import ReportDecoder

RANKS = 3


@dataclass
class Beacon:
    phase: Phase = Phase.STARTING
    step: int = -1
    moved_s: float = 0.0


@dataclass
class Followed:
    """What a sensor should know about a rank, worked out for this rank alone."""

    host_id: str
    phase: Phase
    step: int
    moved_s: float
    age_s: float = 0.0
    has_stepped: bool = False
    forgiven_s: float = 0.0

    def __post_init__(self) -> None:
        self.entered_s, self.first_step = self.moved_s, self.step

    def follow(self, status: RankStatus, now_s: float, lagged_s: float) -> None:
        at_s = now_s - status.beacon_age_s
        moves = status.step != self.step or status.phase is not self.phase or status.beacon_age_s < self.age_s
        self.entered_s = at_s if status.phase is not self.phase else self.entered_s
        self.moved_s = at_s if moves else min(at_s, self.moved_s)
        self.forgiven_s = lagged_s if moves else lagged_s + self.forgiven_s
        self.has_stepped |= status.step > self.first_step
        self.phase, self.step, self.age_s = status.phase, status.step, status.beacon_age_s


def known_to(watch: StallWatch) -> dict[int, Followed]:
    """What the columns of a sensor say about each rank."""
    found = {}
    for host_id, ranks in watch._jobs["job"].hosts.items():
        for number, row in ranks.rows().items():
            found[number] = Followed(host_id, row.phase, row.step, row.moved_s, row.age_s, row.has_stepped)
            found[number].entered_s, found[number].first_step = row.entered_s, row.first_step
            found[number].forgiven_s = row.forgiven_s
            assert watch._jobs["job"].homes[number] is ranks
    assert found.keys() == watch._jobs["job"].homes.keys()
    return found


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_ranks_in_columns_are_followed_as_if_each_was_looked_at(seed: int) -> None:
    chance = random.Random(seed)
    watch, followed = StallWatch(StallSettings()), dict[int, Followed]()
    now_s, generation = 100.0, 1
    ranks = [Beacon() for _ in range(RANKS)]
    for _ in range(chance.randint(20, 120)):
        now_s += chance.choice([0.1, 0.3, 0.3, 1.0, 4.0])
        if chance.random() < 0.02:
            generation, ranks, followed = generation + 1, [Beacon(moved_s=now_s) for _ in range(RANKS)], {}
        stepped = []
        for number, rank in enumerate(ranks):
            if chance.random() < 0.75:
                before = rank.step
                rank.phase = chance.choice([Phase.STEP] * 8 + [Phase.CHECKPOINT, Phase.EVAL, Phase.DONE])
                rank.step = max(-1, rank.step + chance.choice([0, 1, 1, 2, -1 if chance.random() < 0.05 else 1]))
                rank.moved_s = now_s - chance.random() * 0.2
                if rank.step > before:
                    stepped.append(RankSteps("job", generation, number, rank.step, (rank.moved_s,)))
        statuses = [
            RankStatus("job", generation, number, 1, rank.phase, rank.step, max(0.0, now_s - rank.moved_s))
            for number, rank in enumerate(ranks)
            if chance.random() < 0.98
        ]
        workers, progress = in_columns(statuses)
        if chance.random() < 0.1:
            workers = tuple(msgspec.structs.replace(of) for of in workers)
        report = Report(
            version=WIRE_VERSION,
            incarnation="i",
            sent_at=now_s,
            interval_s=1.0,
            facts=HostFacts(chance.choice(["h"] * 9 + ["k"]), "ip", "rack", "ip:1", 1, "1", 1),
            engine=EngineStatus(alive=True),
            workers=workers,
            progress=progress,
            completed=steps_together(stepped),
            lagged_s=chance.choice([0.0] * 19 + [1.0]),
        )
        watch.observe(report, now_s)
        host_id, there = report.facts.host_id, {status.rank for status in statuses}
        followed = {n: rank for n, rank in followed.items() if rank.host_id != host_id or n in there}
        for status in statuses:
            new = Followed(host_id, status.phase, status.step, now_s - status.beacon_age_s)
            seen = followed.setdefault(status.rank, new)
            seen.follow(status, now_s, report.lagged_s)
            seen.has_stepped |= any(run.rank == status.rank for run in stepped)
            seen.host_id = host_id
        assert {n: vars(rank) for n, rank in known_to(watch).items() if not rank.has_stepped} == {
            n: vars(rank) for n, rank in followed.items() if not rank.has_stepped
        }
        for seen in (known := known_to(watch)).values():
            seen.moved_s = 0.0  # nobody asks for it after the first step
        assert {n: vars(rank) for n, rank in known.items()} == {
            n: vars(rank) | {"moved_s": 0.0} for n, rank in followed.items()
        }


@given(st.lists(st.tuples(*[st.integers(0, 2)] * 2, st.integers(0, 3), *[st.integers(-1, 9)] * 2)))
def test_columns_say_of_each_rank_what_was_said_of_it(told: list[tuple[int, int, int, int, int]]) -> None:
    ranks = {(job, generation, rank): (phase, step) for job, generation, rank, phase, step in told}
    statuses = [
        RankStatus(f"job{job}", generation, rank, 7, Phase(phase % len(Phase)), step, 0.5 * rank)
        for (job, generation, rank), (phase, step) in ranks.items()
    ]
    assert sorted(statuses_in(*in_columns(statuses)), key=encode) == sorted(statuses, key=encode)
    runs = [
        RankSteps(f"job{job}", generation, rank, max(step, 0), tuple(map(float, range(phase % 4))))
        for (job, generation, rank), (phase, step) in ranks.items()
    ]
    assert sorted(steps_in(steps_together(runs)), key=encode) == sorted(filter(has_steps, runs), key=encode)


def has_steps(run: RankSteps) -> bool:
    return bool(run.completed_at)


reports = st.builds(
    Report,
    version=st.just(WIRE_VERSION),
    incarnation=st.sampled_from(["i", 'a"b,\\"sent_at\\":']),
    sent_at=st.floats(1, 1e9),
    interval_s=st.just(1.0),
    facts=st.builds(HostFacts, st.just("h"), *[st.sampled_from(["a", "b"])] * 3, st.just(1), st.just("1"), st.just(1)),
    engine=st.builds(EngineStatus, st.booleans()),
    workers=st.sampled_from([(), (Workers("job", 1, (0, 1), (5, 6)),), (Workers("job", 2, (0,), (7,)),)]),
    copies=st.lists(
        st.builds(ShardCopy, *map(st.just, ("job", 1)), st.integers(0, 2), *map(st.just, (0, Tier.MEMORY, "h", 1, "d")))
    ).map(tuple),
    seq=st.integers(0, 9),
    lagged_s=st.sampled_from([0.0, 1.5]),
    signals=st.sampled_from([(), (Signal("h", "i", 1, 1.0, PreemptionNotice(1.0, ',"sent_at":')),)]),
)
# How a report may be written besides: parts left out that are empty, in another order, with more than is known here.
WRITTEN = {
    "as it is": lambda body: body,
    "short": lambda body: encode({k: v for k, v in msgspec.json.decode(body).items() if v not in ([], 0, 0.0)}),
    "backwards": lambda body: encode(dict(reversed(msgspec.json.decode(body).items()))),
    "with more": lambda body: encode(msgspec.json.decode(body) | {"newer": {"sent_at": 1, "facts": 2}}),
    "nested": lambda body: body.replace(b'"failure_domain"', b'"newer":{"a":1,"sent_at":2},"failure_domain"'),
    "twice": lambda body: body[:-1] + b',"facts":' + encode(msgspec.json.decode(body)["facts"]) + b"}",
}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(reports, st.sampled_from(["h", "k"]), st.sampled_from(sorted(WRITTEN))), max_size=8))
def test_a_report_means_what_it_says_whatever_was_said_before(said: list[tuple[Report, str, str]]) -> None:
    decoder = ReportDecoder(max_hosts=1)
    for report, host_id, way in said:
        assert decoder.decode(WRITTEN[way](encode(report)), host_id) == report


def test_what_is_repeated_is_decoded_once_and_a_mistake_in_it_is_named_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy = ShardCopy("job", 1, 0, 0, Tier.MEMORY, "h", 1, "0" * 32)
    report = Report(
        version=WIRE_VERSION,
        incarnation="i",
        sent_at=1.0,
        interval_s=1.0,
        facts=HostFacts("h", "ip", "rack", "ip:1", 1, "1", 1),
        engine=EngineStatus(alive=True),
        workers=(Workers("job", 1, (0, 1), (5, 6)),),
        copies=(copy,),
    )
    body = encode(report)
    decoder = ReportDecoder()
    first = decoder.decode(body, "h")
    moved = encode(msgspec.structs.replace(report, copies=(copy, copy), sent_at=2.0))
    for name in ("facts", "workers", "copies"):
        assert getattr(decoder.decode(body, "h"), name) is getattr(first, name)
        assert (getattr(decoder.decode(moved, "h"), name) is getattr(first, name)) is (name != "copies")
        first = decoder.decode(body, "h")
    wrong = body.replace(b'"tier":"memory"', b'"tier":"moon"')
    assert wrong != body
    for _ in range(2):
        with pytest.raises(InvalidMessage, match=r"moon.*copies\[0\]\.tier"):
            decoder.decode(wrong, "h")
        with pytest.raises(InvalidMessage, match=r"sent_at"):
            decoder.decode(body.replace(b'"sent_at":1.0', b'"sent_at":-1.0'), "h")
    assert decoder.decode(body, "h") == decode(body, Report)
    monkeypatch.setattr(report_decoding, "MAX_REPEATED_BYTES", 10)
    decoder = ReportDecoder()
    assert decoder.decode(body, "h").copies is not decoder.decode(body, "h").copies


@pytest.mark.parametrize(
    "body",
    [
        b'{"version":1,"incarnation":"i","sent_at":1.0,"interval_s":1.0,"ranks":[],"steps":[{"rank":0}]}',
        b'{"version":3,"sent_at":"a text"}',
        encode({"version": 9, "workers": "in another shape", "sent_at": 1.0}),
    ],
)
def test_a_daemon_of_another_release_is_told_that_it_is_one(body: bytes) -> None:
    with pytest.raises(InvalidMessage, match=f"wire version [139], this process speaks {WIRE_VERSION}"):
        ReportDecoder().decode(body, "h")
    with pytest.raises(InvalidMessage, match="Not a valid Report"):
        ReportDecoder().decode(body.replace(b'"version":', b'"aversion":'), "h")
