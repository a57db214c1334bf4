"""What a slot holds is what the state was at the call of `save`, however training goes on: when `save` returns, nothing
of the state is read any more."""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load as load_with_the_library
from support.clocks.waits import until
from support.jobs.rank_alone import rank_alone, slots_of
from support.jobs.stand_in_device import StandInDevice

from ckpt_engine.trainer.capture import capturer, copy_threads
from ckpt_engine.trainer.capture.copy_threads import CopyThreads, thread_count
from ckpt_engine.trainer.save_handle import SaveHandle
from ckpt_engine.trainer.state.state_tree import flatten
from flyball.contracts.checkpoints import CheckpointSpec, WhenFull
from flyball.contracts.cluster import Phase
from flyball.contracts.errors import CheckpointError, UnsupportedState
from flyball.sdk.trainer import Job
from flyball.sdk.worker_identity import WorkerIdentity

WIDTH = 96  # a matrix has 36 KiB: not small, and several of the test's pieces
DEADLINE_S = 120.0


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two threads copy what has few bytes."""
    monkeypatch.setattr(copy_threads, "_MIN_PIECE_BYTES", 4096)
    monkeypatch.setattr(copy_threads, "_threads", CopyThreads(2))


@pytest.fixture
def job(tmp_path: os.PathLike[str]) -> Iterator[Job]:
    with Job(identity(tmp_path)) as made:
        yield made


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInDevice]:
    """Each matrix is on it, and there is room for snapshots."""
    made = StandInDevice(room_bytes=1 << 30)
    monkeypatch.setattr(capturer, "CudaStreams", lambda: made)
    yield made
    made.may_transfer.set()


def identity(folder: os.PathLike[str], **settings: object) -> WorkerIdentity:
    """A single rank that commits for itself."""
    return rank_alone(
        f"{os.fspath(folder)}/flyball-test",
        checkpoint=msgspec.structs.replace(CheckpointSpec(save_timeout_s=DEADLINE_S), **settings),
    )


def contents(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in flatten(state).tensors.items()}


def slot_contents(job: Job, handle: SaveHandle) -> dict[str, torch.Tensor]:
    """The slot's content, once committed."""
    assert handle.replicated.wait(DEADLINE_S), handle
    segments = slots_of(job._identity)
    view = segments.find(1, handle.step)
    assert view is not None
    return load_with_the_library(bytes(segments.payload(view.index)))


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if content(found[name]) != content(expected[name])] == []


def content(tensor: torch.Tensor) -> bytes:
    plain = tensor.contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


CORPUS = Path(__file__).parents[2] / "capture_corpus"
# Not those that need other ranks, a compiler or a GPU, or leave a thread, a process or a hook behind.
NOT_HERE = {"threads", "ranks", "cuda", "c_kernel", "inductor", "shared_memory", "offloaded", "global_hook"}
WAYS = sorted(
    f"{path.parent.name}.{path.stem}" for path in CORPUS.glob("*/*.py") if not {path.parent.name, path.stem} & NOT_HERE
)


@pytest.mark.parametrize("way", WAYS)
def test_however_a_loop_writes_after_save_it_tears_nothing(job: Job, way: str) -> None:
    """Under `flyball run`, and killed: tests/capture_corpus."""
    loop = importlib.import_module(f"capture_corpus.{way}").make()
    for number in range(3):
        loop.step()
        expected = contents(loop.state)
        handle = job.save(number, loop.state)
        assert handle.staged
        loop.after_save()
        assert_same(slot_contents(job, handle), expected)
    assert job.failed_saves == 0


@pytest.mark.parametrize("way", WAYS[::5])
def test_what_is_written_while_a_snapshot_goes_to_its_slot_tears_nothing(
    job: Job, device: StandInDevice, way: str
) -> None:
    loop = importlib.import_module(f"capture_corpus.{way}").make()
    for number in range(2):
        assert job.wait_captured(DEADLINE_S)
        loop.step()
        expected = contents(loop.state)
        device.may_transfer.clear()
        handle = job.save(number, loop.state)
        loop.after_save()
        loop.step()
        device.may_transfer.set()
        assert_same(slot_contents(job, handle), expected)


def test_save_does_not_return_while_a_thread_copies(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    may_copy, is_copying = threading.Event(), threading.Event()

    def held_up(*piece: int) -> None:
        if threading.current_thread().name == "flyball-copy":
            is_copying.set()
            assert may_copy.wait(DEADLINE_S)
        elif not is_copying.is_set():
            assert is_copying.wait(DEADLINE_S)
        ctypes.memmove(*piece)

    monkeypatch.setattr(copy_threads, "memmove", held_up)
    state = {"w": torch.randn(64 << 10)}
    handles: list[SaveHandle] = []
    saving = threading.Thread(target=lambda: handles.append(job.save(0, state)))
    saving.start()
    assert is_copying.wait(DEADLINE_S)
    saving.join(0.05)
    assert saving.is_alive() and not handles
    may_copy.set()
    saving.join(DEADLINE_S)
    assert_same(slot_contents(job, handles[0]), contents(state))


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(1, "1", 1), (2, "1", 2), (2, "2", 1), (2, "8", 1), (96, "8", 8), (96, "x", 8)]
)
def test_the_ranks_of_a_host_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: str, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert thread_count() == threads


def test_ctrl_c_ends_a_copy_when_no_thread_writes_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    may_copy, is_copying = threading.Event(), threading.Event()

    def interrupted(target: int, source: int, size_bytes: int) -> None:
        if threading.current_thread().name == "flyball-copy":
            is_copying.set()
            assert may_copy.wait(DEADLINE_S)
            ctypes.memmove(target, source, size_bytes)
            return
        assert is_copying.wait(DEADLINE_S)
        threading.Timer(0.05, may_copy.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(copy_threads, "memmove", interrupted)
    source, target = torch.ones(64 << 10), torch.zeros(64 << 10)
    with pytest.raises(KeyboardInterrupt):
        CopyThreads(2).copy([(target.data_ptr(), source.data_ptr(), source.nbytes)])
    assert int(target.sum()) == 8192 // 4, "one piece: that of the other thread"


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, as in quantized optimizers."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, operation: Any, *_: Any) -> Any:  # noqa: ANN401 - torch's
        raise NotImplementedError(operation)


def test_tensors_that_wrap_others_are_refused_by_name(job: Job) -> None:
    with pytest.raises(UnsupportedState, match=r"'x\.y' is a Wrapper"):
        job.save(0, {"x": {"y": Wrapper(torch.ones(3))}})


def test_a_wait_for_a_slow_transfer_does_not_look_stalled(job: Job, device: StandInDevice) -> None:
    device.may_transfer.clear()
    stamped: list[tuple[int, Phase]] = []

    def stamp(at_ns: int, phase: Phase) -> None:
        stamped.append((at_ns, phase))
        if len(stamped) > 3:
            device.may_transfer.set()

    handle = job.save(0, {"w": torch.randn(WIDTH, WIDTH)})
    assert device.is_transferring.wait(DEADLINE_S)
    job._beacon.on_phase = stamp
    assert job.wait_captured(DEADLINE_S) and handle.staged
    assert {phase for _, phase in stamped[:4]} == {Phase.CHECKPOINT}


def test_the_next_save_waits_for_the_transfer_before_and_a_closed_job_has_its_last(
    tmp_path: os.PathLike[str], device: StandInDevice
) -> None:
    job = Job(identity(tmp_path))
    state = {"w": torch.randn(WIDTH, WIDTH)}
    expected = contents(state)
    device.may_transfer.clear()
    handles = [job.save(0, state)]
    assert not handles[0].staged
    second = threading.Thread(target=lambda: handles.append(job.save(1, state)))
    second.start()
    until(lambda: device.is_transferring.is_set() and len(handles) == 1)
    device.may_transfer.set()
    second.join(DEADLINE_S)
    assert handles[0].staged
    assert_same(slot_contents(job, handles[0]), expected)
    device.may_transfer.clear()
    job.wait_captured(DEADLINE_S)
    last = job.save(2, state)
    threading.Timer(0.05, device.may_transfer.set).start()
    job.close()
    assert last.staged and last.is_over
    assert_same(slot_contents(job, last), expected)


@pytest.mark.parametrize("room_bytes", [0, 1 << 30])
def test_a_copy_that_fails_is_an_error_on_the_handle_and_training_goes_on(
    tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch, room_bytes: int
) -> None:
    device = StandInDevice(room_bytes=room_bytes)
    monkeypatch.setattr(capturer, "CudaStreams", lambda: device)
    state = {"w": torch.randn(WIDTH, WIDTH)}
    with Job(identity(tmp_path, raise_on_failure=True)) as job:
        device.failure = RuntimeError("no such memory")
        handle = job.save(0, state)
        assert job.wait_captured(DEADLINE_S)
        assert "no such memory" in handle.error
        assert job.failed_saves == 1 and not handle.staged
        device.failure = None
        with pytest.raises(CheckpointError, match="no such memory"):
            job.save(1, state)
        assert job.save(2, state).replicated.wait(DEADLINE_S)


def test_in_steady_state_nothing_is_planned_or_made_anew(job: Job, tmp_path: Path) -> None:
    loop = importlib.import_module("capture_corpus.fused.adamw").make()
    plans, files, threads = set(), set(), set()
    before = set(threading.enumerate())
    for number in range(6):
        loop.step()
        handle = job.save(number, loop.state)
        assert handle.replicated.wait(DEADLINE_S)
        plans.add(id(job._engine._capturer._plan))  # type: ignore[union-attr]
        files.update((path.name, path.stat().st_ino) for path in tmp_path.glob("*.s?"))
        threads.update(thread for thread in set(threading.enumerate()) - before if thread.name == "flyball-copy")
    assert (len(plans), len(files), len(threads)) == (1, 2, 1)


@pytest.mark.parametrize("change", ["dtype", "shape", "name"])
def test_another_structure_gets_another_plan(job: Job, change: str) -> None:
    state: dict[str, Any] = {"a": torch.randn(100, 100), "b": torch.randn(100, 100)}
    assert_same(slot_contents(job, job.save(0, state)), contents(state))
    if change == "dtype":
        state["a"] = torch.randint(0, 99, (100, 100), dtype=torch.int32)  # of the same size in bytes
    elif change == "shape":
        state["a"] = torch.randn(50, 200)
    else:
        state["c"] = state.pop("a")
    for number in (1, 2, 3):
        handle = job.save(number, state)
        assert_same(slot_contents(job, handle), contents(state))


def test_a_save_that_would_have_to_wait_is_skipped_if_the_job_says_so(tmp_path: os.PathLike[str]) -> None:
    settings = replace(identity(tmp_path, when_full=WhenFull.SKIP), world_size=2, local_world_size=2)
    with Job(settings) as job:  # the host's other rank never saves, so the world stands still
        assert job.save(0, {"x": 1}).staged and job.save(1, {"x": 1}).staged
        handle = job.save(2, {"x": 1})
        assert "needs what is in every slot" in handle.skipped and not handle.error
        assert (job.skipped_saves, job.failed_saves) == (1, 0)
        assert slots_of(settings).control.aborted_steps(1) == {2}
