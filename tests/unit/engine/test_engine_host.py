"""An engine's replies to its daemon, without a daemon."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.jobs.placements import make_placement

from ckpt_engine.contracts.notices import SaveWaited
from ckpt_engine.contracts.peer_wire import ListShards, Reply, SavedSteps, ShardList, ShardVerdict
from ckpt_engine.host.host_engine import Engine
from ckpt_engine.host.state_dir import EngineStateDir
from ckpt_engine.peers.transport.handshake import introduce
from ckpt_engine.peers.transport.port import ByteCounters, Identity
from ckpt_engine.peers.transport.tcp import connect_tcp
from ckpt_engine.settings import EngineSettings
from flyball.contracts.checkpoints import CheckpointSpec
from flyball.contracts.errors import Unreachable
from flyball.contracts.identity import Fence
from flyball.contracts.on_host.engine_wire import Configure, GetStatus, Release
from flyball.contracts.on_host.segments import SHM_DIR_VARIABLE
from services.rules.engine_keys import EngineKeyring

PLACEMENT = make_placement({"host": (0,)})


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setenv(SHM_DIR_VARIABLE, str(tmp_path))
    made = make(EngineStateDir(tmp_path / "state"))
    made.start()
    yield made
    made.stop()


def make(state: EngineStateDir) -> Engine:
    return Engine(state, host_id="host", address="127.0.0.1", port=0, token=b"token", settings=EngineSettings())


def test_how_long_a_host_is_in_touch_does_not_depend_on_when_its_engine_reads_that(engine: Engine) -> None:
    in_touch = engine._contact.in_touch
    assert not in_touch()
    engine.answer(GetStatus(in_touch_until_s=time.monotonic() - 0.001))  # the request waited for a stopped engine
    assert not in_touch()
    engine.answer(GetStatus(in_touch_until_s=time.monotonic() + 3600.0))
    assert in_touch()
    engine.answer(GetStatus())  # another client's request revokes nothing
    assert in_touch()


def test_late_saves_of_an_ended_job_are_in_later_replies(engine: Engine) -> None:
    engine.answer(Configure(Fence(1, 1), "host", PLACEMENT, CheckpointSpec()))
    for step in (7, 8, 9):
        engine._receive_notice(SaveWaited("job", 0, 1, step, 0.5))
    engine.answer(Release(Fence(1, 1), "job"))
    assert [(late.step, late.count) for late in engine.answer(GetStatus()).late] == [(7, 1), (9, 2)]


def test_late_saves_that_nobody_asked_for_outlive_several_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHM_DIR_VARIABLE, str(tmp_path))
    state = EngineStateDir(tmp_path / "state")
    first = make(state)
    first.answer(Configure(Fence(1, 1), "host", PLACEMENT, CheckpointSpec()))
    for step in (7, 8, 9):
        first._receive_notice(SaveWaited("job", 0, 1, step, 0.5))
    first.answer(Release(Fence(1, 1), "job"))  # also of a job that ended
    first.stop()
    make(state).stop()
    killed = make(state)
    killed._peer_server.close()
    killed._control.close()
    killed._notices.close()
    reporting = make(state)
    assert [(late.step, late.count) for late in reporting.answer(GetStatus()).late] == [(7, 1), (9, 2)]
    reporting.answer(GetStatus())
    assert not (state.path / "engine-late-saves.json").exists()
    reporting.stop()
    last = make(state)
    assert last.answer(GetStatus()).late == ()
    last.stop()


def test_an_engine_starts_whatever_is_where_late_saves_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHM_DIR_VARIABLE, str(tmp_path))
    state = EngineStateDir(tmp_path / "state")
    (state.path / "engine-late-saves.json").mkdir()
    engine = make(state)
    for _ in range(2):
        assert engine.answer(GetStatus()).late == ()
    engine.stop()


def test_the_shared_key_is_enough_for_jobs_that_brought_no_keys_and_for_no_other(engine: Engine) -> None:
    older = make_placement({"host": (0,), "peer": (1,)}, job="older")
    newer = make_placement({"host": (0,), "peer": (1,)}, job="newer")
    keys = EngineKeyring("a secret of this test").keys_of("host", newer)
    engine.answer(Configure(Fence(1, 1), "host", newer, CheckpointSpec(), keys))
    engine.answer(Configure(Fence(1, 1), "host", older, CheckpointSpec()))
    settings = EngineSettings()
    with connect_tcp(engine.address, settings=settings, total=ByteCounters()) as connection:
        introduce(connection, identity=Identity("peer", "127.0.0.1:1", "1"), token=b"token", timeout_s=60)
        for job, verdict in (("older", ShardVerdict.OK), ("newer", ShardVerdict.FOREIGN)):
            said = SavedSteps(job, older.generation, 1, (), ())
            assert connection.request(said, Reply, timeout_s=60).verdict is verdict
        assert connection.request(ListShards("older", 0), ShardList, timeout_s=60).copies == ()
        with pytest.raises(Unreachable):
            connection.request(ListShards("newer", 0), ShardList, timeout_s=60)
    assert engine.answer(GetStatus()).counters["frames_of_foreign_hosts"] == 2


def test_the_answer_key_of_a_status_is_kept(tmp_path: Path, engine: Engine) -> None:
    keys = EngineKeyring("a secret of this test").answering("host")
    engine.answer(GetStatus(keys=keys))
    engine.answer(GetStatus())
    assert keys.answer in (tmp_path / "state/engine-keys.json").read_text()
    assert keys.answer not in repr(GetStatus(keys=keys))


def test_what_a_restarted_daemon_says_again_does_not_reorder_the_keys(engine: Engine) -> None:
    older, newer = EngineKeyring("a secret of this test"), EngineKeyring("a new secret")
    configure = Configure(Fence(1, 1), "host", PLACEMENT, CheckpointSpec(), older.keys_of("host", PLACEMENT))
    engine.answer(configure)
    engine.answer(GetStatus(keys=newer.answering("host")))
    engine.answer(configure)
    assert engine._keys._answer_keys == (newer.answering("host").answer, older.answering("host").answer)
