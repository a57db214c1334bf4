"""Coverage of tensors by blocks, against an array in which every element is marked."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.format.coverage import Box, overlap, step_problems, uncovered
from ckpt_engine.format.manifest import TensorEntry

SIDE = 5


@st.composite
def boxes_in(draw: st.DrawFn, dimensions: int) -> Box:
    offsets = draw(st.tuples(*[st.integers(0, SIDE)] * dimensions))
    return Box(offsets, tuple(draw(st.integers(0, SIDE - offset)) for offset in offsets))


cases = st.integers(0, 3).flatmap(
    lambda dimensions: st.tuples(boxes_in(dimensions), st.lists(boxes_in(dimensions), max_size=8))
)


def marked(dimensions: int, boxes: list[Box]) -> np.ndarray:
    """How many boxes contain each element."""
    count = np.zeros((SIDE,) * dimensions, dtype=int)
    for box in boxes:
        count[tuple(slice(o, o + size) for o, size in zip(box.offsets, box.shape, strict=True))] += 1
    return count


@given(cases)
def test_what_is_uncovered_is_exactly_what_no_box_has(case: tuple[Box, list[Box]]) -> None:
    target, boxes = case
    dimensions = len(target.offsets)
    left = uncovered(target, boxes)
    expected = (marked(dimensions, [target]) > 0) & (marked(dimensions, boxes) == 0)
    assert np.array_equal(marked(dimensions, left), expected.astype(int))  # and no element twice


@given(cases)
def test_different_boxes_overlap_if_they_share_an_element(case: tuple[Box, list[Box]]) -> None:
    target, boxes = case
    distinct = sorted({target, *boxes})
    both = overlap([target, *boxes, target])
    assert (both is not None) == (marked(len(target.offsets), distinct).max() > 1)
    if both is not None:
        assert both[0] != both[1] and marked(len(target.offsets), list(both)).max() == 2


def block(fqn: str, whole: tuple[int, ...], box: Box, dtype: str = "F32") -> TensorEntry:
    return TensorEntry(fqn, dtype, box.shape, whole, box.offsets, (0, 0))


@given(st.integers(1, 3).flatmap(lambda dimensions: st.lists(boxes_in(dimensions), min_size=1, max_size=6)))
def test_a_step_is_complete_if_its_blocks_make_up_the_tensor_and_overlap_as_replicas_only(boxes: list[Box]) -> None:
    whole = (SIDE,) * len(boxes[0].offsets)
    problems = step_problems([block("w", whole, box)] for box in boxes)
    count = marked(len(whole), sorted(set(boxes)))
    expected = all(box.shape == whole for box in boxes) or bool((count == 1).all())
    assert (problems == ()) == expected


def test_problems_are_described() -> None:
    left, right = Box((0, 0), (2, 4)), Box((2, 0), (2, 4))
    assert step_problems([[block("w", (4, 4), left)], [block("w", (4, 4), right)]]) == ()
    ((fqn, reason),) = step_problems([[block("w", (4, 4), left)]])
    assert (fqn, reason) == ("w", "8 of its 16 elements are in no shard, the first of them in [2:4, 0:4]")
    ((_, reason),) = step_problems([[block("w", (4, 4), left)], [block("w", (4, 4), Box((1, 0), (3, 4)))]])
    assert reason == "its blocks [0:2, 0:4] and [1:4, 0:4] overlap, and neither is a replica of the other"
    ((_, reason),) = step_problems([[block("w", (4, 4), left)], [block("w", (4, 4), right, "BF16")]])
    assert "of different tensors" in reason


def test_a_ranks_own_whole_tensors_may_differ() -> None:
    mine, yours = block("rng", (3,), Box((0,), (3,))), block("rng", (5,), Box((0,), (5,)))
    assert step_problems([[mine], [yours]]) == ()
