"""One host that falls silent: the moments at which each kind of evidence lets it turn yellow or red."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import msgspec
import pytest
from support.hosts.reports import report
from support.policy.checked import well_typed

from flyball.contracts.reports import testimony
from flyball.contracts.reports.signals import EngineStatus, HostReturned, HostSilent, HostSuspect, SignalBody
from services.sensor.detector import host_silence
from services.sensor.detector.correlation import Fall, due_groups, groups_of
from services.sensor.detector.host_silence import SilenceWatch
from services.sensor.detector.watched_host import FORGET_AFTER_S, SilenceSettings, WatchedHost

BEGAN_S = 100.0
SETTINGS = SilenceSettings()


@dataclass
class Steps:
    """The steps of the jobs on hosts, as a test has them."""

    at_s: dict[str, float] = field(default_factory=dict)
    advancing: set[str] = field(default_factory=set)

    def stepped_s(self, host_id: str) -> float:
        return self.at_s.get(host_id, -inf)

    def advances(self, host_id: str, now_s: float) -> bool:
        return host_id in self.advancing


class Watch:
    """Hosts that report each second; "b" does until `BEGAN_S`."""

    def __init__(self, *others: str, domains: str = "", settings: SilenceSettings = SETTINGS) -> None:
        self.steps = Steps()
        self.silence = SilenceWatch(settings, self.steps)
        self.others = others
        self.domains = dict(zip(("b", *others), domains or "b" + "".join(others), strict=False))
        self.accusers: set[str] = set()
        self.vouchers: dict[str, float] = {}  # how long ago they last had a sign of life of b
        self.now_s = BEGAN_S - 40.0
        self.found: list[tuple[float, SignalBody]] = []
        self.silence.set_neighbours({"b": others})
        while self.now_s < BEGAN_S:
            self.now_s += 1.0
            self.report("b")
            self.report_others()

    def report(self, name: str, **more: object) -> None:
        engine = EngineStatus(
            alive=True,
            unreachable_peers=("b",) if name in self.accusers else (),
            testimonies=(testimony.Testimony("b", self.vouchers[name], 0.0),) if name in self.vouchers else (),
        )
        made = report(name, domain=self.domains.get(name, name), **{"sent_at": self.now_s, "engine": engine} | more)
        self.keep(self.silence.observe(made, self.now_s)[0])

    def report_others(self) -> None:
        for name in self.others:
            self.report(name)

    def keep(self, bodies: list[SignalBody]) -> None:
        self.found += [(round(self.now_s - BEGAN_S, 3), well_typed(body)) for body in bodies]

    def run(self, seconds: float) -> list[tuple[float, str]]:
        """Returns when what was found, since b fell silent."""
        for tick in range(1, round(seconds * 10) + 1):
            self.now_s = round(BEGAN_S + tick / 10, 3)
            if tick % 10 == 0:
                self.report_others()
            self.keep(self.silence.tick(self.now_s))
        return [(at, type(body).__name__) for at, body in self.found]

    @property
    def silent(self) -> HostSilent:
        (body,) = [body for _, body in self.found if isinstance(body, HostSilent)]
        return body


@pytest.mark.parametrize(
    ("others", "accusers", "domains", "red_s", "deadline_s"),
    [
        ("acd", "", "", 9.0, 9.0),  # no witness: three deadlines of 3 s
        ("acd", "a", "", 3.0, 3.0),
        ("acd", "a", "xxyz", 4.5, 4.5),  # a witness of its own failure domain
        ("acd", "ac", "xxyz", 3.0, 3.0),  # and another one
        ("acd", "a", "xxxx", 3.0, 3.0),  # there is only one failure domain
        ("", "", "", 9.0, 9.0),
    ],
)
def test_when_a_host_turns_red(others: str, accusers: str, domains: str, red_s: float, deadline_s: float) -> None:
    watch = Watch(*others, domains=domains)
    watch.accusers |= set(accusers)
    ((at, kind),) = watch.run(20.0)
    assert kind == "HostSilent" and red_s - 0.01 <= at <= red_s + 1.15, "reports of others come each second"
    found = watch.silent
    assert found.silent_s == pytest.approx(at) and found.deadline_s == pytest.approx(deadline_s)
    assert found.witnesses == tuple(accusers)
    assert (found.together, found.domain, found.after_suspect, found.within_s) == (1, "", False, 0.0)


def test_many_overdue_hosts_have_longer_and_two_of_two_are_many() -> None:
    watch = Watch("a", "c", "d", "e", "f")
    watch.others = watch.others[3:]  # half of six, and three
    assert {(at, kind) for at, kind in watch.run(30.0)} == {(15.0, "HostSilent")}
    few = Watch("a", "c", "d", "e", "f")
    few.others = few.others[1:]
    assert {(at, kind) for at, kind in few.run(30.0)} == {(9.0, "HostSilent")}
    two = Watch("a")
    two.others = ()
    assert {(at, kind) for at, kind in two.run(30.0)} == {(15.0, "HostSilent")}


@pytest.mark.parametrize(("neighbour_s", "advances"), [(60.0, False), (60.0, True)])
def test_one_voucher_without_steps_counts_for_a_while(neighbour_s: float, advances: bool) -> None:
    watch = Watch("a", "c", "d", settings=SilenceSettings(vouched_max_s=neighbour_s))
    watch.vouchers["a"] = 0.2
    watch.steps.advancing |= {"b"} if advances else set()
    found = watch.run(90.0)
    assert found[0][1] == "HostSuspect" and 4.5 < found[0][0] < 4.7, "one and a half deadlines"
    body = watch.found[0][1]
    assert isinstance(body, HostSuspect)
    assert (body.deadline_s, body.reached_by, body.steps_advance) == (3.0, ("a",), advances)
    if advances:
        assert len(found) == 1
    else:
        assert [kind for _, kind in found] == ["HostSuspect", "HostSilent"]
        assert neighbour_s < found[1][0] < neighbour_s + 10.0
        assert watch.silent.after_suspect


def test_two_vouchers_count_for_as_long_as_they_vouch() -> None:
    watch = Watch("a", "c", "d", settings=SilenceSettings(vouched_max_s=10.0))
    watch.vouchers |= {"a": 0.2, "d": 0.3}
    assert [kind for _, kind in watch.run(60.0)] == ["HostSuspect"]
    (suspicion,) = watch.silence.suspicion(watch.now_s)
    assert (suspicion.host_id, suspicion.is_silent, suspicion.reached_by) == ("b", False, ("a", "d"))
    assert (suspicion.silent_s, suspicion.deadline_s, suspicion.witnesses) == (60.0, 3.0, ())


@pytest.mark.parametrize(("accusers", "counts_s"), [("", 30.0), ("a", 10.0)])
def test_steps_alone_count_for_a_while_and_less_against_a_witness(accusers: str, counts_s: float) -> None:
    watch = Watch("a", "c", "d")
    watch.accusers |= set(accusers)
    watch.steps.at_s["b"] = BEGAN_S + 1000.0
    found = watch.run(60.0)
    assert [kind for _, kind in found] == ["HostSuspect", "HostSilent"]
    assert counts_s < found[1][0] < counts_s + 1.3


def test_a_report_of_a_yellow_or_red_host_is_its_return() -> None:
    watch = Watch("a", "c", "d")
    watch.run(20.0)
    watch.found.clear()
    watch.report("b")
    watch.report("b")
    ((_, body),) = watch.found
    assert body == HostReturned(host_id="b", away_s=20.0)
    assert watch.silence.suspicion(watch.now_s) == ()


def test_a_host_known_to_be_alive_is_expected_like_one_that_reports_elsewhere() -> None:
    watch = Watch("a", "c", "d")
    watch.run(20.0)
    watch.found.clear()
    assert watch.silence.note_alive("b", watch.now_s) == [HostReturned(host_id="b", away_s=20.0)]
    assert watch.silence.note_alive("b", watch.now_s - 5.0) == []
    (late,) = (at for at, _ in run_on(watch, 40.0))
    assert 30.0 <= late - 20.0 <= 31.2, "three times ten seconds, from when it was last alive"
    assert watch.silence.note_alive("new", watch.now_s) == []
    assert "new" in {s.host_id for s in watch.silence.suspicion(watch.now_s + 2.6)}
    assert "new" not in {s.host_id for s in watch.silence.suspicion(watch.now_s + 2.5)}


def run_on(watch: Watch, seconds: float) -> list[tuple[float, SignalBody]]:
    start_s = watch.now_s
    for tick in range(1, round(seconds * 10) + 1):
        watch.now_s = round(start_s + tick / 10, 3)
        if tick % 10 == 0:
            watch.report_others()
        watch.keep(watch.silence.tick(watch.now_s))
    return watch.found


@pytest.mark.parametrize(
    ("ago_s", "moved_s", "is_seen"),
    [
        (4.9, 0.0, True),  # less than half as old as the silence here
        (5.0, 0.0, False),
        (-0.1, 0.0, False),  # of a clock that is ahead
        (0.0, 0.0, True),
        (9.0, 0.6, True),  # the other sensor's clock may be behind, and its reports go on
        (9.0, 0.5, False),  # it is the same report
        (-50.0, 9.0, True),
        (500.0, 9.0, True),
    ],
)
def test_reports_to_another_sensor_count_if_they_are_newer(ago_s: float, moved_s: float, is_seen: bool) -> None:
    watch = Watch("a", "c", "d")
    watch.silence.expect("b", BEGAN_S, 0.0, 7000.0)
    watch.run(10.0)
    watch.silence.expect("b", watch.now_s, ago_s, 7000.0 + moved_s)
    seen_s = watch.now_s - ago_s if 0.0 <= ago_s < 10.0 else watch.now_s
    left = watch.silence.suspicion(watch.now_s + 0.001)
    assert bool(not left or left[0].silent_s < 9.5) is is_seen
    if is_seen:
        late_s = watch.silence.suspicion(seen_s + 1.501)[0].silent_s
        assert late_s == pytest.approx(1.501, abs=0.002)


def test_while_in_doubt_nothing_turns_red_and_doubts_do_not_end_early() -> None:
    watch = Watch("a", "c", "d")
    watch.silence.doubt(BEGAN_S + 25.0)
    watch.silence.doubt(BEGAN_S + 5.0)
    ((at, _),) = watch.run(40.0)
    assert 25.0 <= at < 25.2


def test_a_red_host_is_forgotten_after_an_hour_and_a_yellow_one_is_not() -> None:
    watch = Watch("a")
    watch.others = ()
    watch.run(60.0)
    assert len(watch.silence) == 2
    watch.silence.tick(BEGAN_S + FORGET_AFTER_S)
    assert not watch.silence.has_forgotten
    watch.silence.tick(BEGAN_S + FORGET_AFTER_S + 30.0)
    assert watch.silence.has_forgotten and sorted(watch.silence.take_forgotten()) == ["a", "b"]
    assert (watch.silence.take_forgotten(), len(watch.silence), watch.silence.has_forgotten) == ([], 0, False)
    doubtful = Watch("a")
    doubtful.silence.doubt(inf)
    doubtful.silence.tick(BEGAN_S + 2 * FORGET_AFTER_S)
    assert len(doubtful.silence) == 2


def test_the_host_that_is_silent_for_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_silence, "MAX_HOSTS", 3)
    watch = Watch("a", "c")
    watch.now_s += 1.0
    watch.report_others()
    watch.report("new")
    assert watch.silence.take_forgotten() == ["b"]


def test_only_the_newest_report_of_an_incarnation_is_news() -> None:
    silence = SilenceWatch(SETTINGS, Steps())
    first = report("b", 50.0)
    replace = msgspec.structs.replace
    news = [
        silence.observe(sent, BEGAN_S)[1]
        for sent in (
            first,
            first,
            replace(first, sent_at=50.1),
            replace(first, sent_at=50.05),
            replace(first, incarnation="i2", sent_at=10.0),
            replace(first, incarnation="i2", sent_at=10.1),
        )
    ]
    assert news == [True, False, True, False, True, True]


# --- deadlines of one host -------------------------------------------------------------------------------------------


def test_a_deadline_follows_the_interval_and_the_gaps() -> None:
    host = WatchedHost(BEGAN_S, SETTINGS)
    assert (host.deadline_s, host.least_s) == (10.0, 2.5)
    host.begin("i1", 0.1)
    assert (host.deadline_s, host.least_s, host.interval_s) == (0.6, 0.3, 0.1)
    host.begin("i1", 2.0)
    assert (host.deadline_s, host.least_s) == (6.0, 3.0)
    for _ in range(32):
        host.note_gap(7.0)
    assert host.deadline_s == 7.0
    host.note_gap(39.0)
    assert host.deadline_s == pytest.approx(7.0 + 6.0 * 1.0)
    host.note_gap(1e6)
    assert host.deadline_s == 30.0
    for _ in range(32):
        host.note_gap(2.0)
    assert host.deadline_s == 6.0, "the last 32 count"
    host.begin("i1", 1e9)
    assert host.deadline_s == 3.0 * FORGET_AFTER_S
    host.end()
    assert (host.deadline_s, host.least_s, host.incarnation, host.interval_s) == (10.0, 2.5, "", 0.0)


def test_a_host_is_yellow_after_half_its_deadline_and_looked_at_then() -> None:
    host = WatchedHost(BEGAN_S, SETTINGS)
    host.begin("i1", 2.0)
    assert host.look_at_s(BEGAN_S) == BEGAN_S + 3.0
    assert [host.is_yellow(BEGAN_S + late_s) for late_s in (3.0, 3.001)] == [False, True]
    for _ in range(3):
        host.note_gap(10.0)
    assert [host.is_yellow(BEGAN_S + late_s) for late_s in (3.001, 5.0, 5.001)] == [False, False, True]
    assert host.look_at_s(BEGAN_S + 3.0) == BEGAN_S + 5.0
    assert host.look_at_s(BEGAN_S + 9.0) == BEGAN_S + 9.0


# --- falling together ------------------------------------------------------------------------------------------------


def fall(name: str, last_seen_s: float, domain: str = "", interval_s: float = 1.0, due_s: float = 10.0) -> Fall:
    return Fall(name, domain, last_seen_s, interval_s, due_s)


@pytest.mark.parametrize(
    ("second", "together"),
    [
        (fall("b", 1.0), True),
        (fall("b", 1.001), False),
        (fall("b", 2.0, "r"), True),
        (fall("b", 2.001, "r"), False),
        (fall("b", 2.0, "s"), False),
    ],
)
def test_falls_within_an_interval_are_a_group_and_a_second_more_in_one_domain(second: Fall, together: bool) -> None:
    first = fall("a", 0.0, second.domain if second.domain != "s" else "r")
    assert (len(groups_of([second, first], 1.0)) == 1) is together


def test_due_hosts_wait_for_their_group_as_long_as_a_report_and_a_second() -> None:
    due, other = fall("a", 0.0, "r", due_s=10.0), fall("b", 0.5, "r", due_s=99.0)
    assert due_groups([due, other], 9.9) == due_groups([due, other], 11.9) == []
    (alone,) = due_groups([due, other], 12.0)
    assert (alone.host_ids, alone.domain, alone.within_s) == (("a",), "", 0.0)
    strange = msgspec.structs.replace(other, domain="s")
    assert due_groups([due, strange], 10.9) == []
    assert len(due_groups([due, strange], 11.0)) == 1, "nobody of its domain is awaited"
    (both,) = due_groups([msgspec.structs.replace(other, due_s=10.0), due], 10.0)
    assert (both.host_ids, both.domain, both.within_s) == (("a", "b"), "r", 0.5)
    (mixed,) = due_groups([due, msgspec.structs.replace(strange, due_s=10.0)], 10.0)
    assert (mixed.host_ids, mixed.domain) == (("a", "b"), "")


def fallen_with_b(domains: str, accusers: str) -> dict[str, tuple[float, str, int]]:
    """host -> when b and c were called silent, behind what, and with how many; `domains` are those of b, a, c, d, e."""
    watch = Watch("a", "c", "d", "e", domains=domains)
    watch.others = ("a", "d", "e")
    watch.accusers |= set(accusers)  # of b: nobody says anything about c
    watch.run(20.0)
    return {body.host_id: (at, body.domain, body.together) for at, body in watch.found if isinstance(body, HostSilent)}


def test_a_witness_against_one_of_two_hosts_of_a_domain_counts_against_the_other() -> None:
    found = fallen_with_b("rxryz", "a")
    assert found["b"] == found["c"] and found["b"][1:] == ("r", 2)
    assert 3.0 <= found["b"][0] <= 3.2


@pytest.mark.parametrize(
    ("domains", "accusers", "b_s"),
    [
        ("rxsyz", "a", 4.0),  # they share nothing: b has waited for c for the time of a report
        ("rrryz", "a", 6.5),  # what stands behind the same switch may not reach them either
        ("rxryz", "", 9.0),
    ],
)
def test_a_witness_counts_against_no_host_elsewhere_nor_does_one_of_their_own_domain(
    domains: str, accusers: str, b_s: float
) -> None:
    found = fallen_with_b(domains, accusers)
    assert b_s <= found["b"][0] <= b_s + 0.2 and 9.0 <= found["c"][0] <= 9.2


def test_hosts_that_fell_one_after_the_other_are_each_called_when_they_are_due() -> None:
    watch = Watch("a", "c", "d", "e")
    watch.others = ("a", "c", "d", "e")
    watch.run(2.0)
    watch.others = ("a", "d", "e")
    found = {body.host_id: at for at, body in run_on(watch, 20.0) if isinstance(body, HostSilent)}
    assert 9.0 <= found["b"] <= 9.2 and 11.0 <= found["c"] <= 11.2
