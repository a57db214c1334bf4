"""`job.replay`: what it compares, that it leaves no trace, and how ranks find out whose fault a difference is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch.distributed import HashStore

from ckpt_engine.contracts.notices import MAX_NOTICE_BYTES, Notice, ReplayDiffered, ReplayEqual
from flyball.contracts import wire
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry
from flyball.contracts.errors import UsageError
from flyball.contracts.reports.training_health import ReplayDiffers
from flyball.sdk.replay import case, runs
from flyball.sdk.replay.check import StepReplay
from flyball.sdk.replay.meeting import MAX_CASES, Meeting, choose_peers
from flyball.sdk.worker_identity import WorkerIdentity


def identity(rank: int = 0, world_size: int = 1) -> WorkerIdentity:
    lineage = (LineageEntry(1),)
    return WorkerIdentity("job", 1, rank, world_size, 1, "", "", "", None, CheckpointSpec(), lineage)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.linear(x))).square().mean()


def test_a_replay_compares_gradients_and_buffers_and_leaves_everything_as_it_was() -> None:
    net, batch = Net(), torch.randn(4, 8)
    net(batch).backward()
    gradients = [p.grad for p in net.parameters()]
    values = [g.clone() for g in gradients if g is not None]
    buffers, random = [b.clone() for b in net.buffers()], torch.get_rng_state()
    told: list[Notice] = []

    def forward_backward(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = net(x)
        loss.backward()
        return loss

    replay = StepReplay(identity(), lambda notice: bool(told.append(notice)) or True)
    assert replay.run(7, forward_backward, (batch,), net, 1.0)
    assert all(p.grad is g for p, g in zip(net.parameters(), gradients, strict=True))
    assert all(torch.equal(g, value) for g, value in zip(gradients, values, strict=True) if g is not None)
    assert all(torch.equal(b, saved) for b, saved in zip(net.buffers(), buffers, strict=True))
    assert torch.equal(torch.get_rng_state(), random) and told == []


def test_each_kind_of_difference_is_named_and_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    net, batch, times = Net(), torch.randn(4, 8), iter(range(100))
    told: list[Notice] = []

    def flips(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = net(x)
        loss.backward()
        gradient = net.linear.weight.grad
        assert gradient is not None
        if next(times) % 2:
            gradient.view(torch.int32)[0, 0] ^= 1
        return loss

    arrives = [False]
    replay = StepReplay(identity(), lambda notice: arrives[0] and not told.append(notice))
    assert not replay.run(7, flips, (batch,), net, 1.0)
    arrives[0] = True
    assert not replay.run(14, flips, (batch,), net, 1.0)
    (notice,) = told  # sent again, as it did not arrive the first time
    assert isinstance(notice, ReplayDiffered)
    assert notice.found == ReplayDiffers("job", 1, 0, 7, ("gradient of linear.weight",), 1, 1, 1)
    assert not notice.found.is_bad_device
    said = capsys.readouterr().err
    assert said.count("gradient of linear.weight") == 1 and "may be a bad device or the computation" in said


def test_what_a_function_must_not_do_is_an_error() -> None:
    net = Net()
    replay = StepReplay(identity(), lambda notice: True)
    with pytest.raises(UsageError, match="returned no tensor"):
        replay.run(1, lambda: None, (), None, 1.0)

    def steps() -> torch.Tensor:
        with torch.no_grad():
            net.linear.bias.add_(1.0)
        return net.linear.bias

    with pytest.raises(UsageError, match=r"changed the parameter linear\.bias"):
        replay.run(1, steps, (), net, 1.0)
    with pytest.raises(UsageError, match="changed the input 0"):
        replay.run(1, lambda x: x.mul_(2), (torch.ones(2),), None, 1.0)
    with pytest.raises(UsageError, match=r"input 1 of job\.replay requires a gradient"):
        replay.run(1, lambda x, w: x * w, (torch.ones(2), net.linear.bias), None, 1.0)
    with pytest.raises(ZeroDivisionError):
        replay.run(1, lambda: 1 / 0, (), net, 1.0)


def test_inputs_arrive_as_they_were() -> None:
    batch = {"x": torch.randn(3, 5).bfloat16(), "ids": torch.arange(4), "none": None, "scale": 0.1, "flag": True}
    empty = torch.empty(0, 3)
    (found, made), random = case.unpack(case.pack([batch, empty], runs.RandomState.now()))
    assert isinstance(found, dict) and isinstance(made, torch.Tensor)
    assert torch.equal(found["x"], batch["x"]) and torch.equal(found["ids"], batch["ids"])
    assert (found["none"], found["scale"], found["flag"], made.shape) == (None, 0.1, True, empty.shape)
    assert random == runs.RandomState.now()


@pytest.mark.parametrize(
    ("differing", "ranks", "per_host", "chosen"),
    [
        ({1}, 2, 1, {1: 0}),
        ({1}, 4, 2, {1: 2}),  # another host
        ({0, 1}, 4, 2, {0: 2, 1: 3}),  # each its own
        ({0, 1, 2}, 4, 4, {0: 3, 1: 3, 2: 3}),
        ({0, 1}, 2, 1, {}),
    ],
)
def test_a_peer_is_on_another_host_if_there_is_one(
    differing: set[int], ranks: int, per_host: int, chosen: dict[int, int]
) -> None:
    assert choose_peers(differing, ranks=ranks, ranks_per_host=per_host) == chosen


class Ranks:
    """Ranks of one process, in turns of their own: torch's random state is the process's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.store = HashStore()
        self.told: list[Notice] = []
        self.replays = [StepReplay(identity(rank, count), self.tell) for rank in range(count)]
        monkeypatch.setattr(StepReplay, "_store", lambda replay: (self.store, count))

    def tell(self, notice: Notice) -> bool:
        assert len(wire.encode(notice)) <= MAX_NOTICE_BYTES
        self.told.append(notice)
        return True

    def run(self, step: int, functions: Sequence[Callable[[torch.Tensor], object]], timeout_s: float = 20.0) -> None:
        threads = [
            threading.Thread(target=replay.run, args=(step, fn, (torch.ones(5),), None, timeout_s))
            for replay, fn in zip(self.replays, functions, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
            assert not thread.is_alive()


def well(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def flipping(*at: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that computes another value the n-th times that it is called."""
    calls = iter(range(1000))
    return lambda x: x * 3 + (1 if next(calls) in at else 0)


def counting() -> Callable[[torch.Tensor], torch.Tensor]:
    calls = iter(range(1000))
    return lambda x: x * next(calls)


def test_a_rank_that_differs_alone_is_blamed_and_one_that_a_peer_cannot_confirm_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = Ranks(monkeypatch, 3)
    ranks.run(10, [well, well, well])
    assert ranks.told == [ReplayEqual("job", 0, 1, 10)]
    ranks.run(20, [well, flipping(1, 2, 4, 9), well])
    found = ranks.told[1]
    assert isinstance(found, ReplayDiffered) and found.found.is_bad_device
    one = found.found
    assert (one.rank, one.step, one.peer, one.peer_runs, one.peer_results) == (1, 20, 2, 16, 1)
    assert (one.deterministic, one.own_runs, one.own_odd) == (False, 8, 3)
    assert (one.as_peer, one.differing, one.ranks, one.equal_step) == (1, 1, 3, 10)
    # The peer's own two runs were equal, by chance, but those of the other's inputs are not.
    ranks.run(30, [well, flipping(0), flipping(3)])
    other = ranks.told[2]
    assert isinstance(other, ReplayDiffered) and not other.found.is_bad_device
    assert (other.found.peer, other.found.peer_results) == (2, 2)
    ranks.run(40, [counting(), counting(), counting()])
    everywhere = [notice.found for notice in ranks.told[3:] if isinstance(notice, ReplayDiffered)]
    assert [(found.rank, found.differing, found.ranks, found.peer) for found in everywhere] == [(0, 3, 3, -1)]
    said = capsys.readouterr().err
    assert said.count("the device of rank 1 is bad") == 1 and said.count("no device is to blame") == 2
    assert is_empty(ranks.store)


def is_empty(store: HashStore) -> bool:
    """Whether all meetings removed what they put."""
    return int(store.num_keys()) == 0


@pytest.mark.parametrize(("is_deterministic", "is_bad", "runs"), [(True, True, 3), (False, False, 16)])
def test_one_difference_is_proof_only_if_torch_vouches_for_the_computation(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_deterministic: bool,
    is_bad: bool,
    runs: int,
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_deterministic)
    ranks = Ranks(monkeypatch, 2)
    ranks.run(20, [well, flipping(1)])
    (told,) = ranks.told
    assert isinstance(told, ReplayDiffered) and told.found.is_bad_device == is_bad
    assert (told.found.peer_runs, told.found.peer_results) == (runs, 1)
    said = capsys.readouterr().err
    assert ("so the device of rank 1 is bad" in said) == is_bad
    assert ("0 of 8 more runs of rank 1 were odd ones, which is no proof" in said) == (not is_bad)


def test_a_case_is_sent_as_long_as_its_answer_can_be_news(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    put = Meeting.put
    monkeypatch.setattr(
        Meeting, "put", lambda meeting, name, data: (data and sent.append(name), put(meeting, name, data))
    )
    ranks = Ranks(monkeypatch, 2)
    ranks.run(10, [well, flipping(1)])  # no proof: a later one may be
    assert sent == ["case/1", "judgement/1"]
    ranks.run(20, [flipping(3), flipping(1, 2, 4, 9)])
    assert len(sent) == 4 and len(ranks.told) == 1
    ranks.run(30, [well, flipping(1, 2, 4, 9)])  # it is known not to be deterministic
    assert len(sent) == 4 and len(ranks.told) == 1 and is_empty(ranks.store)


def test_a_peer_that_does_not_answer_leaves_nothing_in_the_store(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    judge, gave_up = StepReplay._judge, threading.Event()

    def judge_late(replay: StepReplay, meeting: Meeting, rank: int, mine: object) -> None:
        assert gave_up.wait(20.0)
        judge(replay, meeting, rank, mine)  # type: ignore[arg-type]

    monkeypatch.setattr(StepReplay, "_judge", judge_late)
    take, leave = Meeting.take, Meeting.leave
    monkeypatch.setattr(Meeting, "take", lambda self, name: None if name == "judgement/1" else take(self, name))
    monkeypatch.setattr(Meeting, "leave", lambda self: (leave(self), gave_up.set()))
    ranks = Ranks(monkeypatch, 2)
    ranks.run(10, [well, flipping(1)])
    assert "the peer did not answer in time" in capsys.readouterr().err and is_empty(ranks.store)


def test_nobody_is_judged_if_more_ranks_differ_than_are_looked_into(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = Ranks(monkeypatch, 2 * MAX_CASES + 2)
    ranks.run(10, [flipping(1) if rank <= MAX_CASES else well for rank in range(2 * MAX_CASES + 2)])
    (told,) = ranks.told
    assert isinstance(told, ReplayDiffered) and (told.found.differing, told.found.peer) == (MAX_CASES + 1, -1)
    assert "more ranks differed than are looked into" in capsys.readouterr().err and is_empty(ranks.store)


def test_a_rank_that_does_not_come_costs_one_wait(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[Notice] = []
    replay = StepReplay(identity(0, 2), lambda notice: not told.append(notice))
    store = HashStore()
    replay._store = lambda: (store if replay._meets else None, 2)  # type: ignore[method-assign]
    assert replay.run(1, well, (torch.ones(2),), None, 0.02)
    assert not replay.run(2, flipping(1), (torch.ones(2),), None, 600.0)
    (notice,) = told
    assert isinstance(notice, ReplayDiffered) and notice.found.peer == -1
    said = capsys.readouterr().err
    assert "did not all come to the replay of step 1 within 0.02 s" in said and "no other rank was asked" in said


def test_a_large_case_goes_in_parts() -> None:
    store, data = HashStore(), bytes(range(256)) * (40 << 10)
    meeting = Meeting(store, number=1, ranks=1, timeout_s=1.0)
    meeting.put("case/0", data)
    assert meeting.take("case/0") == data
    meeting.put("judgement/0", b"")
    assert meeting.take("judgement/0") == b""
    assert meeting.find_differing(0, differs=True) == (1, (0,))
    meeting.leave()
    assert is_empty(store)
