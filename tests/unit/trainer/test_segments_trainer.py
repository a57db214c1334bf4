"""The trainer's side. The test plays the engine: it reads notices and writes control words."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.clocks.waits import until
from support.jobs.rank_alone import slots_of
from support.stores.shards import make_manifest

import flyball
from ckpt_engine.contracts.control_views import RestoreState, RestoreWords
from ckpt_engine.contracts.notices import Captured, Notice, SaveAborted, SaveWaited
from ckpt_engine.format import manifest as manifests
from ckpt_engine.rules.save_schedule import is_due
from ckpt_engine.rules.slot_rules import SlotState
from ckpt_engine.slots import memory_limits
from ckpt_engine.slots.control_file import CONTROL_BYTES
from ckpt_engine.slots.rank_segments import RankSegments
from ckpt_engine.trainer.trainer_engine import NO_SUPERVISOR, NOT_DUE
from flyball.contracts import wire
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, Tier, branch
from flyball.contracts.cluster import Phase
from flyball.contracts.errors import (
    CheckpointError,
    ConfigurationError,
    MemoryTooSmall,
    RestoreFailed,
    StateMismatch,
    UnsupportedState,
    UsageError,
)
from flyball.contracts.on_host.segments import SLOT_SUFFIXES, rank_segment
from flyball.sdk.beacon import BeaconReader, create_beacon
from flyball.sdk.trainer import Job
from flyball.sdk.worker_identity import WorkerIdentity, read_identity


@pytest.fixture
def identity(lone_rank: WorkerIdentity, tmp_path: Path) -> WorkerIdentity:
    """A single supervised rank with slots and no engine."""
    beacon = str(tmp_path / "beacon")
    create_beacon(beacon)
    return replace(
        lone_rank,
        beacon=beacon,
        checkpoint=CheckpointSpec(save_timeout_s=60.0, restore_timeout_s=60.0),
        error_file=str(tmp_path / "error.json"),
    )


class Engine:
    """The engine's side of the segments and the notify socket."""

    def __init__(self, identity: WorkerIdentity) -> None:
        self.segments = RankSegments.open(rank_segment(identity.shm_prefix, identity.job, identity.rank), create=True)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(identity.engine_notify)
        self.socket.settimeout(60.0)
        self.segments.control.begin_world(1, -1)

    def notice(self) -> Captured | SaveAborted:
        """The next notice, except of late saves: on a busy machine any save may be late."""
        while isinstance(notice := wire.decode(self.socket.recv(4096), Notice), SaveWaited):  # type: ignore[arg-type]
            pass
        return notice  # type: ignore[return-value]  # a union of tagged structs

    def commit(self, index: int, *, world: bool = True) -> None:
        view = self.segments.slots()[index]
        made = make_manifest(self.segments.payload(index), view.step, generation=view.generation)
        assert self.segments.commit(view, manifests.encode(made))
        self.segments.control.note_replicated(view.step)
        if world:
            self.segments.control.advance_world(view.step)


@pytest.fixture
def engine(identity: WorkerIdentity, tmp_path: Path) -> Iterator[Engine]:
    made = Engine(replace(identity, engine_notify=str(tmp_path / "notify.sock")))
    yield made
    made.socket.close()


@pytest.fixture
def with_engine(identity: WorkerIdentity, engine: Engine, tmp_path: Path) -> WorkerIdentity:
    return replace(identity, engine_notify=str(tmp_path / "notify.sock"))


def state(value: float) -> dict[str, Any]:
    return {"t": torch.full((100,), value), "n": {"value": value}}


# --- attach ---


def _of_another_version(path: Path) -> None:
    path.write_bytes(b"\0" * CONTROL_BYTES)


def _a_folder(path: Path) -> None:
    path.mkdir()


def _away(path: Path) -> None:
    path.parent.rmdir()


@pytest.mark.parametrize("break_it", [_of_another_version, _a_folder, _away])
def test_slots_that_cannot_be_opened_do_not_stop_training(
    with_engine: WorkerIdentity,
    engine: Engine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    break_it: Callable[[Path], None],
) -> None:
    folder = tmp_path / "shm"
    folder.mkdir()
    spec = CheckpointSpec(every_steps=2)
    broken = replace(with_engine, shm_prefix=str(folder / "flyball-test"), checkpoint=spec)
    break_it(Path(rank_segment(broken.shm_prefix, "job", 0) + ".ctl"))
    with Job(broken) as job:
        assert "could not be opened" in capsys.readouterr().err
        assert job.restore(state(0.0)) == 0
        job.step(0)
        handle = job.save(0, state(0.0))
        assert "could not be opened" in handle.error
        assert not handle.staged.wait(60.0)
        assert isinstance(notice := engine.notice(), SaveAborted)
        assert notice.step == 0
        assert job.save(1, state(0.0)).skipped == NOT_DUE
        assert job.failed_saves == 1
        assert job.recovery_point == -1
    with Job(replace(broken, restore_step=7)) as job, pytest.raises(SystemExit) as ended:
        job.restore(state(0.0))
    assert ended.value.code == RestoreFailed.exit_code
    assert "could not be opened" in json.loads(Path(broken.error_file).read_text())["message"]["message"]


def test_without_a_supervisor_a_script_runs_and_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    with flyball.attach() as job:
        assert (job.rank, job.world_size, job.generation) == (1, 2, 3)
        assert job.restore(state(0.0)) == 0
        loss = torch.tensor(1.0)
        job.step(0, loss=loss)
        assert job.loss is loss
        handle = job.save(0, state(1.0))
        assert handle.skipped == NO_SUPERVISOR
        assert not handle.staged and not handle.durable.wait(60.0)
        assert (job.recovery_point, job.failed_saves) == (-1, 0)
        handle.check()


@pytest.mark.parametrize(
    "variable", ["RANK", "FLYBALL_GENERATION", "FLYBALL_RESTORE_STEP", "FLYBALL_CHECKPOINT", "FLYBALL_LINEAGE"]
)
def test_a_variable_that_makes_no_sense_is_named(variable: str) -> None:
    with pytest.raises(ConfigurationError, match=variable):
        read_identity({variable: "{"})


def test_the_daemons_variables_are_read() -> None:
    lineage = branch((LineageEntry(1),), restored_step=7, generation=2)
    found = read_identity(
        {
            "FLYBALL_JOB": "j",
            "FLYBALL_GENERATION": "2",
            "FLYBALL_RESTORE_STEP": "7",
            "FLYBALL_LINEAGE": wire.encode(lineage).decode(),
            "FLYBALL_CHECKPOINT": '{"every_steps": 5}',
            "RANK": "3",
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
        }
    )
    assert (found.job, found.generation, found.restore_step, found.lineage) == ("j", 2, 7, lineage)
    assert (found.checkpoint.every_steps, found.rank, found.world_size, found.local_world_size) == (5, 3, 4, 2)
    assert read_identity({"FLYBALL_RESTORE_STEP": ""}).restore_step is None


def test_the_beacon_tells_of_phases_and_moments(identity: WorkerIdentity) -> None:
    reader = BeaconReader(identity.beacon)
    job = Job(identity)
    assert (reader.snapshot().attached_ns > 0, reader.snapshot().phase) == (True, Phase.STARTING)
    job.restore({})
    assert reader.snapshot().restored_ns >= reader.snapshot().restore_began_ns > 0
    with job.phase("eval"):
        assert reader.snapshot().phase is Phase.EVAL
    assert reader.snapshot().phase is Phase.STEP
    with pytest.raises(UsageError, match="no phase 'lunch'"), job.phase("lunch"):
        pass
    job.step(0)
    job.save(0, state(0.0))
    snapshot = reader.snapshot()
    assert (snapshot.step, snapshot.phase) == (0, Phase.STEP)
    assert snapshot.save_blocked_ns > 0 and snapshot.first_step_ns > 0
    job.close()
    assert reader.snapshot().phase is Phase.DONE


# --- save and restore without an engine ---


def test_a_lone_rank_commits_for_itself_and_restores(identity: WorkerIdentity) -> None:
    job = Job(identity)
    assert job.restore(state(0.0)) == 0
    for step in range(5):
        job.step(step)
        handle = job.save(step, state(float(step)))
        assert handle.staged and not handle.error
    assert handle.replicated.wait(60.0)
    until(lambda: job.recovery_point == 4)
    assert not handle.durable
    job.close()

    target = state(-1.0)
    again = Job(
        replace(identity, generation=2, restore_step=4, lineage=branch(identity.lineage, restored_step=4, generation=2))
    )
    assert again.restore(target) == 5
    assert target["t"].tolist() == [4.0] * 100 and target["n"] == {"value": 4.0}
    assert again.recovery_point == 4
    segments = slots_of(identity)
    held = [bytes(segments.payload(i)) for i in range(2)]
    target["t"].fill_(9.0)  # does not alias the slot
    assert [bytes(segments.payload(i)) for i in range(2)] == held
    assert again.save(4, target).skipped
    assert again.save(5, target).staged
    again.close()


def test_a_shard_that_was_captured_and_never_committed_is_restored(
    identity: WorkerIdentity, with_engine: WorkerIdentity, engine: Engine
) -> None:
    """The worker died in between; the bytes are whole."""
    Job(with_engine).save(0, state(3.0))
    assert engine.segments.slots()[0].state is SlotState.CAPTURED
    target = state(0.0)
    lineage = branch(identity.lineage, restored_step=0, generation=2)
    assert Job(replace(identity, generation=2, restore_step=0, lineage=lineage)).restore(target) == 1
    assert target["n"] == {"value": 3.0}


def test_ranks_of_one_host_keep_a_common_step_without_an_engine(identity: WorkerIdentity) -> None:
    spec = CheckpointSpec(save_timeout_s=0.05)
    ranks = [
        Job(replace(identity, rank=rank, world_size=2, local_world_size=2, beacon="", checkpoint=spec))
        for rank in range(2)
    ]
    assert all(job.save(0, state(0.0)).staged for job in ranks)
    until(lambda: all(job.recovery_point == 0 for job in ranks))
    assert ranks[0].save(1, state(1.0)).staged
    ahead = ranks[0].save(2, state(2.0))
    assert "No slot was free" in ahead.error  # rank 1 has only step 0: neither 0 nor 1 may go
    assert ranks[1].save(1, state(1.0)).staged
    until(lambda: all(job.recovery_point == 1 for job in ranks))
    assert ranks[0].save(3, state(3.0)).staged
    for job in ranks:
        job.close()


def test_ranks_on_several_hosts_without_an_engine_get_no_slots(identity: WorkerIdentity) -> None:
    job = Job(replace(identity, world_size=4, local_world_size=2))
    assert job.save(0, state(0.0)).skipped == NO_SUPERVISOR


def test_a_corrupt_slot_is_not_restored_and_not_listed_again(
    identity: WorkerIdentity, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(identity)
    job.save(0, state(0.0))
    until(lambda: job.recovery_point == 0)
    job.close()
    path = Path(rank_segment(identity.shm_prefix, "job", 0) + SLOT_SUFFIXES[0])
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    again = Job(
        replace(identity, generation=2, restore_step=0, lineage=branch(identity.lineage, restored_step=0, generation=2))
    )
    with pytest.raises(SystemExit) as exit_:
        again.restore(state(0.0))
    assert exit_.value.code == 23
    assert "does not match its checksum" in capsys.readouterr().err
    error = json.loads(Path(identity.error_file).read_text())["message"]
    assert (
        error["message"].startswith("RestoreFailed: Rank 0 cannot have step 0")
        and "Traceback" in error["extraInfo"]["py_callstack"]
    )
    segments = slots_of(identity)
    assert segments.slots()[0].state is SlotState.EMPTY


def test_an_error_file_that_cannot_be_written_does_not_hide_the_exit_code(
    identity: WorkerIdentity, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lineage = branch(identity.lineage, restored_step=0, generation=2)
    nowhere = str(tmp_path / "gone" / "error.json")
    with pytest.raises(SystemExit) as exit_:
        Job(replace(identity, generation=2, restore_step=0, lineage=lineage, error_file=nowhere)).restore(state(0.0))
    assert exit_.value.code == 23
    assert "could not be written" in capsys.readouterr().err


def test_a_state_that_does_not_fit_is_the_jobs_own_error(identity: WorkerIdentity) -> None:
    job = Job(identity)
    job.save(0, state(0.0))
    job.close()
    again = Job(
        replace(identity, generation=2, restore_step=0, lineage=branch(identity.lineage, restored_step=0, generation=2))
    )
    with pytest.raises(StateMismatch, match="'t' is"):
        again.restore({"t": torch.zeros(3)})


# --- which steps ---


def test_a_step_is_due_for_whichever_tier_wants_it() -> None:
    spec = CheckpointSpec(every_steps=3, disk_dir="/disk", disk_every_steps=5, persistent_every_steps=7)
    assert [step for step in range(11) if is_due(spec, step)] == [0, 3, 5, 6, 9, 10]
    assert [step for step in range(11) if is_due(spec, step, named_step=7)] == [0, 3, 5, 6, 7, 9, 10]
    assert not is_due(CheckpointSpec(every_steps=0), 0)


def test_only_due_steps_are_saved_and_positions_move_at_all(with_engine: WorkerIdentity, engine: Engine) -> None:
    job = Job(replace(with_engine, checkpoint=CheckpointSpec(every_steps=2)))
    assert job.save(0, state(0.0)).staged
    handle = job.save(1, state(1.0))
    assert handle.skipped == NOT_DUE
    assert engine.segments.control.position(1) == 1
    assert job.save(1, state(1.0)).skipped.startswith("step 1 was saved")


# --- save with an engine ---


def test_the_engine_is_notified_and_its_work_shows_on_the_handle(with_engine: WorkerIdentity, engine: Engine) -> None:
    job = Job(with_engine)
    handle = job.save(0, state(1.0))
    notice = engine.notice()
    assert notice == Captured("job", rank=0, generation=1, step=0, slot=0, copied_s=notice.copied_s)
    assert notice.copied_s > 0.0
    assert handle.staged and not handle.replicated and not handle.durable
    engine.commit(0)
    assert handle.replicated and job.recovery_point == 0
    engine.segments.control.note_durable(0)
    assert handle.durable.wait(0.0)
    assert repr(handle) == "SaveHandle(step=0, staged)"


def test_a_save_waits_for_the_world_and_goes_on_as_soon_as_it_may(with_engine: WorkerIdentity, engine: Engine) -> None:
    job = Job(with_engine)
    job.save(0, state(0.0))
    job.save(1, state(1.0))
    engine.commit(0)
    timer = threading.Timer(0.1, engine.commit, args=(1,))
    began_s = time.monotonic()
    timer.start()
    handle = job.save(2, state(2.0))
    assert handle.staged and time.monotonic() - began_s > 0.05
    assert [view.step for view in engine.segments.slots()] == [2, 1]
    timer.join()


def test_a_step_that_was_abandoned_frees_its_slot(with_engine: WorkerIdentity, engine: Engine) -> None:
    job = Job(with_engine)
    job.save(0, state(0.0))
    engine.commit(0)
    job.save(1, state(1.0))
    engine.commit(1, world=False)
    engine.segments.control.abandon([1])
    assert job.save(2, state(2.0)).staged
    assert [view.step for view in engine.segments.slots()] == [0, 2]


def test_a_dead_engine_costs_a_moment_and_no_exception(with_engine: WorkerIdentity, engine: Engine) -> None:
    job = Job(replace(with_engine, checkpoint=CheckpointSpec(save_timeout_s=60.0)))
    engine.socket.close()
    assert job.save(0, state(0.0)).staged and job.save(1, state(1.0)).staged
    began_s = time.monotonic()
    handle = job.save(2, state(2.0))
    assert time.monotonic() - began_s < 50.0, "nobody waits for it until the save has no time left"
    assert "is not running" in handle.error and job.failed_saves == 1
    assert not handle.staged.wait(60.0)
    with pytest.raises(CheckpointError, match="is not running"):
        handle.check()
    assert "is not running" not in job.save(3, state(3.0)).error  # not checked again until the world moves


def test_a_stuck_engine_is_waited_for_once(with_engine: WorkerIdentity, engine: Engine) -> None:
    job = Job(replace(with_engine, checkpoint=CheckpointSpec(save_timeout_s=0.3)))
    job.save(0, state(0.0))
    job.save(1, state(1.0))
    assert "within 0.3 s" in job.save(2, state(2.0)).error
    for step in range(3, 20):
        assert "has not moved" in job.save(step, state(2.0)).skipped
    assert (job.failed_saves, job.skipped_saves) == (1, 17)
    notices = [engine.notice() for _ in range(3)]
    assert [type(notice) for notice in notices] == [Captured, Captured, SaveAborted]
    assert notices[2].step == 2
    engine.commit(0)
    engine.commit(1)
    assert job.save(20, state(3.0)).staged


def test_a_save_that_waits_for_a_slot_does_not_look_stalled(with_engine: WorkerIdentity, engine: Engine) -> None:
    beacon = BeaconReader(with_engine.beacon)
    with Job(replace(with_engine, checkpoint=CheckpointSpec(save_timeout_s=60.0))) as job:
        job.save(0, state(0.0))
        job.save(1, state(1.0))
        saving = threading.Thread(target=job.save, args=(2, state(2.0)))
        saving.start()
        moved_ns = set()

        def moved_thrice() -> bool:
            seen = beacon.snapshot()
            if seen.phase is Phase.CHECKPOINT:
                moved_ns.add(seen.moved_ns)
            return len(moved_ns) > 2

        until(moved_thrice)
        engine.commit(0)
        engine.commit(1)
        saving.join(60.0)
        assert not saving.is_alive() and job.failed_saves == 0
        assert beacon.snapshot().phase is not Phase.CHECKPOINT
    beacon.close()


def test_a_long_reason_still_fits_into_a_notice(with_engine: WorkerIdentity, engine: Engine) -> None:
    job = Job(with_engine)
    with pytest.raises(UnsupportedState):
        job.save(0, {"\x01" * 5000: object()})
    notice = engine.notice()
    assert isinstance(notice, SaveAborted) and notice.step == 0


def test_a_superseded_trainer_saves_nothing(with_engine: WorkerIdentity, engine: Engine) -> None:
    job = Job(with_engine)
    engine.segments.control.write_fence(3, 2)
    handle = job.save(0, state(0.0))
    assert "Generation 2 has taken over" in handle.error
    assert [view.state for view in engine.segments.slots()] == [SlotState.EMPTY] * 2


def test_what_cannot_be_saved_is_raised_and_leaves_no_torn_slot(with_engine: WorkerIdentity, engine: Engine) -> None:
    job = Job(with_engine)
    with pytest.raises(UnsupportedState, match="'x'"):
        job.save(0, {"x": object()})
    assert isinstance(engine.notice(), SaveAborted)
    assert job.save(1, state(1.0)).staged


@pytest.mark.parametrize(("restore_step", "raises"), [(None, True), (7, False)])
def test_too_little_memory_stops_a_job_at_its_start_and_only_there(
    with_engine: WorkerIdentity, engine: Engine, monkeypatch: pytest.MonkeyPatch, restore_step: int | None, raises: bool
) -> None:
    monkeypatch.setattr(memory_limits, "available_memory", lambda directory: {"the machine": 100})
    job = Job(replace(with_engine, restore_step=restore_step))
    if raises:
        with pytest.raises(MemoryTooSmall, match="Memory plan"):
            job.save(8, state(0.0))
    else:
        assert "Memory plan" in job.save(8, state(0.0)).error
    assert job.failed_saves == 1


# --- the emergency step ---


def test_at_the_emergency_step_a_rank_saves_and_parks_until_released(
    with_engine: WorkerIdentity, engine: Engine
) -> None:
    job = Job(replace(with_engine, checkpoint=CheckpointSpec(every_steps=0)))
    reader = BeaconReader(with_engine.beacon)
    assert job.save(0, state(0.0)).skipped == NOT_DUE
    assert engine.segments.control.arm(1, 2) == 0
    assert job.save(1, state(1.0)).skipped == NOT_DUE
    handles = []
    thread = threading.Thread(target=lambda: handles.append(job.save(2, state(2.0))))
    thread.start()
    until(lambda: reader.snapshot().phase is Phase.PARKED)
    assert isinstance(engine.notice(), Captured)
    engine.commit(0)
    assert thread.is_alive()
    engine.segments.control.disarm()
    thread.join(timeout=60.0)
    assert handles[0].staged and handles[0].replicated
    assert reader.snapshot().phase is Phase.STEP
    assert job.save(3, state(3.0)).skipped == NOT_DUE


def test_an_emergency_step_of_another_generation_means_nothing(with_engine: WorkerIdentity, engine: Engine) -> None:
    engine.segments.control.arm(0, 1)
    job = Job(replace(with_engine, checkpoint=CheckpointSpec(every_steps=0)))
    assert job.save(1, state(1.0)).skipped == NOT_DUE


# --- restore with an engine ---


def restoring(with_engine: WorkerIdentity, step: int = 6) -> WorkerIdentity:
    lineage = branch(with_engine.lineage, restored_step=step, generation=2)
    return replace(with_engine, generation=2, restore_step=step, lineage=lineage)


def test_a_shard_that_the_engine_fetches_is_waited_for(with_engine: WorkerIdentity, engine: Engine) -> None:
    writer = Job(with_engine)
    for step in (5, 6):
        writer.save(step, state(float(step)))
    engine.segments.drop(1)
    engine.commit(0)
    engine.segments.control.begin_world(2, 6)
    found: list[tuple[int, dict[str, Any]]] = []

    def restore() -> None:
        target = state(0.0)
        found.append((Job(restoring(with_engine)).restore(target), target))

    thread = threading.Thread(target=restore)
    thread.start()
    other = Job(replace(with_engine, job="elsewhere", beacon=""))  # the peer's copy of the shard
    other.save(6, state(6.5))
    source = RankSegments.open(rank_segment(with_engine.shm_prefix, "elsewhere", 0)).payload(0)
    engine.segments.begin_write(1, 1, 6, len(source))[:] = source
    engine.segments.mark_captured(1)
    assert thread.is_alive()
    engine.commit(1)
    engine.segments.control.write_restore(RestoreWords(2, RestoreState.READY, 6, 1, Tier.PEER, len(source), ""))
    thread.join(timeout=60.0)
    assert found[0][0] == 7 and found[0][1]["n"] == {"value": 6.5}


def test_a_restore_that_the_engine_gave_up_says_why(with_engine: WorkerIdentity, engine: Engine) -> None:
    failed = RestoreWords(2, RestoreState.FAILED, 6, -1, Tier.MEMORY, 0, "host-b: connection refused")
    engine.segments.control.write_restore(failed)
    with pytest.raises(RestoreFailed, match=r"step 6: host-b: connection refused"):
        Job(replace(restoring(with_engine), beacon="")).restore(state(0.0))


def test_no_slot_stays_mapped_after_a_failed_restore_or_the_first_save(
    identity: WorkerIdentity, tmp_path: Path
) -> None:
    spec = CheckpointSpec(save_timeout_s=60.0, restore_timeout_s=60.0)
    job = Job(replace(identity, checkpoint=spec))
    job.save(0, state(3.0))
    until(lambda: job.recovery_point == 0)
    job.close()
    lineage = branch(identity.lineage, restored_step=0, generation=2)
    later = replace(identity, generation=2, restore_step=0, lineage=lineage)
    slot = slots_of(identity).path_of(0)

    def is_mapped() -> bool:
        return slot in Path("/proc/self/maps").read_text()

    assert not is_mapped()
    again = Job(later)
    assert is_mapped()
    with pytest.raises(StateMismatch):
        again.restore({"t": torch.zeros(3), "n": {}})
    until(lambda: not is_mapped())
    target = state(0.0)
    assert again.restore(target) == 1  # it is read from the file
    assert target["n"] == {"value": 3.0}
    again.close()
    unread = Job(later)
    assert is_mapped()
    assert unread.save(1, state(4.0)).staged
    until(lambda: not is_mapped())
    unread.close()


def test_a_restore_has_a_deadline(with_engine: WorkerIdentity, engine: Engine) -> None:
    spec = CheckpointSpec(restore_timeout_s=0.2)
    with pytest.raises(RestoreFailed, match=r"within 0\.2 s"):
        Job(replace(restoring(with_engine), beacon="", checkpoint=spec)).restore(state(0.0))


def test_a_shard_of_another_run_is_not_restored_from_slot_or_file(
    with_engine: WorkerIdentity, engine: Engine, tmp_path: Path
) -> None:
    """Job, generation, step and rank are equal."""
    Job(with_engine).save(6, state(6.0))
    engine.commit(0)  # of no run
    path = tmp_path / "rank0.safetensors"
    path.write_bytes(bytes(engine.segments.payload(0)))
    data = engine.segments.manifest_bytes(0)
    assert data is not None
    path.with_suffix(".manifest").write_bytes(manifests.as_file(data))
    spec = CheckpointSpec(restore_timeout_s=0.2)
    this = replace(restoring(with_engine), beacon="", checkpoint=spec)
    offer = RestoreWords(2, RestoreState.FILE, 6, -1, Tier.DISK, 0, "", str(path))
    for tier in ("slot", "file"):
        if tier == "file":
            engine.segments.control.write_restore(offer)
        target = state(0.0)
        with pytest.raises(RestoreFailed):
            Job(replace(this, run="20251120-104300-123")).restore(target)
        assert target["n"] == {"value": 0.0}
    engine.segments.drop(0)
    engine.segments.control.write_restore(replace(offer, generation=3))
    next_one = replace(
        this, generation=3, lineage=(LineageEntry(1, 6), LineageEntry(3)), checkpoint=with_engine.checkpoint
    )
    assert Job(next_one).restore(target) == 7 and target["n"] == {"value": 6.0}  # it accepts the file of its own run


def test_a_step_that_the_engine_could_not_keep_is_reported(with_engine: WorkerIdentity, engine: Engine) -> None:
    with Job(with_engine) as job:
        handle = job.save(0, state(0.0))
        assert job.wait_captured(60.0)
        engine.segments.control.note_lost(0)
        assert job.wait_until_finished(60.0), "it is over"
        assert "could not keep it" in handle.error
        with pytest.raises(CheckpointError, match="Step 0 was captured"):
            job.check_for_errors()
        job.check_for_errors()  # reported already
        assert job.failed_saves == 1
        engine.segments.control.note_lost(7)  # never captured
        job.check_for_errors()
