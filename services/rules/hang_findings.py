"""Names the rank that the others wait for, from where each rank stands. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from flyball.contracts.reports.rank_stands import RankStand, Stand
from services.rules.wording import ranks_kept, ranks_of

_SHOWN = 3  # groups of ranks in a sentence

_WORDS = {
    Stand.COLLECTIVE: "waits in {call}",
    Stand.DATA_LOADER: "stands in the data loader",
    Stand.CHECKPOINT: "stands in a checkpoint",
    Stand.EVALUATION: "evaluates",
    Stand.LOCK: "waits for a lock",
    Stand.FILE: "stands in a call on a file",
    Stand.NETWORK: "waits for the network",
    Stand.PROCESS: "waits for another process",
    Stand.SLEEP: "sleeps",
    Stand.CODE: "runs code of its own",
    Stand.BLOCKED: "is blocked in the kernel",
    Stand.STOPPED: "is stopped by a signal",
}


class HangFinding(msgspec.Struct, frozen=True):
    """Which ranks are to blame for a hang, and why."""

    culprits: tuple[int, ...]  # (): the stands do not show it
    sentence: str
    evidence: Mapping[str, str | int | float | bool | None]


def find(stands: Iterable[RankStand]) -> HangFinding | None:
    """Name the ranks that the others wait for; None without stands.

    A stopped process is to blame, whatever else there is. Else ranks in a collective wait for those that are not in
    it. If all are in collectives, or none is, the larger part waits for the smaller one that stands elsewhere.
    """
    known = sorted(stands, key=lambda stand: stand.rank)
    if not known:
        return None
    blamed = known if len(known) == 1 else _stopped(known) or _missing(known) or _elsewhere(known)
    culprits = tuple(stand.rank for stand in blamed)
    others = [stand for stand in known if stand.rank not in culprits]
    if not culprits:
        sentence = f"Where the ranks stand shows no culprit: {_shown(known)}."
    elif others:
        sentence = f"{_capital(_shown(others))}; {_shown(blamed)}."
    else:
        sentence = f"{_capital(_shown(blamed))}."
    return HangFinding(
        culprits,
        sentence,
        {**({"culprits": ranks_kept(culprits)} if culprits else {}), "stands": "; ".join(_counted(known))},
    )


def _stopped(known: Sequence[RankStand]) -> list[RankStand]:
    return [stand for stand in known if stand.kind == Stand.STOPPED]


def _missing(known: Sequence[RankStand]) -> list[RankStand]:
    """The ranks that are in no collective, if others wait in one."""
    missing = [stand for stand in known if stand.kind != Stand.COLLECTIVE]
    # Nothing is known of the stack of these: whether they wait, too.
    sure = [stand for stand in missing if stand.kind != Stand.UNKNOWN or stand.stack]
    return (sure or missing) if len(missing) < len(known) else []


def _elsewhere(known: Sequence[RankStand]) -> list[RankStand]:
    """The ranks that stand elsewhere than more than half of all."""
    groups = _groups(known)
    largest = max(groups.values(), key=len)
    return [stand for stand in known if stand not in largest] if 2 * len(largest) > len(known) else []


def _groups(known: Iterable[RankStand]) -> dict[tuple[str, str, str], list[RankStand]]:
    groups: dict[tuple[str, str, str], list[RankStand]] = {}
    for stand in known:
        groups.setdefault((stand.kind, stand.call, stand.caller or stand.place), []).append(stand)
    return groups


def _shown(stands: Sequence[RankStand]) -> str:
    groups = sorted(_groups(stands).values(), key=len, reverse=True)
    parts = [
        f"{ranks_of([s.rank for s in group])} {_words(group[0], one=len(group) == 1)}" for group in groups[:_SHOWN]
    ]
    more = sum(len(group) for group in groups[_SHOWN:])
    return ", ".join(parts) + (f", and {more} more elsewhere" if more else "")


def _words(stand: RankStand, *, one: bool) -> str:
    does = _WORDS.get(stand.kind, "stands").format(call=stand.call or "a collective")  # type: ignore[call-overload]
    if not one:
        verb, _, rest = does.partition(" ")
        does = f"{'are' if verb == 'is' else verb.removesuffix('s')}{f' {rest}' if rest else ''}"
    where = [stand.place, f"called from {stand.caller}" if stand.caller else "", stand.process]
    return f"{does} ({'; '.join(filter(None, where)) or 'nothing more is known'})"


def _counted(known: Iterable[RankStand]) -> list[str]:
    return [
        f"{ranks_kept([s.rank for s in group])}: {kind}{f' {call}' if call else ''}"
        for (kind, call, _), group in _groups(known).items()
    ][:16]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def host_of(culprits: Iterable[int], hosts: Mapping[int, str]) -> str:
    """The host of all these ranks; '' if they are on several."""
    found = {hosts.get(rank, "") for rank in culprits}
    return found.pop() if len(found) == 1 else ""
