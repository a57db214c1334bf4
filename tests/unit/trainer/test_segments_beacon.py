from __future__ import annotations

import threading
from pathlib import Path

import pytest

from flyball.contracts.cluster import Phase
from flyball.contracts.errors import StateVersionMismatch
from flyball.sdk.beacon import BEACON_BYTES, RING_ENTRIES, BeaconReader, BeaconWriter, Mark, create_beacon


@pytest.fixture
def path(tmp_path: Path) -> str:
    made = str(tmp_path / "rank.beacon")
    create_beacon(made)
    return made


def test_a_new_beacon_says_that_nothing_happened_yet(path: str) -> None:
    snapshot = BeaconReader(path).snapshot()
    assert (snapshot.phase, snapshot.step, snapshot.step_count, snapshot.moved_ns) == (Phase.STARTING, -1, 0, 0)
    assert snapshot.steps_since(0) == []
    assert (Path(path).stat().st_mode & 0o777, Path(path).stat().st_size) == (0o600, BEACON_BYTES)


def test_steps_marks_and_phases_are_read_back(path: str) -> None:
    writer, reader = BeaconWriter(path), BeaconReader(path)
    writer.mark(Mark.ATTACHED)
    attached_ns = reader.snapshot().attached_ns
    writer.mark(Mark.ATTACHED)
    writer.step(7)
    writer.phase(Phase.EVAL)
    writer.add_save_blocked(5)
    writer.add_save_blocked(6)
    snapshot = reader.snapshot()
    assert (snapshot.step, snapshot.phase, snapshot.save_blocked_ns) == (7, Phase.EVAL, 11)
    assert 0 < attached_ns == snapshot.attached_ns <= snapshot.first_step_ns <= snapshot.moved_ns
    assert snapshot.moved_ns == snapshot.phase_since_ns
    assert snapshot.restored_ns == 0


def test_the_first_step_ends_the_starting_phase_of_a_script_that_never_restores(path: str) -> None:
    writer = BeaconWriter(path)
    writer.step(0)
    assert writer.current_phase is Phase.STEP


def test_every_step_is_seen_exactly_once(path: str) -> None:
    writer, reader = BeaconWriter(path), BeaconReader(path)
    seen: list[int] = []
    count = 0
    for step in range(1000):
        writer.step(step)
        if step % 37 == 0 or step == 999:
            snapshot = reader.snapshot()
            seen += [done for done, _ in snapshot.steps_since(count)]
            count = snapshot.step_count
    assert seen == list(range(1000))


def test_a_reader_that_fell_behind_gets_the_newest_steps(path: str) -> None:
    writer, reader = BeaconWriter(path), BeaconReader(path)
    for step in range(3 * RING_ENTRIES):
        writer.step(step)
    steps = [step for step, _ in reader.snapshot().steps_since(0)]
    assert steps == list(range(2 * RING_ENTRIES + 1, 3 * RING_ENTRIES))


def test_a_reader_beside_a_busy_writer_never_sees_a_torn_entry(path: str) -> None:
    writer, reader = BeaconWriter(path), BeaconReader(path)
    stop = threading.Event()

    def write() -> None:
        step = 0
        while not stop.is_set():
            writer.step(step)
            step += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(300):
            recent = reader.snapshot().recent
            steps = [step for step, _ in recent]
            assert steps == list(range(steps[0], steps[0] + len(steps))) if steps else True
            times = [at for _, at in recent]
            assert times == sorted(times)
    finally:
        stop.set()
        thread.join(timeout=60.0)


def test_a_beacon_made_again_starts_anew(path: str) -> None:
    BeaconWriter(path).step(3)
    create_beacon(path)
    assert BeaconReader(path).snapshot().step == -1


def test_a_writer_without_a_file_works_all_the_same() -> None:
    writer = BeaconWriter(None)
    writer.step(1)
    writer.phase(Phase.DATA)
    assert writer.current_phase is Phase.DATA
    writer.close()


@pytest.mark.parametrize("content", [b"", b"x" * BEACON_BYTES, b"FLYBEAC9".ljust(BEACON_BYTES, b"\0")])
def test_another_versions_beacon_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.beacon"
    path.write_bytes(content)
    with pytest.raises(StateVersionMismatch, match="not a beacon of this version"):
        BeaconReader(str(path))


def test_a_reader_that_was_held_up_for_a_whole_ring_reads_again(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = BeaconWriter(path), BeaconReader(path)
    writer.step(0)
    read = reader._read
    behind = iter(range(1, 3 * RING_ENTRIES))

    def held_up(offset: int, size_bytes: int) -> memoryview:
        """While the reader takes its first copy of the ring, the trainer writes all of it three times over."""
        words = read(offset, size_bytes)
        if size_bytes == 16 * RING_ENTRIES:
            for step in behind:
                writer.step(step)
        return words

    monkeypatch.setattr(reader, "_read", held_up)
    assert reader.snapshot().step == 3 * RING_ENTRIES - 1
