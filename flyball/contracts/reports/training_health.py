"""What ranks say about their training, and what a sensor concludes from it."""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeAlias

import msgspec

from flyball.contracts.identity import Duration, Generation, JobName, Rank, RepeatedJobName, SeenStep, Seq

# NaN and infinities, for which JSON has no numbers, are words. float() takes all of them.
LossValue: TypeAlias = float | Literal["nan", "inf", "-inf"]


class Straggler(msgspec.Struct, frozen=True, tag="straggler"):
    """A rank computes longer than the others, so all of them wait for it: `compute_s` per step, where half of the
    `ranks` take at most `usual_s`, in `windows` windows in a row of `steps` steps each. Raised by a sensor, and again
    every few minutes until the rank is as fast as the others."""

    job: JobName
    generation: Generation
    rank: Rank
    compute_s: Duration
    usual_s: Duration
    ranks: Seq
    windows: Seq
    steps: Seq


class StragglerRecovered(msgspec.Struct, frozen=True, tag="straggler_recovered"):
    """A straggler is as fast as the others again: it was not the odd one in `windows` windows in a row."""

    job: JobName
    generation: Generation
    rank: Rank
    windows: Seq


# What proves a bad device if torch does not vouch for the kernels. If it is the computation that differs in some share
# of its runs, the chance that a rank has so many odd ones of 8 while its peer has none in 16 is below 1 %.
OWN_RUNS = 8
ODD_RUNS = 3
PEER_RUNS = 16

ReplayedName = Annotated[str, msgspec.Meta(max_length=400)]


class ReplayDiffers(msgspec.Struct, frozen=True, tag="replay_differs"):
    """A rank of the sender's host computed the same twice (`job.replay`), and the results differ in `tensors`, the
    first few of `count`. `differing`: how many of the `ranks` ranks saw that in this replay. `peer`: the rank that then
    computed the same `peer_runs` times, with `peer_results` different results; -1: none did. `as_peer`: which of this
    rank's two runs had the peer's result, 0: neither. `own_runs`: how many more times this rank computed it; `own_odd`
    of them did not have their most frequent result. `equal_step`: the newest step before at which no rank saw a
    difference, in this generation. Sent once per generation and rank for each of bad device and other."""

    job: JobName
    generation: Generation
    rank: Rank
    step: SeenStep
    tensors: Annotated[tuple[ReplayedName, ...], msgspec.Meta(max_length=8)]
    count: Seq
    differing: Seq
    ranks: Seq
    peer: Annotated[int, msgspec.Meta(ge=-1, lt=1_000_000)] = -1
    peer_runs: Seq = 0
    peer_results: Seq = 0
    as_peer: Annotated[int, msgspec.Meta(ge=0, le=2)] = 0
    equal_step: SeenStep = -1
    deterministic: bool = False  # torch.use_deterministic_algorithms was on, and not to warn only
    own_runs: Seq = 0
    own_odd: Seq = 0

    @property
    def is_bad_device(self) -> bool:
        """Whether the difference is proven to be in the device, not in the computation.

        A peer has to get one result each time, and at most half of the ranks (all of one of two hosts) may differ. That
        alone is no proof: a computation that differs now and then shows it on one rank first, and often gives a peer
        equal runs. So either torch refused all operations that are not deterministic, or the rank differs again and
        again while the peer, with twice the runs, never does."""
        if self.peer < 0 or self.peer_results != 1 or 2 * self.differing > self.ranks:
            return False
        is_repeated = self.own_runs >= OWN_RUNS and self.own_odd >= ODD_RUNS and self.peer_runs >= PEER_RUNS
        return self.deterministic or is_repeated


class LossDiverged(msgspec.Struct, frozen=True, tag="loss_diverged"):
    """A job's loss, as `rank` reports it, turned bad and stays so: no finite number, or above `limit`. Steps up to
    `clean_step` had usual losses (-1: none had), those from `first_step` to `step` had not, `samples` of them seen.
    `usual` and `spread`: the median of the losses before, and their median distance from it (nan: too few). Raised by a
    sensor, once per harm."""

    job: JobName
    generation: Generation
    rank: Rank
    clean_step: SeenStep
    first_step: SeenStep
    step: SeenStep
    value: LossValue
    usual: LossValue
    spread: LossValue
    limit: LossValue
    samples: Seq


class LossRecovered(msgspec.Struct, frozen=True, tag="loss_recovered"):
    """A loss that was bad from `first_step` on, at most `highest`, is usual again at `step`: a spike that healed."""

    job: JobName
    generation: Generation
    rank: Rank
    step: SeenStep
    value: LossValue
    first_step: SeenStep
    highest: LossValue


class RankLoss(msgspec.Struct, frozen=True, gc=False):
    """The newest loss of a rank. A host reports that of its lowest rank that has one."""

    job: RepeatedJobName
    generation: Generation
    rank: Rank
    step: SeenStep
    value: LossValue


class RankCompute(msgspec.Struct, frozen=True, gc=False):
    """How long a rank computed in `steps` steps since its last such report, without waiting for other ranks."""

    job: RepeatedJobName
    generation: Generation
    rank: Rank
    steps: Seq
    compute_s: Duration


def loss_value(loss: float) -> LossValue:
    """The JSON form of a loss."""
    if math.isfinite(loss):
        return loss
    if math.isnan(loss):
        return "nan"
    return "inf" if loss > 0 else "-inf"
