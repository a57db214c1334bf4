"""Values of Python's own classes in a state: saved without pickling. Classes of users are never looked up by name."""

from __future__ import annotations

import datetime
import enum
import pathlib
from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from support.stores.shards import make_manifest

from ckpt_engine.format.verified_read import MemorySource
from ckpt_engine.trainer.capture.capturer import Capturer
from ckpt_engine.trainer.restore.load_shard import read_state, restore_into
from flyball.contracts.errors import StateMismatch, UnsupportedState


class Color(enum.Enum):
    RED = 1
    BLUE = (2, "b")


class Mode(enum.StrEnum):
    TRAIN = "train"


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Stats(NamedTuple):
    loss: float
    best: Any = None


Other = namedtuple("Other", "loss lr")


def shard(state: dict[str, Any]) -> tuple[MemorySource, Any]:
    capture = Capturer().take(state)
    payload = memoryview(bytearray(capture.payload_bytes))
    capture.copy_into(0, payload)
    return MemorySource(payload), make_manifest(payload, generation=0)


def restored(saved: object, into: object) -> Any:  # noqa: ANN401
    state = {"x": into}
    restore_into(state, *shard({"x": saved}))
    return state["x"]


def alone(saved: object) -> Any:  # noqa: ANN401
    return read_state(*shard({"x": saved}))["x"]


ZONE = datetime.timezone(datetime.timedelta(hours=5, minutes=45))
VALUES: list[Any] = [
    *(pathlib.Path("a/b"), pathlib.PurePosixPath("/"), pathlib.PureWindowsPath("c:\\x"), pathlib.Path("\udcff")),
    *(range(3), range(5, -(10**30), -2), bytearray(b"\0\xff"), frozenset({1, "a"}), {frozenset({1}), (1, 2)}),
    *(datetime.date(2026, 2, 28), datetime.timedelta(-1, 5, 7), datetime.time(1, 2, 3, 4, ZONE)),
    *(datetime.datetime(2026, 1, 2, fold=1), datetime.datetime(2026, 1, 2, 3, 4, 5, 6, ZONE)),
    *(deque([1, {"a": (2,)}]), deque([1, 2], maxlen=2), defaultdict(int, a=1), defaultdict(None, {(1, 2): 3})),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_plain_value_comes_back_with_its_class_and_everything_that_it_has(value: object) -> None:
    found = alone([value])[0]
    assert type(found) is type(value) and found == value
    for name in ("maxlen", "default_factory", "fold", "tzinfo"):
        assert getattr(found, name, None) == getattr(value, name, None)


def test_a_class_of_a_user_is_that_of_the_state_that_is_restored_into() -> None:
    saved = {
        "stats": Stats(0.5, [Color.BLUE, Stats(1.0)]),
        "mode": Mode.TRAIN,
        "rights": Rights.READ | Rights.WRITE,
        "by color": {Color.RED: 1, Color.BLUE: 2},
        "colors": {Color.RED, Color.BLUE},
        "tensors": Stats(0.0, torch.ones(2)),
    }
    empty = {
        "stats": Stats(0.0, [Color.RED, Stats(0.0)]),
        "mode": Mode.TRAIN,
        "rights": Rights.READ,
        "by color": {Color.RED: 0, Color.BLUE: 0},
        "colors": {Color.RED, Color.BLUE},
        "tensors": Stats(0.0, torch.zeros(2)),
    }
    found = restored(saved, empty)
    tensors, expected = found.pop("tensors"), saved.pop("tensors")
    assert found == saved and [type(found[key]) for key in saved] == [type(value) for value in saved.values()]
    assert type(found["stats"].best[1]) is Stats and type(tensors) is Stats and torch.equal(tensors.best, expected.best)  # type: ignore[attr-defined]


def test_without_one_it_comes_back_as_a_plain_tuple_or_value() -> None:
    saved = [Stats(0.5, Color.BLUE), Mode.TRAIN, Rights.READ | Rights.WRITE, {Color.RED: 1}]
    plain = [(0.5, (2, "b")), "train", 3, {1: 1}]
    for found in (alone(saved), restored(saved, [None]), restored(saved, [])):
        assert found == plain and list(map(type, found)) == [tuple, str, int, dict]


class Sampler:
    """An object that has its own state."""

    def __init__(self) -> None:
        self.mode: object = Color.RED

    def state_dict(self) -> dict[str, object]:
        return {"mode": self.mode}

    def load_state_dict(self, saved: dict[str, object]) -> None:
        self.mode = saved["mode"]


def test_an_objects_own_state_says_its_classes() -> None:
    saved = Sampler()
    saved.mode = Color.BLUE
    assert restored(saved, Sampler()).mode is Color.BLUE


@pytest.mark.parametrize(
    ("saved", "into", "said"),
    [
        (Stats(0.5), Other(0.0, 0.0), "saved with the fields loss, best, and Other has loss, lr"),
        (Color.BLUE, Mode.TRAIN, "BLUE = .* was saved, and Mode has no such member"),
    ],
)
def test_a_class_that_cannot_hold_what_was_saved_is_refused_before_a_byte_is_written(
    saved: object, into: object, said: str
) -> None:
    state = {"first": torch.zeros(2), "x": into}
    with pytest.raises(StateMismatch, match=said):
        restore_into(state, *shard({"first": torch.ones(2), "x": saved}))
    assert state["first"].sum() == 0  # type: ignore[attr-defined]


class Sub(datetime.datetime):
    pass


class WithMore(Stats):
    """A named tuple that can have attributes."""


def with_more() -> WithMore:
    made = WithMore(1.0)
    made.more = 1  # type: ignore[attr-defined]
    return made


class Odd(enum.Enum):
    CODE = object()


@pytest.mark.parametrize(
    "value",
    [
        *(Sub(2026, 1, 1), with_more(), Odd.CODE, defaultdict(lambda: 0), {Color.RED: 1, 1: 2}, {Color.RED, 1}),
        *(
            {torch.ones(1): 1},
            {(1, torch.ones(1)): 1},
            {torch.nn.Linear(1, 1): 1},
            {torch.nn.Parameter(torch.ones(1)): {}},
        ),
        torch.nn.LazyLinear(2).weight,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_not_come_back_as_it_is_is_refused(value: object) -> None:
    with pytest.raises(UnsupportedState, match="'x"):
        Capturer().take({"x": value})


def test_torchs_version_is_a_string() -> None:
    assert type(alone(OrderedDict(v=torch.__version__))["v"]) is str
