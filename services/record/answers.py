"""Sums up the answers of an action's hosts to its commands. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from flyball.contracts.decisions import CommandUpdate, UpdateState
from flyball.contracts.reports.host_checks import CheckMeasure
from flyball.contracts.reports.rank_stands import RankStand
from services.rules import preflight


class ActionAnswers(msgspec.Struct, frozen=True):
    """The answers of an action's hosts so far."""

    positions: Mapping[str, int]  # str(rank) -> newest completed step that any answer names
    failed: Mapping[tuple[str, str], tuple[str, str]]  # phase and host that failed -> code, message
    stands: tuple[RankStand, ...] = ()  # by rank, without the stacks
    checks: tuple[CheckMeasure, ...] = ()
    unmeasured: Mapping[str, str] = {}  # host whose daemon did not check it -> why


def sum_up(answers: Iterable[CommandUpdate]) -> ActionAnswers:
    """Sum up the answers of one action, in the order of their commands. Pure."""
    newest: dict[str, int] = {}
    stands: dict[int, RankStand] = {}
    failed: dict[tuple[str, str], tuple[str, str]] = {}
    checks: list[CheckMeasure] = []
    answers = list(answers)
    for update in answers:
        for position in update.result.positions:
            rank = str(position.rank)
            newest[rank] = max(position.step, newest.get(rank, position.step))
        stands |= {stand.rank: msgspec.structs.replace(stand, stack="") for stand in update.result.stands}
        if update.result.check is not None:
            checks.append(update.result.check)
        asked = (update.command_id.split(".")[1], update.host_id)
        if update.state is UpdateState.FAILED:
            failed[asked] = (update.code, update.message)
        elif update.state is UpdateState.SUCCEEDED:
            failed.pop(asked, None)
    ranks = tuple(stands[rank] for rank in sorted(stands))
    return ActionAnswers(newest, failed, ranks, tuple(checks), preflight.without_measure(answers))


def failed_in(answers: ActionAnswers, phase: str) -> dict[str, tuple[str, str]]:
    """host -> code and message, for hosts that failed in a phase. Pure."""
    return {host: why for (of_phase, host), why in answers.failed.items() if of_phase == phase}


ACKNOWLEDGED = 1
ANSWERED = 2
