"""From readings to conditions: what is news, files, and probes that fail or hang."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import structlog

from flyball.contracts.clock import SystemClock
from flyball.contracts.reports.conditions import MAX_CONDITIONS, HostCondition, Severity
from flyball.contracts.reports.signals import ConditionBegan, ConditionEnded, ConditionsStand, SignalBody
from host_daemon.probes.condition_files import ConditionFiles
from host_daemon.probes.findings import NotAvailableError, ProbeFinding, Reading, news
from host_daemon.probes.gpus import Gpus
from host_daemon.probes.probing import Probing
from host_daemon.probes.suite import probes_of
from host_daemon.store.condition_book import ConditionBook
from host_daemon.store.database import HostDatabase
from host_daemon.store.facts import Facts
from host_daemon.store.outbox import SignalOutbox

DEADLINE_S = 30.0
NOW = 1000.0
HOT = ProbeFinding("thermal", Severity.WARNING, "GPU 1 is hot.", "gpu 1", {"celsius": 91})
XID = ProbeFinding("xid", Severity.WARNING, "Xid 63.", "gpu 1 xid 63", {"xid": 63}, ttl_s=100.0)


def apply(standing: dict, reading: Reading, now: float = NOW, source: str = "probe gpu") -> tuple[list[str], list[str]]:
    found = news(standing, source, reading, now, "b1")
    for condition in found.ended:
        del standing[condition.key]
    standing.update((condition.key, condition) for condition in found.began)
    return [c.kind for c in found.began], [c.kind for c in found.ended]


def test_a_state_begins_once_and_ends_when_it_is_gone() -> None:
    standing: dict = {}
    assert apply(standing, Reading((HOT,))) == (["thermal"], [])
    hotter = msgspec.structs.replace(HOT, message="GPU 1 is very hot.", evidence={"celsius": 95})
    assert apply(standing, Reading((hotter,)), NOW + 5) == ([], []), "another temperature is no news"
    worse = msgspec.structs.replace(HOT, severity=Severity.CRITICAL)
    assert apply(standing, Reading((worse,)), NOW + 6) == (["thermal"], [])
    assert apply(standing, Reading(), NOW + 9) == ([], ["thermal"])


def test_an_event_stands_for_its_time_and_is_renewed_seldom() -> None:
    standing: dict = {}
    assert apply(standing, Reading(events=(XID,))) == (["xid"], [])
    (condition,) = standing.values()
    assert (condition.since, condition.until) == (NOW, NOW + 100)
    assert (condition.is_event, condition.boot) == (True, "b1")
    assert apply(standing, Reading(), NOW + 10) == ([], []), "the next reading does not end it"
    assert apply(standing, Reading(events=(XID,)), NOW + 20) == ([], [])
    assert apply(standing, Reading(events=(XID,)), NOW + 60) == (["xid"], [])
    (condition,) = standing.values()
    assert (condition.since, condition.until) == (NOW, NOW + 160)


def test_a_state_that_is_remembered_has_its_boot() -> None:
    standing: dict = {}
    lost = ProbeFinding("gpu-lost", Severity.CRITICAL, "GPU 2 is lost.", "gpu 2", is_remembered=True)
    apply(standing, Reading((HOT, lost)))
    hot, gone = standing.values()
    assert (hot.is_remembered, gone.is_remembered, gone.boot, gone.is_event) == (False, True, "b1", False)
    assert apply(standing, Reading((HOT,))) == ([], ["gpu-lost"]), "it is listed again"


def test_other_sources_are_left_alone_and_all_is_bounded() -> None:
    other = HostCondition("thermal", Severity.INFO, "m.", "probe x", NOW)
    standing = {other.key: other}
    assert apply(standing, Reading()) == ([], [])
    many = tuple(msgspec.structs.replace(HOT, subject=f"gpu {number}") for number in range(2 * MAX_CONDITIONS))
    apply(standing, Reading(many))
    assert len(standing) == MAX_CONDITIONS


def test_the_next_daemon_still_misses_a_lost_gpu_unless_the_host_was_rebooted(tmp_path: Path) -> None:
    put(tmp_path / "nvml.json", {"gpus": [{"pci": "00000000:3b:00.0", "celsius": 40}]})
    lost = HostCondition("gpu-lost", Severity.CRITICAL, "m.", "probe gpu", NOW, "0000:5e:00.0")
    for same_boot, subjects in ((True, [lost.subject]), (False, [])):
        probes = probes_of(tmp_path, 5.0, tmp_path, SystemClock(), dict, standing=[lost], same_boot=same_boot)
        (gpus,) = (probe for probe in probes if isinstance(probe, Gpus))
        assert [finding.subject for finding in gpus.read().states] == subjects


# --- files -----------------------------------------------------------------------------------------------------------


def put(path: Path, document: object) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(document))
    new.rename(path)


def test_a_file_stands_while_it_is_there(tmp_path: Path) -> None:
    files = ConditionFiles(tmp_path / "conditions")
    assert files.read() == Reading(), "nobody has made the folder"
    files = ConditionFiles(tmp_path)
    bad = {"kind": "ecc", "severity": "critical", "message": "GPU 3 fails.", "evidence": {"count": 7}}
    put(tmp_path / "dcgm.json", bad)
    (found,) = files.read().states
    assert found == ProbeFinding("ecc", Severity.CRITICAL, "GPU 3 fails.", "dcgm", {"count": 7})
    put(tmp_path / "dcgm.json", {**bad, "severity": "warning"})
    assert files.read().states[0].severity is Severity.WARNING
    (tmp_path / "dcgm.json").unlink()
    assert files.read() == Reading()


@pytest.mark.parametrize(
    "text",
    ["", '{"kind": "ecc", "sev', '{"kind": "ecc"}', "[]", '{"kind":"e","severity":"info","message":"' + 20_000 * "x",
     '{"kind": "ecc", "severity": "bad", "message": "m"}', "\x00\xff"],
)  # fmt: skip
def test_a_wrong_file_changes_nothing_and_is_one_line_in_the_log(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ConditionFiles(tmp_path)
    good = {"kind": "ecc", "severity": "warning", "message": "GPU 3 fails."}
    put(tmp_path / "a.json", good)
    before = files.read()
    (tmp_path / "a.json").write_text(text)
    (tmp_path / "b.json").write_text(text)
    for _ in range(3):
        assert files.read() == before
    logged = capsys.readouterr().out
    assert logged.count("condition_file_ignored") == 2, logged
    put(tmp_path / "a.json", {**good, "message": "GPU 4 fails."})
    assert files.read().states[0].message == "GPU 4 fails."


def test_a_file_that_goes_ends_its_condition_whatever_it_says(tmp_path: Path) -> None:
    files, standing = ConditionFiles(tmp_path), {}
    put(
        tmp_path / "a.json",
        {
            "kind": "ecc",
            "severity": "warning",
            "message": "m.",
            "ttl_s": 600,
            "evidence": {"event": True, "boot": "b1", "count": 7},
        },
    )
    assert apply(standing, files.read(), source="file") == (["ecc"], [])
    assert [condition.evidence for condition in standing.values()] == [{"count": 7}], "a file's is no event"
    assert not any(condition.is_remembered for condition in standing.values())
    (tmp_path / "a.json").unlink()
    assert apply(standing, files.read(), source="file") == ([], ["ecc"])


def test_what_is_no_regular_file_blocks_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "fifo.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "loop.json").symlink_to("loop.json")
    put(tmp_path / "good.json", {"kind": "ecc", "severity": "warning", "message": "m."})
    files = ConditionFiles(tmp_path)
    for _ in range(3):
        assert [finding.subject for finding in files.read().states] == ["good"]
    assert capsys.readouterr().out.count("condition_file_ignored") == 3


def test_a_rename_while_a_file_is_read_is_seen_with_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = tmp_path / "a.json", os.open
    said = {"kind": "ecc", "severity": "warning", "message": "old."}
    put(path, said)

    def open_then_rename(name: Path, flags: int, mode: int) -> int:
        descriptor = opened(name, flags, mode)
        monkeypatch.setattr(os, "open", opened)
        put(path, {**said, "message": "new."})
        return descriptor

    files = ConditionFiles(tmp_path)
    monkeypatch.setattr(os, "open", open_then_rename)
    assert files.read().states[0].message == "old."
    assert files.read().states[0].message == "new."


def test_other_files_are_not_read(tmp_path: Path) -> None:
    for name in ("notes.txt", ".hidden.json", "a.json.tmp"):
        put(tmp_path / name, {"kind": "ecc", "severity": "warning", "message": "m."})
    assert ConditionFiles(tmp_path).read() == Reading()


# --- the loop --------------------------------------------------------------------------------------------------------


class Script:
    """A probe that plays what it is given, and then repeats the last of it."""

    source, interval_s, deadline_s = "probe gpu", 0.01, 0.05

    def __init__(self, *steps: Reading | Exception | threading.Event) -> None:
        self.steps, self.reads = list(steps), 0

    def read(self) -> Reading:
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        self.reads += 1
        if isinstance(step, threading.Event):
            step.wait(DEADLINE_S)
            return Reading()
        if isinstance(step, Exception):
            raise step
        return step


class StoppedClock(SystemClock):
    """By which no signal is due again."""

    monotonic_s = staticmethod(lambda: 0.0)


class Daemon:
    """The part of a daemon that keeps conditions."""

    def __init__(self, folder: Path, incarnation: str) -> None:
        self.database = HostDatabase(folder / "daemon.sqlite")
        self.facts = Facts(self.database)
        self.outbox = SignalOutbox(self.database, StoppedClock(), source="a", incarnation=incarnation)
        self.book = ConditionBook(self.facts, self.outbox)
        self._told: list[SignalBody] = []

    @property
    def told(self) -> list[SignalBody]:
        """All signals so far, or, of an earlier daemon, those that nobody has committed."""
        self._told += [signal.body for signal in self.outbox.due()]
        return self._told

    async def run(self, *probes: Script, until: Callable[[], bool], rebooted: bool = False) -> list[SignalBody]:
        await self.outbox.load()
        await self.book.load()
        probing = Probing(self.book, self.facts, SystemClock(), lambda: None)
        loop = asyncio.create_task(probing.run(probes, rebooted=rebooted))
        async with asyncio.timeout(DEADLINE_S):
            while not until():
                await asyncio.sleep(0.005)
                if loop.done():
                    loop.result()
        loop.cancel()
        return self.told


@contextmanager
def daemon(folder: Path, incarnation: str = "i1") -> Iterator[Daemon]:
    made = Daemon(folder, incarnation)
    yield made
    made.database.close()


def stands(one: Daemon) -> list[ConditionsStand]:
    return [body for body in one.told if isinstance(body, ConditionsStand)]


def test_conditions_survive_the_daemon(tmp_path: Path) -> None:
    with daemon(tmp_path) as first:
        began = asyncio.run(first.run(probe := Script(Reading((HOT,), (XID,))), until=lambda: probe.reads > 3))
    assert [body.condition.kind for body in began if isinstance(body, ConditionBegan)] == ["thermal", "xid"]
    with daemon(tmp_path) as second:
        again = asyncio.run(second.run(probe := Script(Reading((HOT,))), until=lambda: probe.reads > 3))
        assert len(second.book.standing) == 2 and len(again) == 2, "the two that nobody has committed, and no more"
    with daemon(tmp_path) as third:
        probe = Script(Reading((HOT,)))
        ended = asyncio.run(third.run(probe, until=lambda: probe.reads > 3, rebooted=True))
        assert [condition.kind for condition in third.book.standing.values()] == ["thermal"]
    assert ConditionEnded("probe gpu", "xid", "gpu 1 xid 63") in ended, "events are of the boot in which they happened"


def test_a_probe_that_fails_or_has_nothing_to_read_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("host_daemon.probes.probing.RETRY_S", 0.0)
    troubles = (NotAvailableError("no driver"), OSError("disk"), RuntimeError("a fault"), Reading((HOT,)))
    probe = Script(Reading((HOT,)), *troubles)
    absent = Script(NotAvailableError("no such card"))
    absent.source = "probe link"
    with daemon(tmp_path) as one, structlog.testing.capture_logs() as logged:
        said = asyncio.run(one.run(probe, absent, until=lambda: probe.reads > 6))
    assert [type(body).__name__ for body in said] == ["ConditionBegan"]
    events = [entry["event"] for entry in logged if entry["event"].startswith("probe_")]
    assert events == ["probe_not_available", "probe_not_available", "probe_failed", "probe_works"]
    assert "no such card" not in str(logged), "flyball doctor says what this host never had"


def test_a_probe_that_hangs_blocks_no_other(tmp_path: Path) -> None:
    stuck, other = Script(released := threading.Event()), Script(Reading((HOT,)))
    with daemon(tmp_path) as one:
        asyncio.run(one.run(stuck, other, until=lambda: other.reads > 10 and bool(one.book.standing)))
    assert stuck.reads == 1, "no second thread waits for the same driver"
    released.set()


def test_the_end_of_a_condition_is_not_heard_before_its_beginning(tmp_path: Path) -> None:
    """A sensor may end with what it was sent: sent again after a second, it would come last."""
    with daemon(tmp_path) as one:
        asyncio.run(one.run(Script(Reading((HOT,))), until=lambda: one.outbox.has_unsent))
        assert [type(body) for body in one.told] == [ConditionBegan]
        asyncio.run(one.run(Script(Reading()), until=lambda: one.outbox.has_unsent))
        assert [type(body) for body in one.told[1:]] == [ConditionBegan, ConditionEnded]


def test_another_database_is_told_what_stands_by_a_host_that_had_conditions(tmp_path: Path) -> None:
    hot = ("probe gpu", "thermal", "gpu 1")
    with daemon(tmp_path) as first:
        asyncio.run(first.run(Script(Reading(), Reading((HOT,))), until=lambda: first.outbox.has_unsent))
        asyncio.run(first.book.say_again(is_new_folder=False))
        assert [type(body) for body in first.told] == [ConditionBegan, ConditionBegan, ConditionsStand]
        assert first.told[-1] == ConditionsStand(("probe gpu",), (hot,))
    with daemon(
        tmp_path, "i2"
    ) as second:  # the condition ends, and then a supervisor answers that has an older database
        probe = Script(Reading())
        asyncio.run(second.run(probe, until=lambda: not second.book.standing and probe.reads > 3))
        asyncio.run(second.book.say_again(is_new_folder=False))
        assert second.told[-2:] == [ConditionEnded(*hot), ConditionsStand(("probe gpu",), ())]


def test_a_host_with_a_new_state_folder_says_what_stands_once_its_probes_have_looked(tmp_path: Path) -> None:
    probe, late = Script(Reading((HOT,))), Script(released := threading.Event(), Reading())
    late.source = "probe late"
    expected = [
        ConditionsStand(("probe gpu",), (("probe gpu", "thermal", "gpu 1"),)),
        ConditionsStand(("probe late",), ()),  # it hung
    ]
    with daemon(tmp_path) as one:

        def until() -> bool:
            if stands(one):
                released.set()
            return stands(one) == expected

        asyncio.run(one.book.say_again(is_new_folder=True))
        asyncio.run(one.run(probe, late, until=until))


def test_what_a_database_was_not_told_is_owed_to_it_by_later_daemons(tmp_path: Path) -> None:
    gpu, late = ConditionsStand(("probe gpu",), (), "b1"), ConditionsStand(("probe late",), (), "b1")
    with daemon(tmp_path) as first:  # it ends before a probe has looked
        asyncio.run(first.book.say_again(is_new_folder=True))
        assert first.told == []
    with daemon(tmp_path, "i2") as second:  # it ends before the second probe finds a driver
        second.book.boot = "b1"
        later = Script(NotAvailableError("no driver"))
        later.source = "probe late"
        asyncio.run(second.run(Script(Reading()), later, until=lambda: bool(stands(second))))
        assert stands(second) == [gpu]
        asyncio.run(second.outbox.committed({"i2": 1}))
    with daemon(tmp_path, "i3") as third:
        third.book.boot = "b1"
        later = Script(Reading())
        later.source = "probe late"
        asyncio.run(third.run(Script(Reading()), later, until=lambda: bool(stands(third))))
        assert stands(third) == [late], "and what it was told is not said again"


def test_a_host_that_cannot_read_what_it_knew_says_under_which_boot_it_knows_nothing(tmp_path: Path) -> None:
    with daemon(tmp_path) as one:
        asyncio.run(one.facts.set("conditions", '[{"kind": "of a newer release"}]'))
        one.book.boot = "b1"
        probe = Script(Reading())
        asyncio.run(one.run(probe, until=lambda: probe.reads > 3))
        asyncio.run(one.book.say_again(is_new_folder=False))
        assert one.told == [ConditionsStand(("probe gpu",), (), "b1")]


def test_a_host_that_never_had_a_condition_tells_another_database_nothing(tmp_path: Path) -> None:
    probe = Script(Reading())
    with daemon(tmp_path) as one:
        asyncio.run(one.run(probe, until=lambda: probe.reads > 3))
        asyncio.run(one.book.say_again(is_new_folder=False))
        assert one.told == []
