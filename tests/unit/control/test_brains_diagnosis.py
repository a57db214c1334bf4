"""Root causes told from what they drag after them."""

from __future__ import annotations

import signal

import msgspec
import pytest
from support.policy import golden

from flyball.contracts.cluster import HostRanks, HostState, Phase, WorkerError
from flyball.contracts.reports.signals import RankStalled, WorkerExited, WorkerStartFailed
from services.controller.round import diagnosis
from services.controller.round.diagnosis import (
    Failure,
    exit_failure,
    is_done,
    root_cause,
    silence_failure,
    stall_failure,
)
from services.controller.round.view import GenerationView, HostView, RankView

GENERATION = GenerationView(
    generation=3,
    parent=2,
    lineage=(),
    hosts=(HostRanks("host-a", "10.0.0.1", "10.0.0.1:7", (0, 1)),),
    peers={},
    started_at=100.0,
    restore_step=40,
    restart_count=1,
)


def exited(
    *,
    rank: int = 0,
    exit_code: int | None = 1,
    signal_number: int | None = None,
    error: WorkerError | None = None,
    phase: Phase = Phase.STEP,
    expected: bool = False,
    at: float = 200.0,
    last_phase: Phase | None = None,
) -> RankView:
    body = WorkerExited("job", 3, rank, 4242, exit_code, signal_number, 57, error, expected, last_phase)
    return RankView(rank, "host-a", 56, phase, 199.0, body, at)


def told(failure: Failure | None) -> Failure:
    assert failure is not None
    golden.note(failure.cause, failure.message)
    golden.note_evidence(failure.cause, failure.evidence)
    return failure


def failed(view: RankView, generation: GenerationView = GENERATION) -> Failure:
    return told(exit_failure(view, generation))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("RuntimeError", "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:20631: Connection reset by peer."),
        ("RuntimeError", "Connection closed by peer [127.0.0.1]:1"),
        ("torch.distributed.DistNetworkError", "Failed to recv, got 0 bytes. Connection was likely closed."),
        ("DistStoreError", "wait timeout after 3000ms, keys: /default_pg/0//cpu//0/1"),
        ("DistBackendError", "NCCL error: remote process exited or there was a network error, ncclRemoteError"),
        ("RuntimeError", "Timed out waiting 1800000ms for recv operation to complete"),
    ],
)
def test_lost_connections_are_secondary(kind: str, message: str) -> None:
    assert failed(exited(error=WorkerError(kind, message))).cause == diagnosis.CONNECTION_LOST


@pytest.mark.parametrize(
    ("view", "cause"),
    [
        (exited(exit_code=None, signal_number=9), diagnosis.WORKER_KILLED),
        (exited(exit_code=None, signal_number=6), diagnosis.WORKER_KILLED),
        (exited(exit_code=None, signal_number=6, error=WorkerError("X", "ncclRemoteError")), diagnosis.CONNECTION_LOST),
        (exited(exit_code=None, signal_number=9, error=WorkerError("X", "broken pipe")), diagnosis.WORKER_KILLED),
        (exited(error=WorkerError("ValueError", "boom")), diagnosis.WORKER_EXCEPTION),
        (exited(error=WorkerError("DistBackendError", "CUDA out of memory")), diagnosis.WORKER_EXCEPTION),
        (exited(exit_code=7), diagnosis.WORKER_EXCEPTION),
        (exited(exit_code=23, error=WorkerError("RestoreFailed", "connection refused")), diagnosis.RESTORE_FAILED),
        (exited(exit_code=23, phase=Phase.RESTORING), diagnosis.RESTORE_FAILED),
        (exited(exit_code=23, last_phase=Phase.RESTORING), diagnosis.RESTORE_FAILED),
        (exited(exit_code=23), diagnosis.WORKER_EXCEPTION),  # sys.exit(23) of a script
        (exited(exit_code=None), diagnosis.WORKER_KILLED),
        (exited(exit_code=None, signal_number=9, phase=Phase.DONE), diagnosis.WORKER_KILLED),
    ],
)
def test_causes(view: RankView, cause: str) -> None:
    assert (failed(view).cause, failed(view).step) == (cause, 57)


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RESTORING])
def test_a_script_that_does_not_attach_is_not_said_to_have_made_no_step(phase: Phase) -> None:
    body = WorkerExited("job", 1, 0, 4242, 1, None, -1, WorkerError("ValueError", "no labels"))
    first = msgspec.structs.replace(GENERATION, generation=1, parent=None, restore_step=None)
    assert failed(RankView(0, "host-a", -1, phase, 199.0, body, 200.0), first).step == -1


@pytest.mark.parametrize(
    "view",
    [
        exited(exit_code=0),
        exited(exit_code=None, signal_number=9, expected=True),
        exited(exit_code=None, phase=Phase.DONE),
        RankView(0, "host-a", 5, Phase.STEP, 1.0),
    ],
)
def test_these_are_no_failures(view: RankView) -> None:
    assert exit_failure(view, GENERATION) is None


def test_only_a_good_end_is_done() -> None:
    assert is_done(exited(exit_code=0))
    assert is_done(exited(exit_code=None, phase=Phase.DONE))  # a restarted daemon could not learn the status
    assert is_done(exited(exit_code=None, signal_number=6, phase=Phase.DONE))  # in the interpreter's teardown
    assert is_done(exited(exit_code=None, signal_number=11, last_phase=Phase.DONE))
    assert not is_done(exited(exit_code=None, signal_number=6, phase=Phase.STEP))
    assert not is_done(exited(exit_code=1, phase=Phase.DONE))
    assert not is_done(exited(exit_code=None, phase=Phase.STEP))
    assert not is_done(exited(exit_code=0, expected=True))
    assert not is_done(RankView(0, "host-a", 5, Phase.DONE, 1.0))


def test_the_deepest_cause_wins_over_the_earliest() -> None:
    lost = failed(exited(rank=0, error=WorkerError("E", "broken pipe"), at=1.0))
    raised = failed(exited(rank=1, error=WorkerError("E", "boom"), at=2.0))
    killed = failed(exited(rank=2, exit_code=None, signal_number=9, at=3.0))
    assert root_cause([lost, raised, killed]) == killed
    assert root_cause([]) is None


def test_of_equal_causes_the_first_wins() -> None:
    early = failed(exited(rank=5, error=WorkerError("E", "boom"), at=1.0))
    assert root_cause([failed(exited(rank=1, error=WorkerError("E", "bang"), at=2.0)), early]) == early


def test_a_stall_names_ranks_and_hosts() -> None:
    ranks = [RankView(0, "host-a", 5, Phase.STEP, 1.0), RankView(2, "host-b", 5, Phase.STEP, 1.0)]
    told(stall_failure(RankStalled("job", 3, (0, 1, 2), Phase.STEP, 5, 2.25, 2.0), ranks, 9.0))


def test_a_stall_of_a_whole_world_is_told_in_ranges() -> None:
    ranks = [RankView(number, f"host-{number // 8}", 5, Phase.STEP, 1.0) for number in range(80_000)]
    body = RankStalled("job", 3, tuple(range(80_000)), Phase.STEP, 5, 2.25, 2.0)
    told(stall_failure(body, ranks, 9.0))
    told(stall_failure(msgspec.structs.replace(body, ranks=tuple(range(12))), ranks, 9.0))


def test_hosts_that_fell_silent_together_are_told_as_many_as_a_person_reads() -> None:
    names = [f"h{number:04}" for number in range(1_000)]
    plan = msgspec.structs.replace(GENERATION, hosts=tuple(HostRanks(n, "", "", (2 * i,)) for i, n in enumerate(names)))
    failure = told(silence_failure([HostView(n, HostState.SILENT, 9.0, "", "", "", 0, 8.0) for n in names], plan))
    assert len(failure.message) < 500
    assert str(failure.evidence["hosts"]).split(",")[-2:] == ["h0063", "and 936 more"]
    assert len(str(failure.evidence["ranks"])) < 100


def test_the_evidence_of_an_end_is_what_is_known_of_it() -> None:
    failure = failed(exited(exit_code=7))
    assert (failure.generation, failure.at, failure.rank, failure.host_id) == (3, 200.0, 0, "host-a")
    assert (failure.error_kind, failure.error_message, failure.is_step_known) == ("exit code 7", "", True)
    killed = failed(exited(exit_code=None, signal_number=9))
    assert killed.error_kind == ""


def test_an_error_keeps_its_own_name_and_a_long_message_is_cut_off_in_the_reason_only() -> None:
    text = "x" * 300
    whole = failed(exited(error=WorkerError("a.b.CudaError", f" {text}. ")))
    assert whole.error_kind == "CudaError" and whole.error_message == f"{text}."
    longer = failed(exited(error=WorkerError("CudaError", f"{text}\n  y")))
    assert "y" not in longer.message.partition(text)[2] and longer.error_message.endswith("y")
    nameless = failed(exited(error=WorkerError("", "boom")))
    assert nameless.error_kind and nameless.error_message == "boom"
    assert failed(exited(exit_code=3, error=WorkerError("", ""))).error_kind == "exit code 3"


def test_the_newest_step_is_the_workers_the_beacons_or_the_restored_one() -> None:
    unknown = msgspec.structs.replace(GENERATION, restore_step=None)
    beacon = RankView(0, "host-a", 90, Phase.STEP, 1.0)
    assert diagnosis.newest_step_of(beacon, GENERATION) == 90
    assert diagnosis.newest_step_of(exited(), GENERATION) == 57
    behind = RankView(1, "host-a", -1, Phase.STARTING, 1.0)
    assert diagnosis.newest_step_of(behind, GENERATION) == 40
    assert diagnosis.newest_step_of(behind, unknown) == -1
    assert diagnosis.newest_common_step(msgspec.structs.replace(GENERATION, ranks=(beacon, behind))) == 40
    assert diagnosis.newest_common_step(msgspec.structs.replace(unknown, ranks=(beacon, exited()))) == 57
    assert (diagnosis.newest_common_step(GENERATION), diagnosis.newest_common_step(unknown)) == (40, -1)


def test_the_evidence_of_a_stall_is_what_the_detector_reported() -> None:
    body = RankStalled("job", 3, (2, 1), Phase.DATA, 5, 2.2504, 2.0004, "stands", "idle", "8 steps")
    failure = told(stall_failure(body, [RankView(2, "host-b", 5, Phase.DATA, 1.0)], 9.0))
    assert (failure.cause, failure.generation, failure.at, failure.rank) == (diagnosis.RANK_STALLED, 3, 9.0, 2)
    assert (failure.host_id, failure.step, failure.is_step_known) == ("host-b", 5, True)
    assert failure.quiet_s == 2.2504, "it stood still for so long before it was told"
    nobody = told(stall_failure(msgspec.structs.replace(body, ranks=()), [], 9.0))
    assert (nobody.rank, nobody.host_id) == (-1, "")


def test_a_start_that_failed_is_told_by_host_rank_and_code() -> None:
    failure = told(diagnosis.start_failure(WorkerStartFailed("job", 3, 4, "disk full.", "no_space"), "host-a", 9.0))
    assert (failure.cause, failure.error_kind, failure.error_message) == (
        diagnosis.WORKER_START_FAILED,
        "no_space",
        "disk full.",
    )
    assert (failure.generation, failure.at, failure.rank, failure.host_id) == (3, 9.0, 4, "host-a")
    assert failure.is_step_known
    coded = told(diagnosis.start_failure(WorkerStartFailed("job", 3, 4, "disk full"), "host-a", 9.0))
    assert coded.error_kind == diagnosis.WORKER_START_FAILED


def test_silent_and_restarted_hosts_are_one_failure_each_with_all_their_ranks() -> None:
    hosts = [HostView(n, HostState.SILENT, at, "", "", "", 0, 8.0) for n, at in (("b", 9.0), ("a", 9.0), ("c", 8.5))]
    parts = tuple(HostRanks(name, "", "", (number,)) for number, name in enumerate("abcd"))
    failure = told(silence_failure(hosts, msgspec.structs.replace(GENERATION, hosts=parts)))
    assert (failure.cause, failure.generation, failure.at) == (diagnosis.HOST_SILENT, 3, 8.5)
    assert (failure.host_id, failure.rank) == ("c", 0)
    assert failure.quiet_s == 0.5, "the first of them reported last at 8.0"
    assert silence_failure([], GENERATION) is None
    gone = [RankView(n, h, 50 + n, Phase.STEP, 1.0, is_gone=n < 2) for n, h in enumerate("bac")]
    back = told(diagnosis.restart_failure(msgspec.structs.replace(GENERATION, ranks=tuple(gone)), 9.0))
    assert (back.cause, back.generation, back.at, back.rank) == (diagnosis.HOST_RESTARTED, 3, 9.0, 0)
    assert (back.host_id, back.step) == ("a", 50)
    assert diagnosis.restart_failure(GENERATION, 9.0) is None


@pytest.mark.parametrize("crash", [6, 11, 7, 8, 4])
def test_a_crash_after_the_end_names_its_rank_host_and_signal(crash: int) -> None:
    view = exited(exit_code=None, signal_number=crash, last_phase=Phase.DONE)
    assert is_done(view)
    assert diagnosis.crash_after_done(view) == f"rank 0 on host-a: {signal.Signals(crash).name}"
    assert diagnosis.crash_after_done(exited(exit_code=0)) == ""
    assert diagnosis.crash_after_done(exited(exit_code=None, signal_number=crash)) == ""


def test_which_cause_explains_which() -> None:
    def failure(cause: str) -> diagnosis.Failure:
        return diagnosis.Failure(cause, "", 1, 0.0)

    assert failure(diagnosis.HOST_SILENT).explains(diagnosis.WORKER_KILLED)
    assert not failure(diagnosis.WORKER_KILLED).explains(diagnosis.WORKER_KILLED)
    assert not failure(diagnosis.CONNECTION_LOST).explains(diagnosis.RANK_STALLED)
    assert failure(diagnosis.RANKS_PARKED).explains("a cause of another release")


def test_a_failure_names_its_class_and_what_the_kernel_says() -> None:
    view = exited(error=WorkerError("RuntimeError", "CUDA error: an illegal memory access was encountered"))
    assert failed(view).evidence["error_class"] == "cuda_error"
    killed = exited(exit_code=None, signal_number=9).exited
    kernel = "Memory cgroup out of memory: Killed process 4242 (python)"
    killed = msgspec.structs.replace(killed, error_class="host_out_of_memory", kernel=kernel)
    assert failed(msgspec.structs.replace(exited(), exited=killed)).error_kind == "host_out_of_memory"
    crashed = exited(exit_code=None, signal_number=signal.SIGSEGV).exited
    crashed = msgspec.structs.replace(crashed, error_class="of_a_newer_release", core_dumped=True)
    failed(msgspec.structs.replace(exited(), exited=crashed))
