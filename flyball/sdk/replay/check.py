"""`job.replay`: compute a step's forward and backward pass twice and compare bit for bit; if the results differ, let
another rank compute the same, to tell a bad device from a computation that is not deterministic."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import msgspec
import torch

from ckpt_engine.contracts.notices import Notice, ReplayDiffered, ReplayEqual
from flyball.contracts import wire
from flyball.contracts.errors import FlyballError
from flyball.contracts.reports.training_health import OWN_RUNS, PEER_RUNS, ReplayDiffers
from flyball.sdk.replay import case, runs
from flyball.sdk.replay.meeting import MAX_CASES, Meeting, Store, case_of, choose_peers, judgement_of
from flyball.sdk.worker_identity import WorkerIdentity

_RUNS_IF_DETERMINISTIC = 3  # of a peer; what torch does not know of, such as an extension's kernel, shows in some
_NAMED, _NAME_CHARS = 4, 60  # of what differs; a notice has a limit


class _Judgement(msgspec.Struct, frozen=True):
    """What a peer found. `error`: why none computed the same."""

    runs: int = 0
    results: int = 0  # different ones among them
    result: str = ""  # of the first run
    error: str = ""


class _Looked(NamedTuple):
    """How far a difference was looked into."""

    judgement: _Judgement
    peer: int = -1
    differing: int = 1  # ranks whose results differ, of so many
    ranks: int = 1
    own: Sequence[str] = ()  # results of this rank's further runs


@dataclass(frozen=True, slots=True)
class _Computation:
    """What a rank replays, and the state to begin with."""

    fn: Callable[..., object]
    inputs: Sequence[object]
    before: runs.Untouched

    def again(self) -> str:
        """One digest of one more run."""
        return runs.together(self.before.run(self.fn, self.inputs, self.before.random))


class StepReplay:
    """The replays of one rank in one generation."""

    def __init__(self, identity: WorkerIdentity, tell: Callable[[Notice], bool]) -> None:
        """`tell` passes a notice on to the engine, and returns whether it arrived."""
        self._me = identity
        self._tell = tell
        self._number = 0
        self._equal_step = -1
        self._meets = True
        self._said: set[bool] = set()  # whether as a bad device
        self._may_prove = True  # until the computation turns out not to be deterministic
        self._unsent: list[Notice] = []

    def run(
        self,
        step: int,
        fn: Callable[..., object],
        inputs: Sequence[object],
        model: torch.nn.Module | None,
        timeout_s: float,
    ) -> bool:
        """Returns whether this rank computed the same twice."""
        self._unsent = [notice for notice in self._unsent if not self._tell(notice)]
        self._number += 1
        before = runs.Untouched(model, inputs)
        try:
            results = [before.run(fn, inputs, before.random) for _ in range(2)]
            before.check()
            names = runs.differing(*results)
            self._compare(step, _Computation(fn, inputs, before), results, names, timeout_s)
        finally:
            before.put_back()
        return not names

    def _compare(
        self, step: int, mine: _Computation, results: list[runs.Digests], names: tuple[str, ...], timeout_s: float
    ) -> None:
        """Meet the other ranks, have a peer compute the same if the results differ, and report what comes out."""
        store, ranks = self._store()
        if store is None:
            self._conclude(step, names, results, _Looked(_Judgement(error="no other rank was asked")))
            return
        meeting = Meeting(store, number=self._number, ranks=ranks, timeout_s=timeout_s)
        met = meeting.find_differing(self._me.rank, differs=bool(names))
        if met is None:
            self._meets = False
            meeting.leave()
            _warn(
                f"the ranks did not all come to the replay of step {step} within {timeout_s:g} s; from now on this "
                "rank compares its own results only. Call job.replay with the same `every` in every rank."
            )
            self._conclude(step, names, results, _Looked(_Judgement(error="the others did not come"), ranks=ranks))
            return
        count, differing = met
        error = "more ranks differed than are looked into" if count > MAX_CASES else ""
        error = "every rank's results differ" if count == ranks else error
        per_host = self._me.local_world_size
        peers = {} if error else choose_peers(differing, ranks=ranks, ranks_per_host=per_host)
        for rank in (rank for rank, peer in peers.items() if peer == self._me.rank):
            self._judge(meeting, rank, mine)
        if names and error:
            self._may_prove = self._may_prove and count < ranks
            if self._me.rank == differing[0]:  # one of them says so
                self._conclude(step, names, results, _Looked(_Judgement(error=error), -1, count, ranks))
        elif names:
            found, own = self._ask(meeting, mine)
            self._may_prove = self._may_prove and found.results <= 1
            self._conclude(step, names, results, _Looked(found, peers[self._me.rank], count, ranks, own))
        elif not count:
            self._equal_step = step
            if self._me.rank == 0:
                self._tell(ReplayEqual(self._me.job, self._me.rank, self._me.generation, step))
        meeting.leave()

    def _store(self) -> tuple[Store | None, int]:
        """Where the ranks meet, and how many there are; None if this rank is, or is left, alone."""
        group = torch.distributed
        ranks = self._me.world_size
        if not self._meets or ranks == 1 or not group.is_available() or not group.is_initialized():
            return None, 1
        if group.get_world_size() != ranks or group.get_rank() != self._me.rank:
            return None, 1
        return cast(Store, group.distributed_c10d._get_default_store()), ranks

    def _ask(self, meeting: Meeting, mine: _Computation) -> tuple[_Judgement, Sequence[str]]:
        """Have the peer compute the same; meanwhile compute it again here, if the results count. Nothing is sent if
        the answer would be no news."""
        problem = "" if self._may_prove and len(self._said) < 2 else "all that replays can show was said"
        try:
            data = b"" if problem else case.pack(mine.inputs, mine.before.random)
        except FlyballError as error:
            data, problem = b"", str(error)
        meeting.put(case_of(self._me.rank), data)  # the peer waits for it in any case
        if problem:
            return _Judgement(error=problem), ()
        own = () if _is_deterministic() else tuple(mine.again() for _ in range(OWN_RUNS))
        found = meeting.take(judgement_of(self._me.rank))
        if found is None:
            return _Judgement(error="the peer did not answer in time"), own
        return wire.decode(found, _Judgement), own

    def _judge(self, meeting: Meeting, rank: int, mine: _Computation) -> None:
        """Compute the same as another rank, until a result differs or all runs are done."""
        data = meeting.take(case_of(rank))
        if not data:
            return
        found: list[str] = []
        try:
            inputs, random = case.unpack(data)
            for _ in range(_RUNS_IF_DETERMINISTIC if _is_deterministic() else PEER_RUNS):
                found.append(runs.together(mine.before.run(mine.fn, inputs, random)))
                if found[-1] != found[0]:
                    break
        except Exception as error:  # noqa: BLE001 - the script's function, with inputs that are not its own
            judgement = _Judgement(error=f"{type(error).__name__}: {error}"[:300])
        else:
            judgement = _Judgement(len(found), len(set(found)), found[0])
        meeting.put(judgement_of(rank), wire.encode(judgement))

    def _conclude(self, step: int, names: tuple[str, ...], results: list[runs.Digests], looked: _Looked) -> None:
        """Say what the difference means, and report it; each once."""
        if not names:
            return
        judgement = looked.judgement
        combined = [runs.together(result) for result in results]
        found = ReplayDiffers(
            job=self._me.job,
            generation=self._me.generation,
            rank=self._me.rank,
            step=step,
            tensors=tuple(name[:_NAME_CHARS] for name in names[:_NAMED]),
            count=len(names),
            differing=looked.differing,
            ranks=looked.ranks,
            peer=-1 if judgement.error else looked.peer,
            peer_runs=judgement.runs,
            peer_results=judgement.results,
            as_peer=1 + combined.index(judgement.result) if judgement.result in combined else 0,
            equal_step=self._equal_step,
            deterministic=_is_deterministic(),
            own_runs=len(looked.own),
            own_odd=len(looked.own) - max(Counter(looked.own).values(), default=0),
        )
        if found.is_bad_device in self._said:
            return
        self._said.add(found.is_bad_device)
        _warn(_in_words(found, judgement.error))
        notice = ReplayDiffered(self._me.job, self._me.rank, self._me.generation, found)
        if not self._tell(notice):
            self._unsent.append(notice)


def _is_deterministic() -> bool:
    """Whether torch raises for every operation of its own that is not deterministic."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _in_words(found: ReplayDiffers, error: str) -> str:
    names = ", ".join(found.tensors) + (f" ({found.count} in all)" if found.count > len(found.tensors) else "")
    what = f"rank {found.rank} computed step {found.step} twice, and the results differ: {names}. "
    hint = (
        "Make the computation deterministic (torch.use_deterministic_algorithms(True), and "
        "CUBLAS_WORKSPACE_CONFIG=:4096:8 on a GPU); until then replays say nothing about devices."
    )
    own = f"{found.own_odd} of {found.own_runs} more runs of rank {found.rank} were odd ones"
    if found.is_bad_device:
        proof = "torch.use_deterministic_algorithms is on" if found.deterministic else own
        return (
            f"{what}Rank {found.peer} computed the same {found.peer_runs} times with one result, and {proof}, so the "
            f"device of rank {found.rank} is bad. The supervisor decides what follows."
        )
    if found.peer >= 0 and found.peer_results == 1:
        many = f"{found.differing} of {found.ranks} ranks differ"
        return (
            f"{what}Rank {found.peer} computed the same {found.peer_runs} times with one result, but "
            f"{many if 2 * found.differing > found.ranks else own}, which is no proof: this may be a bad device or a "
            f"computation that differs now and then. {hint}"
        )
    if found.peer >= 0:
        return (
            f"{what}Rank {found.peer} computed the same {found.peer_runs} times with {found.peer_results} results, so "
            f"no device is to blame. {hint}"
        )
    if found.differing == found.ranks > 1:
        return f"{what}That is so on every rank, so no device is to blame. {hint}"
    return f"{what}No other rank computed the same ({error}), so this may be a bad device or the computation. {hint}"


def _warn(message: str) -> None:
    sys.stderr.write(f"flyball: {message}\n")
    sys.stderr.flush()
