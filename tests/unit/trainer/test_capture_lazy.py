"""No state is ever captured torn: what a slot holds is what the state was at the call of `save`, however training goes
on. The thread in the background is held up on purpose, so that the race is real each time: it copies nothing before the
step that it races with has begun."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load as load_with_the_library
from support.jobs.rank_alone import rank_alone, slots_of
from torch import nn

from ckpt_engine.trainer.capture import hand_writes, optimizer_watch, state_copy
from ckpt_engine.trainer.capture.capturer import Capturer
from ckpt_engine.trainer.save_handle import SaveHandle
from ckpt_engine.trainer.state.state_tree import flatten
from flyball.contracts.checkpoints import CaptureMode, CheckpointSpec, WhenFull
from flyball.contracts.cluster import Phase
from flyball.contracts.errors import CheckpointError
from flyball.sdk.trainer import Job
from flyball.sdk.worker_identity import WorkerIdentity

WIDTH = 96  # a matrix has 36 KiB: not small, and several of the test's pieces
DEADLINE_S = 120.0


class Race:
    """Holds up the background's lazy copies until `begin`, or until a step in the training thread copies too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._copy = state_copy.TensorCopy.copy_piece
        self._open = threading.Event()
        self.is_holding = threading.Event()  # the background holds a piece
        self.is_stepping = False
        self.helped: list[str] = []  # whose pieces the steps copied

        def held_up(copy: state_copy.TensorCopy, begin: int, end: int) -> None:
            self._held_up(copy, begin, end)

        monkeypatch.setattr(state_copy.TensorCopy, "copy_piece", held_up)
        monkeypatch.setattr(state_copy, "PIECE_BYTES", 4096)
        monkeypatch.setattr(hand_writes, "TRIALS", 0)  # make the first saves lazy, too

    def _held_up(self, copy: state_copy.TensorCopy, begin: int, end: int) -> None:
        if threading.current_thread().name == "flyball-copy" and copy.version is not None:
            self.is_holding.set()
            assert self._open.wait(DEADLINE_S)
        elif self.is_stepping:
            self.helped.append(copy.name)
            self._open.set()
        self._copy(copy, begin, end)

    def close(self) -> None:
        self._open.clear()

    def begin(self) -> None:
        self._open.set()


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch) -> Iterator[Race]:
    made = Race(monkeypatch)
    yield made
    made.begin()


@pytest.fixture
def job(tmp_path: os.PathLike[str], race: Race) -> Iterator[Job]:
    made = Job(identity(tmp_path))
    yield made
    race.begin()
    made.close()


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
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


Step = Callable[[], None]
Loop = Callable[[], tuple[dict[str, Any], Step]]


def batch(rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, WIDTH)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def trained_by(make: Callable[[Any], torch.optim.Optimizer]) -> Loop:
    def loop() -> tuple[dict[str, Any], Step]:
        model = network()
        optimizer = make(model.parameters())

        def step() -> None:
            model(batch()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return {"model": model, "optimizer": optimizer}, step

    return loop


def as_state_dicts() -> tuple[dict[str, Any], Step]:
    """Optimizers are found by their steps, not in the state."""
    state, step = trained_by(torch.optim.AdamW)()
    return {"nested": [{"model": state["model"].state_dict(), "optimizer": state["optimizer"].state_dict()}]}, step


def accumulating() -> tuple[dict[str, Any], Step]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for _ in range(3):
            model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"model": model, "optimizer": optimizer}, step


def with_grad_scaler() -> tuple[dict[str, Any], Step]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch()).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return {"model": model, "optimizer": optimizer, "scaler": scaler}, step


def with_closure() -> tuple[dict[str, Any], Step]:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        return loss

    return {"model": model, "optimizer": optimizer}, lambda: optimizer.step(closure)


def inside_backward() -> tuple[dict[str, Any], Step]:
    model = network()
    optimizers = {parameter: torch.optim.AdamW([parameter]) for parameter in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    state = {"model": model, "optimizers": list(optimizers.values())}
    return state, lambda: model(batch()).square().mean().backward()


def compiled() -> tuple[dict[str, Any], Step]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    fast = torch.compile(model, backend="aot_eager")
    update = torch.compile(optimizer.step, backend="aot_eager")

    def step() -> None:
        fast(batch()).square().mean().backward()
        update()
        optimizer.zero_grad()

    return {"model": model, "optimizer": optimizer}, step


def of_odd_tensors() -> tuple[dict[str, Any], Step]:
    """Frozen, tied, transposed, complex and empty parameters, and two in one storage."""
    torch.manual_seed(0)
    shared = torch.randn(2, WIDTH, WIDTH)
    model = nn.ParameterDict(
        {
            "frozen": nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False),
            "transposed": nn.Parameter(torch.randn(WIDTH, WIDTH + 1).t()),
            "complex": nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64)),
            "empty": nn.Parameter(torch.zeros(0, 3)),
            "first": nn.Parameter(shared[0]),
            "second": nn.Parameter(shared[1]),
            "strided": nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2]),
        }
    )
    model["tied"] = model["first"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        sum(p.abs().square().sum() for p in model.parameters() if p.requires_grad).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()

    rows = {"all": shared, "row": shared[0, :1], "expanded": torch.ones(1).expand(2 * WIDTH * WIDTH)}
    return {"model": model, "optimizer": optimizer, "rows": rows}, step


LOOPS: dict[str, Loop] = {
    "AdamW": trained_by(torch.optim.AdamW),
    "AdamW for each": trained_by(lambda parameters: torch.optim.AdamW(parameters, foreach=True)),
    "AdamW fused": trained_by(lambda parameters: torch.optim.AdamW(parameters, fused=True)),
    "SGD": trained_by(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)),
    "Adafactor": trained_by(torch.optim.Adafactor),
    "as state dicts": as_state_dicts,
    "accumulating": accumulating,
    "GradScaler": with_grad_scaler,
    "closure": with_closure,
    "inside backward": inside_backward,
    "compiled": compiled,
    "odd tensors": of_odd_tensors,
}


def race_once(job: Job, race: Race, number: int, state: dict[str, Any], step: Step) -> tuple[SaveHandle, Any]:
    """Save, and change everything at once. Returns the handle and the state before the change."""
    race.close()
    expected = contents(state)
    handle = job.save(number, state)
    assert not handle.staged, "everything was copied before save returned: there is no race"
    race.is_stepping = True
    step()
    race.is_stepping = False
    race.begin()
    return handle, expected


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS.keys())
def test_a_loop_that_changes_everything_at_once_tears_nothing(job: Job, race: Race, loop: Loop) -> None:
    state, step = loop()
    optimizer_watch.watch()
    step()
    for number in range(6):
        handle, expected = race_once(job, race, number, state, step)
        assert_same(slot_contents(job, handle), expected)
        assert handle.staged and not handle.error
    assert race.helped, "no step had to copy anything"
    assert job.failed_saves == 0


def test_without_the_hook_the_tear_is_seen_and_the_save_fails(
    job: Job, race: Race, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, step = trained_by(torch.optim.AdamW)()
    optimizer_watch.watch()
    step()
    monkeypatch.setattr(optimizer_watch, "add_guard", lambda guard: None)
    handle, _ = race_once(job, race, 0, state, step)
    assert job.wait_captured(DEADLINE_S)
    assert not handle.staged
    assert "was written while it was copied" in handle.error
    with pytest.raises(CheckpointError, match="wait_captured"):
        job.check_for_errors()
    job.check_for_errors()  # reported already
    step()
    assert job.save(1, state).staged, "it goes on in blocking mode"


def test_the_comparison_itself_would_see_a_tear(job: Job, race: Race, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hook and version counter the slot is torn: these tests can fail."""
    state, step = trained_by(torch.optim.AdamW)()
    optimizer_watch.watch()
    step()
    monkeypatch.setattr(optimizer_watch, "add_guard", lambda guard: None)
    monkeypatch.setattr(state_copy.TensorCopy, "was_written", False)
    handle, expected = race_once(job, race, 0, state, step)
    found = slot_contents(job, handle)
    assert any(not torch.equal(found[name], expected[name]) for name in found)


def test_a_step_copies_what_is_its_own_and_leaves_the_rest(job: Job, race: Race) -> None:
    """Two optimizers, as in a GAN: one's step does not wait for the other's tensors."""
    first, step_first = trained_by(torch.optim.AdamW)()
    second, step_second = trained_by(torch.optim.AdamW)()
    optimizer_watch.watch()
    step_first()
    step_second()
    state = {"first": first, "second": second}
    race.close()
    expected = contents(state)
    handle = job.save(0, state)
    race.is_stepping = True
    step_second()
    assert race.helped and all(name.startswith("second.") for name in race.helped)
    step_first()
    race.is_stepping = False
    assert_same(slot_contents(job, handle), expected)


def test_everything_that_is_not_an_optimizers_is_copied_before_save_returns(job: Job, race: Race) -> None:
    state, step = trained_by(torch.optim.AdamW)()
    optimizer_watch.watch()
    step()
    ema = [tensor.detach().clone() for tensor in state["model"].parameters()]
    extra = {"ema": ema, "buffer": torch.randn(WIDTH, WIDTH), "random": torch.get_rng_state(), "epoch": 1}
    part = state["model"][0].weight.detach()[: WIDTH // 2]  # of a lazily copied tensor
    race.close()
    expected = contents({**state, "extra": extra, "part": part})
    handle = job.save(0, {**state, "extra": extra, "part": part})
    assert not handle.staged
    for tensor in (*ema, extra["buffer"], state["model"][1].running_mean):
        tensor.fill_(-1.0)  # by hand
    race.begin()
    assert_same(slot_contents(job, handle), expected)


def test_state_that_is_replaced_and_not_written_is_the_old_one(job: Job, race: Race) -> None:
    state, step = trained_by(torch.optim.AdamW)()
    optimizer_watch.watch()
    step()
    race.close()
    expected = contents(state)
    handle = job.save(0, state)
    for entry in state["optimizer"].state.values():
        entry["exp_avg"] = torch.zeros_like(entry["exp_avg"])
        entry["exp_avg_sq"].data = torch.ones_like(entry["exp_avg_sq"])  # like optimizers that offload state
    race.begin()
    assert_same(slot_contents(job, handle), expected)


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, as in quantized optimizers."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, operation: Any, *_: Any) -> Any:  # noqa: ANN401 - torch's
        raise NotImplementedError(operation)


def test_a_step_of_an_optimizer_with_tensors_that_wrap_others_goes_on(job: Job, race: Race) -> None:
    optimizer_watch.watch()
    weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.state[weight]["quantized"] = Wrapper(torch.ones(WIDTH, WIDTH))
    for number in range(2):
        race.close()
        expected = contents({"w": weight})
        handle = job.save(number, {"w": weight})
        assert not handle.staged
        race.is_stepping = True
        optimizer.step()
        race.is_stepping = False
        assert_same(slot_contents(job, handle), expected)


@pytest.mark.parametrize("size_bytes", [0, 1 << 20])
def test_memory_that_was_given_back_before_it_was_copied_is_not_read(size_bytes: int) -> None:
    optimizer_watch.watch()
    weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    capture = Capturer().take({"w": weight})
    payload = memoryview(bytearray(capture.payload_bytes))
    copy = capture.start(0, payload, lambda _: None, lambda _: None, lazy=True)
    assert [one.name for one in copy.lazy] == ["w"]
    weight.untyped_storage().resize_(size_bytes)
    copy.run()
    assert copy.error.startswith("'w' was written")
    assert copy.was_written


@pytest.mark.parametrize(
    ("capture", "group", "is_lazy"),
    [(CaptureMode.LAZY, {}, True), (CaptureMode.BLOCKING, {}, False), (CaptureMode.LAZY, {"capturable": True}, False)],
    ids=["lazy", "blocking", "CUDA graphs"],
)
def test_what_may_not_be_late_is_captured_when_save_returns(
    tmp_path: os.PathLike[str], race: Race, capture: CaptureMode, group: dict[str, Any], is_lazy: bool
) -> None:
    with Job(identity(tmp_path, capture=capture)) as job:
        state, step = trained_by(torch.optim.AdamW)()
        optimizer_watch.watch()
        step()
        state["optimizer"].param_groups[0].update(group)
        if is_lazy:
            race.close()
        else:
            race.begin()
        handle = job.save(0, state)
        assert handle.staged.done is not is_lazy
        race.begin()


class Plain(torch.optim.SGD):
    """From another package, with an ordinary step."""

    __module__ = "elsewhere"


class Perturbing(Plain):
    """Like SAM: writes before its step, bypassing the version counters."""

    __module__ = "elsewhere"

    def first_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(1.0)


@pytest.mark.parametrize(("kind", "is_lazy"), [(Plain, True), (Perturbing, False)])
def test_optimizers_that_may_write_outside_of_a_step_are_not_trusted(
    job: Job, race: Race, kind: type[torch.optim.Optimizer], is_lazy: bool
) -> None:
    state, step = trained_by(kind)()
    optimizer_watch.watch()
    step()
    race.close()
    expected = contents(state)
    handle = job.save(0, state)
    assert handle.staged.done is not is_lazy
    if not is_lazy:
        state["optimizer"].first_step()
    race.begin()
    assert_same(slot_contents(job, handle), expected)


def test_what_is_wrapped_by_an_optimizer_that_is_not_trusted_is_not_either(job: Job, race: Race) -> None:
    optimizer_watch.watch()
    state, step = trained_by(torch.optim.SGD)()
    step()
    wrapper = Perturbing(state["optimizer"].param_groups, lr=0.0)
    wrapper.step()
    race.close()
    assert job.save(0, state).staged.done
    race.begin()


def test_an_optimizer_whose_step_was_never_seen_is_not_trusted(job: Job, race: Race) -> None:
    optimizer_watch.watch()
    state, _ = trained_by(torch.optim.AdamW)()
    race.begin()
    assert job.save(0, state).staged


def test_wait_captured_lets_parameters_be_written_by_hand(job: Job, race: Race) -> None:
    state, step = trained_by(torch.optim.AdamW)()
    optimizer_watch.watch()
    step()
    race.close()
    expected = contents(state)
    handle = job.save(0, state)
    assert race.is_holding.wait(DEADLINE_S)
    assert not job.wait_captured(0.01), "the background is held up"
    race.begin()
    assert job.wait_captured(DEADLINE_S)
    assert handle.staged
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.fill_(7.0)
    assert_same(slot_contents(job, handle), expected)


def test_a_wait_for_a_slow_copy_does_not_look_stalled(job: Job, race: Race) -> None:
    state, step = trained_by(torch.optim.AdamW)()
    optimizer_watch.watch()
    step()
    race.close()
    stamped: list[tuple[int, Phase]] = []

    def stamp(at_ns: int, phase: Phase) -> None:
        stamped.append((at_ns, phase))
        if len(stamped) > 3:
            race.begin()

    handle = job.save(0, state)
    assert race.is_holding.wait(DEADLINE_S)
    job._beacon.on_phase = stamp
    assert job.wait_captured(DEADLINE_S) and handle.staged
    assert {phase for _, phase in stamped[:4]} == {Phase.CHECKPOINT}


def test_the_next_save_waits_for_the_one_before(job: Job, race: Race) -> None:
    state, step = trained_by(torch.optim.AdamW)()
    optimizer_watch.watch()
    step()
    race.close()
    expected = contents(state)
    first = job.save(0, state)
    race.is_stepping = True  # waiting means helping
    second = job.save(1, state)
    assert first.staged
    assert_same(slot_contents(job, first), expected)
    assert_same(slot_contents(job, second), expected)


def test_a_job_that_is_closed_has_its_last_save(tmp_path: os.PathLike[str], race: Race) -> None:
    job = Job(identity(tmp_path))
    state, step = trained_by(torch.optim.AdamW)()
    optimizer_watch.watch()
    step()
    race.close()
    expected = contents(state)
    handle = job.save(0, state)
    assert not handle.staged
    race.is_stepping = True
    job.close()
    assert handle.staged and handle.is_over
    assert_same(slot_contents(job, handle), expected)


def test_a_copy_that_fails_is_an_error_on_the_handle_and_training_goes_on(
    tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(copy: state_copy.TensorCopy, begin: int, end: int) -> None:
        raise RuntimeError("no such memory")

    with Job(identity(tmp_path, raise_on_failure=True)) as job:
        state, step = trained_by(torch.optim.AdamW)()
        optimizer_watch.watch()
        step()
        with monkeypatch.context() as patched:
            patched.setattr(state_copy.TensorCopy, "copy_piece", broken)
            handle = job.save(0, state)
            assert job.wait_captured(DEADLINE_S)
        assert "could not be copied: no such memory" in handle.error
        assert job.failed_saves == 1 and not handle.staged
        step()
        with pytest.raises(CheckpointError, match="no such memory"):
            job.save(1, state)
        assert job.save(2, state).replicated.wait(DEADLINE_S)


def test_in_steady_state_nothing_is_planned_or_made_anew(job: Job, race: Race, tmp_path: Path) -> None:
    state, step = trained_by(torch.optim.AdamW)()
    optimizer_watch.watch()
    race.begin()
    plans, files = set(), set()
    for number in range(6):
        step()
        handle = job.save(number, state)
        assert handle.replicated.wait(DEADLINE_S)
        plans.add(id(job._engine._capturer._plan))  # type: ignore[union-attr]
        files.update((path.name, path.stat().st_ino) for path in tmp_path.glob("*.s?"))
    assert len(plans) == 1 and len(files) == 2


@pytest.mark.parametrize("change", ["dtype", "shape", "name"])
def test_another_structure_gets_another_plan(job: Job, race: Race, change: str) -> None:
    state: dict[str, Any] = {"a": torch.randn(100, 100), "b": torch.randn(100, 100)}
    race.begin()
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
