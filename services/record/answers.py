"""Sums up the answers of an action's hosts to its commands. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from flyball.contracts.decisions import CommandUpdate, UpdateState


class ActionAnswers(msgspec.Struct, frozen=True):
    """The answers of an action's hosts so far."""

    positions: Mapping[str, int]  # str(rank) -> newest completed step that any answer names
    failed: Mapping[tuple[str, str], tuple[str, str]]  # phase and host that failed -> code, message


def sum_up(answers: Iterable[CommandUpdate]) -> ActionAnswers:
    """Sum up the answers of one action, in the order of their commands. Pure."""
    newest: dict[str, int] = {}
    failed: dict[tuple[str, str], tuple[str, str]] = {}
    for update in answers:
        for position in update.result.positions:
            rank = str(position.rank)
            newest[rank] = max(position.step, newest.get(rank, position.step))
        asked = (update.command_id.split(".")[1], update.host_id)
        if update.state is UpdateState.FAILED:
            failed[asked] = (update.code, update.message)
        elif update.state is UpdateState.SUCCEEDED:
            failed.pop(asked, None)
    return ActionAnswers(newest, failed)


def failed_in(answers: ActionAnswers, phase: str) -> dict[str, tuple[str, str]]:
    """host -> code and message, for hosts that failed in a phase. Pure."""
    return {host: why for (of_phase, host), why in answers.failed.items() if of_phase == phase}


ACKNOWLEDGED = 1
ANSWERED = 2
