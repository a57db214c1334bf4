"""A host that the sensor does not hear: who is asked about it, and what their words and its job's steps are worth."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from support.hosts.reports import report
from support.policy.detector_rig import TICK_S, DetectorRig

from flyball.contracts.cluster import HostRanks, Phase, RankStatus
from flyball.contracts.reports import testimony
from flyball.contracts.reports.signals import EngineStatus, HostReturned, HostSilent, HostSuspect, Report, SignalBody
from services.sensor.detector.fault_detector import DetectorSettings, FaultDetector
from services.sensor.detector.watched_host import SilenceSettings
from services.sensor.detector.witnesses import MAX_NEIGHBOURS, neighbours

BOUNDS = SilenceSettings(vouched_max_s=60.0)


class WitnessedRig(DetectorRig):
    """Hosts of one job that report each second, a rank on each. Answers follow a question by one report."""

    def __init__(self, *names: str, domains: dict[str, str] | None = None) -> None:
        super().__init__(DetectorSettings(silence=BOUNDS))
        self.names = names
        self.domains = domains or {}
        self.reports_here = set(names)
        self.alive = set(names)
        self.daemon_lives = set(names)
        self.links_cut: set[frozenset[str]] = set()
        self.liars: set[str] = set()
        self.step = 0
        self.trains = True
        self.asked: dict[str, tuple[str, ...]] = {}
        parts = tuple(HostRanks(name, "ip", f"{name}:7", (number,)) for number, name in enumerate(names))
        ring = {name: (names[(number + 1) % len(names)],) for number, name in enumerate(names)}
        self.near = neighbours(parts, ring)
        self.detector.set_neighbours(self.near)
        self.run(10)

    def reports(self) -> Iterator[Report]:
        self.step += self.trains and self.alive == set(self.names)
        for name in self.names:
            if name in self.reports_here & self.alive:
                yield self.report(name)
                self.asked[name] = self.detector.questions(name)

    def report(self, name: str) -> Report:
        out_of_reach = [n for n in self.names if n not in self.alive or frozenset((name, n)) in self.links_cut]
        words = [
            testimony.Testimony(n, 0.2, 0.1 if n in self.daemon_lives or name in self.liars else 99.0)
            for n in self.asked.get(name, ())
            if n not in out_of_reach or name in self.liars
        ]
        linked = {n for n, near in self.near.items() if name in near}
        engine = EngineStatus(True, tuple(sorted(linked.intersection(out_of_reach))), testimonies=tuple(words))
        status = RankStatus("j", 1, self.names.index(name), 10, Phase.STEP, self.step, 0.0 if self.trains else 5.0)
        return report(name, self.now, domain=self.domains.get(name, name), engine=engine, ranks=[status])

    def keep(self, bodies: Iterable[SignalBody]) -> None:
        super().keep(body for body in bodies if isinstance(body, HostSilent | HostSuspect | HostReturned))

    def cut_from_sensor(self, *names: str) -> float:
        self.reports_here -= set(names)
        self.signals.clear()
        return self.now

    def kinds(self) -> list[type]:
        return [type(body) for _, body in self.signals]


def test_neighbours_are_those_whose_engines_have_a_link() -> None:
    parts = tuple(HostRanks(name, "ip", "e", (number,)) for number, name in enumerate("abcdefg"))
    near = neighbours(parts, {"c": ("d",), "d": ("e",), "a": ("b",)})
    assert near["d"] == ("e", "c", "a"), "who has its replicas, whose it has, and the host of rank 0"
    assert near["a"][:1] == ("b",) and len(near["a"]) == MAX_NEIGHBOURS, "with which all others have a link"
    assert near["g"] == ("a",)
    assert neighbours(parts[:1], {}) == {"a": ()}
    assert neighbours(parts[:2], {"b": ("x", "y", "z"), "x": ("b",)}) == {"a": ("b",), "b": ("x", "y", "a")}, (
        "holders outside the placement, two at most"
    )


def test_a_host_that_only_the_sensor_does_not_hear_is_suspect_and_never_silent() -> None:
    hosts = WitnessedRig("a", "b", "c")
    cut_at = hosts.cut_from_sensor("b")
    hosts.run(600)
    ((at, body),) = hosts.signals
    assert isinstance(body, HostSuspect) and body.host_id == "b" and 4.4 < at - cut_at < 5.0
    assert body.reached_by == ("a", "c") and body.steps_advance
    (suspicion,) = hosts.detector.suspicion()
    assert suspicion.reached_by == ("a", "c") and not suspicion.is_silent
    hosts.reports_here.add("b")
    hosts.run(2)
    assert hosts.kinds() == [HostSuspect, HostReturned]
    assert hosts.asked == {"a": (), "b": (), "c": ()}, "nobody is asked any more"


def test_a_suspect_host_that_dies_is_silent_soon() -> None:
    hosts = WitnessedRig("a", "b", "c")
    hosts.cut_from_sensor("b")
    hosts.run(60)
    hosts.alive.remove("b")
    died_at = hosts.now
    hosts.run(20)
    assert hosts.kinds() == [HostSuspect, HostSilent]
    at, body = hosts.signals[-1]
    assert isinstance(body, HostSilent) and body.witnesses == ("a", "c") and at - died_at < 4.5


def test_a_dead_host_is_not_called_suspect_first() -> None:
    hosts = WitnessedRig("a", "b", "c")
    hosts.alive.remove("b")
    hosts.cut_from_sensor()
    hosts.run(20)
    assert hosts.kinds() == [HostSilent]


def test_one_neighbour_is_believed_while_the_job_makes_steps_and_else_for_a_while() -> None:
    hosts = WitnessedRig("a", "b")
    hosts.cut_from_sensor("b")
    hosts.run(300)
    assert hosts.kinds() == [HostSuspect]
    hosts.trains = False
    stopped_at = hosts.now
    hosts.run(60)
    assert hosts.kinds() == [HostSuspect, HostSilent]
    assert hosts.signals[-1][0] - stopped_at < 12.0, "its word alone had been believed for longer already"


def test_a_lying_neighbour_delays_and_does_not_prevent() -> None:
    hosts = WitnessedRig("a", "b")
    hosts.liars.add("a")
    hosts.alive.remove("b")
    died_at = hosts.cut_from_sensor()
    hosts.run(100)
    assert hosts.kinds() == [HostSuspect, HostSilent]
    assert 59.0 < hosts.signals[-1][0] - died_at < 72.0


def test_a_host_that_is_no_neighbour_neither_accuses_nor_clears() -> None:
    """No link leads from it to the host of which it tells."""
    told = {}
    for stranger in ("quiet", "accuses", "clears"):
        hosts = WitnessedRig("a", "b")
        hosts.alive.remove("b")
        died_at = hosts.cut_from_sensor()
        for _ in range(60):
            engine = EngineStatus(alive=True)
            if stranger == "accuses":
                engine = EngineStatus(alive=True, unreachable_peers=("b",))
            elif stranger == "clears":
                engine = EngineStatus(alive=True, testimonies=(testimony.Testimony("b", 0.1, 0.1),))
            hosts.detector.observe(report("x", hosts.now, engine=engine), hosts.now)
            hosts.run(1)
        told[stranger] = [(type(body), round(at - died_at, 1)) for at, body in hosts.signals]
    assert told["accuses"] == told["clears"] == told["quiet"] != []


def test_steps_alone_count_for_a_while() -> None:
    hosts = WitnessedRig("a", "b", "c")
    hosts.detector.set_neighbours({})
    cut_at = hosts.cut_from_sensor("b")
    hosts.run(60)
    assert hosts.kinds() == [HostSuspect, HostSilent]
    assert 30.0 < hosts.signals[-1][0] - cut_at < 42.0


def test_who_cannot_be_reached_by_its_neighbours_either_is_silent_sooner_though_it_trains() -> None:
    hosts = WitnessedRig("a", "b", "c")
    hosts.links_cut = {frozenset("ab"), frozenset("bc")}
    cut_at = hosts.cut_from_sensor("b")
    hosts.run(60)
    assert hosts.kinds() == [HostSuspect, HostSilent]
    assert 10.0 < hosts.signals[-1][0] - cut_at < 11.5


def test_an_engine_that_has_outlived_its_daemon_is_no_sign_of_it() -> None:
    hosts = WitnessedRig("a", "b", "c")
    hosts.trains = False
    hosts.run(20)
    hosts.daemon_lives.remove("b")
    cut_at = hosts.cut_from_sensor("b")
    hosts.run(20)
    assert hosts.kinds() == [HostSilent] and hosts.signals[0][0] - cut_at < 9.5


def test_a_witness_that_is_not_heard_itself_does_not_count_and_is_asked_when_it_is() -> None:
    hosts = WitnessedRig("a", "b", "c", "d", "e")
    hosts.trains = False
    hosts.run(20)
    hosts.cut_from_sensor("b", "c")
    hosts.run(3)
    assert hosts.detector.questions("c") == ("b",), "with the reply to its next report, which may always come late"
    assert hosts.detector.questions("a") == ("b", "c")
    assert all("c" not in suspicion.reached_by for suspicion in hosts.detector.suspicion())


def test_witnesses_from_the_same_failure_domain_weigh_less_than_others() -> None:
    silent_after = {}
    for domain_of_c in ("near", "far"):
        hosts = WitnessedRig("a", "b", "c", domains={"a": "elsewhere", "b": "near", "c": domain_of_c})
        hosts.detector.set_neighbours({})
        hosts.near = {"b": ("c",)}
        hosts.trains = False
        hosts.run(20)
        hosts.alive.remove("b")
        died_at = hosts.cut_from_sensor()
        hosts.run(20)
        assert hosts.kinds() == [HostSilent]
        silent_after[domain_of_c] = hosts.signals[0][0] - died_at
    assert silent_after["far"] < 3.5 and 4.0 < silent_after["near"] < 5.0


@pytest.mark.parametrize("first", [("a",), ()], ids=["rank-0-outside", "rank-0-inside"])
def test_a_rack_behind_one_switch_falls_as_one(first: tuple[str, ...]) -> None:
    """With rank 0's host in it, most of its hosts have neighbours only among themselves."""
    rack = [f"r{number:02}" for number in range(32)]
    hosts = WitnessedRig(*first, *rack, "y", "z", domains=dict.fromkeys(rack, "s7"))
    hosts.alive -= set(rack)
    died_at = hosts.cut_from_sensor()
    hosts.run(30)
    silent = [(at, body) for at, body in hosts.signals if isinstance(body, HostSilent)]
    assert [body.host_id for _, body in silent] == rack
    assert len({at for at, _ in silent}) == 1, "all at once"
    assert {(body.domain, body.together, body.within_s) for _, body in silent} == {("s7", 32, 0.0)}
    assert silent[0][0] - died_at < 3.5, "the witnesses against some are witnesses against all"


def test_when_half_of_all_are_not_heard_the_sensor_waits_longest() -> None:
    hosts = WitnessedRig(*"abcdef")
    hosts.detector.set_neighbours({})
    hosts.trains = False
    hosts.run(20)
    cut_at = hosts.cut_from_sensor(*"abcd")
    hosts.run(20)
    assert hosts.kinds() == [HostSilent] * 4
    assert all(14.9 < at - cut_at < 15.3 for at, _ in hosts.signals)


def test_a_sensor_that_was_stopped_accuses_nobody_that_reports_again_in_time() -> None:
    hosts = WitnessedRig("a", "b", "c")
    hosts.now += 30.0  # SIGSTOP, SIGCONT; daemons that had no answer wait for up to 2 s before they try again
    hosts.cut_from_sensor("a", "b", "c")
    hosts.run(2)
    hosts.reports_here = {"a", "b", "c"}
    hosts.run(10)
    assert hosts.signals == []
    hosts.alive.remove("c")
    hosts.run(20)
    assert hosts.kinds() == [HostSilent]


def test_a_short_report_interval_outlives_a_stopped_sensor_too() -> None:
    detector = FaultDetector(DetectorSettings())

    def reports(name: str) -> list[SignalBody]:
        return detector.observe(report(name, now, domain=name, interval_s=0.2), now)

    now = 100.0
    for _ in range(50):
        now += TICK_S
        assert [*reports("a"), *reports("b"), *detector.tick(now)] == []
    now += 30.0
    for _ in range(40):  # 4 s, where a deadline is 0.6 s
        now += TICK_S
        assert detector.tick(now) == []
    assert [*reports("a"), *reports("b")] == []


def test_a_sensor_tells_of_a_host_that_only_another_one_does_not_hear() -> None:
    """The host reports to `near`, its neighbour to `far`; each knows by the database when the other last heard."""
    near, far = FaultDetector(DetectorSettings()), FaultDetector(DetectorSettings())
    for detector in (near, far):
        detector.set_neighbours({"a": ("b",), "b": ("a",)})
    found: list[tuple[str, float, SignalBody]] = []
    heard = {"a": 100.0, "b": 100.0}
    asked: tuple[str, ...] = ()
    cut_at, now = 130.0, 100.0
    while now < cut_at + 7.5:
        now = round(now + TICK_S, 6)
        found += [("near", now, body) for body in near.tick(now)] + [("far", now, body) for body in far.tick(now)]
        if abs(now - round(now)) > 1e-6:
            continue
        for detector in (near, far):
            for name, at in heard.items():
                detector.expect(name, now, now - at + 1.0, at)  # it takes some time through the database
        words = tuple(testimony.Testimony(name, 0.2, 0.1) for name in asked)
        for name, detector in (("a", near), ("b", far)):
            if name == "b" or now < cut_at:
                engine = EngineStatus(True, testimonies=words if name == "b" else ())
                detector.observe(report(name, now, domain=name, engine=engine), now)
                heard[name] = now
        asked = far.questions("b")
    ((who, at, body),) = found
    assert who == "far" and isinstance(body, HostSuspect) and body.host_id == "a" and body.reached_by == ("b",)
    assert at - cut_at < 5.0, "before the other one, which nobody tells anything, calls it silent"


def test_a_host_that_was_replaced_has_no_neighbours_and_what_they_said_grows_old() -> None:
    hosts = WitnessedRig("a", "b", "c")
    hosts.trains = False
    hosts.cut_from_sensor("b")
    hosts.run(30)
    assert hosts.kinds() == [HostSuspect]
    replaced_at = hosts.now
    hosts.detector.set_neighbours({"a": ("c",), "c": ("a",)})
    hosts.run(20)
    assert hosts.kinds() == [HostSuspect, HostSilent]
    at, body = hosts.signals[-1]
    assert isinstance(body, HostSilent) and body.host_id == "b" and body.witnesses == ()
    assert 7.0 < at - replaced_at < 11.0, "as long as a host of which nobody can tell is waited for"


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_neighbour_that_a_move_has_just_brought_has_time_to_answer(is_alive: bool) -> None:
    """Simulator seed 4460: b, its only neighbour, had died, and c took the ranks of b moments before a was given up."""
    hosts = WitnessedRig("a", "b", "c")
    hosts.trains = False
    hosts.detector.set_neighbours({"a": ("b",), "b": ("a",)})
    hosts.run(5)
    hosts.alive.remove("b")
    if not is_alive:
        hosts.alive.remove("a")
    hosts.near = {"a": ("c",), "c": ("a",)} if is_alive else {}  # who would have noticed that its link is gone
    cut_at = hosts.cut_from_sensor("a")
    hosts.run(8.6)
    assert hosts.kinds() == []
    hosts.detector.set_neighbours({"a": ("c",), "c": ("a",)})
    hosts.run(50)
    found = {body.host_id: at for at, body in hosts.signals if isinstance(body, HostSilent)}
    assert found.keys() == ({"b"} if is_alive else {"a", "b"})
    assert found.get("a", cut_at + 11.7) - cut_at < 12.0, "not for long"


def test_clocks_that_disagree_do_not_condemn_a_host_that_another_sensor_hears() -> None:
    detector = FaultDetector(DetectorSettings())
    now, elsewhere = 100.0, 5_000_000.0  # its wall clock is 40 s behind ours
    detector.expect("b", now, 40.0, elsewhere)
    for _ in range(200):
        for _ in range(10):
            now += TICK_S
            assert detector.tick(now) == []
        elsewhere += 1.0
        detector.expect("b", now, 40.0, elsewhere)


def test_a_silent_host_is_no_less_so_because_it_is_told_a_little_differently_each_time() -> None:
    detector = FaultDetector(DetectorSettings())
    now = 100.0
    detector.observe(report("b", now), now)
    found: list[SignalBody] = []
    for second in range(12):
        detector.expect("b", now, second + 0.01, 5_000_000.0 + 0.02 * (second % 3))
        for _ in range(10):
            now += TICK_S
            found += detector.tick(now)
    assert [type(body) for body in found] == [HostSilent]


def test_a_witness_that_is_late_for_a_moment_has_not_taken_its_word_back() -> None:
    hosts = WitnessedRig("a", "b")
    hosts.cut_from_sensor("b")
    hosts.run(60)
    for _ in range(5):
        hosts.reports_here.remove("a")
        hosts.run(2)  # late: yellow at half of its deadline
        hosts.reports_here.add("a")
        hosts.run(2)
    assert hosts.kinds() == [HostSuspect]
