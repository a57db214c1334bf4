"""Real lines get their class, and the exits of workers the class that their error and their log show."""

from __future__ import annotations

import signal

import pytest
from unit.language.error_lines import LINES

from flyball.contracts.error_classes import MEANINGS, ErrorClass, classify, error_class_of, gpu_memory_in_use


@pytest.mark.parametrize(("expected", "line", "source"), LINES)
def test_a_recorded_line_has_its_class(expected: ErrorClass, line: str, source: str) -> None:
    assert source
    assert error_class_of(line) is expected
    kind, _, message = line.partition(": ")
    bare = kind.rpartition(".")[2]  # as the daemon reports an exception: without its module
    assert classify(exit_code=1, signal_number=None, kind=bare, message=message) in (
        expected,
        ErrorClass.USER_EXCEPTION,
    )
    crashed = classify(exit_code=None, signal_number=signal.SIGABRT, log_lines=("step 1", line, "frame #0: abort"))
    assert crashed is expected


def test_each_class_with_a_meaning_has_a_recorded_line_or_needs_none() -> None:
    unrecorded = set(MEANINGS) - {expected for expected, _, _ in LINES}
    assert unrecorded == {ErrorClass.CRASH, ErrorClass.GLOO_ERROR}


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: Expected more than 1 value per channel when training, got input size torch.Size([1, 64])",
        "KeyError: 'labels'",
        "AssertionError: loss is nan at step 7",
        "step 1200 loss 2.13 mem 71.2 GiB",
    ],
)
def test_ordinary_lines_have_none(line: str) -> None:
    assert error_class_of(line) is None
    assert classify(exit_code=1, signal_number=None, kind="ValueError", message=line) is ErrorClass.USER_EXCEPTION


def test_a_chained_exception_counts_if_the_last_one_says_nothing() -> None:
    traceback = "\n".join(
        (
            "Traceback (most recent call last):",
            '  File "train.py", line 3, in <module>',
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            "",
            "The above exception was the direct cause of the following exception:",
            "",
            "StepFailed: step 7 failed",
        )
    )
    found = classify(exit_code=1, signal_number=None, kind="StepFailed", message="step 7 failed", traceback=traceback)
    assert found is ErrorClass.GPU_OUT_OF_MEMORY


def test_without_an_exception_the_log_and_the_kernel_count() -> None:
    refused = ("Connection refused: the tracker is away", "done with 7")
    assert classify(exit_code=7, signal_number=None, log_lines=refused) is ErrorClass.EXIT_CODE
    assert classify(exit_code=None, signal_number=signal.SIGABRT, log_lines=refused) is ErrorClass.CONNECTION_LOST
    assert classify(exit_code=None, signal_number=signal.SIGSEGV) is ErrorClass.CRASH
    assert classify(exit_code=None, signal_number=signal.SIGKILL, log_lines=refused) is ErrorClass.KILLED
    assert classify(exit_code=None, signal_number=None) is ErrorClass.UNKNOWN
    slurm = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed."
    assert classify(exit_code=None, signal_number=9, log_lines=(slurm,)) is ErrorClass.HOST_OUT_OF_MEMORY
    kernel = "oom_kill 3 in /sys/fs/cgroup/memory.events"
    assert classify(exit_code=None, signal_number=9, kernel=kernel) is ErrorClass.HOST_OUT_OF_MEMORY


def test_the_memory_in_use_is_read_from_the_allocators_message() -> None:
    assert gpu_memory_in_use(next(line for _, line, source in LINES if "VSmTrans" in source)) == "15.48 GiB"
    assert gpu_memory_in_use("CUDA out of memory.") == ""
