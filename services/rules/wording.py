"""Formats hosts and ranks for sentences and evidence; stays short in a world of any size. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

NAMED = 8  # names in a sentence, at most
RANGES_NAMED = 16  # ranges of ranks in a sentence
KEPT = 64  # names or ranks in evidence


def counted(number: int, one: str, many: str = "") -> str:
    """Return "1 host" or "3 hosts"; `many` is an irregular plural."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def in_words(code: str) -> str:
    """Return "timed out" for `timed_out`."""
    return code.replace("_", " ")


def sentence(text: str) -> str:
    """Return the text with one full stop at its end."""
    return f"{text.strip().rstrip('.')}."


def shortened(text: str, limit: int = 300) -> str:
    """Return the text in one line, without its full stop, cut if it is long."""
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= limit else f"{line[:limit]}..."


def explained(text: str, reason: str) -> str:
    """Return "TEXT: REASON." or, without a reason, "TEXT."."""
    return sentence(f"{text}: {reason.strip()}" if reason.strip() else text)


def listed(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


def kept(names: Sequence[str]) -> str:
    """Format names as evidence: separated by commas without spaces, at the end how many more there are."""
    more = [f"and {len(names) - KEPT} more"] if len(names) > KEPT else []
    return ",".join([*names[:KEPT], *more])


def ranges(ranks: Iterable[int]) -> str:
    """Format ranks in order; three or more consecutive ranks become a range: "0-7, 9, 10"."""
    parts: list[str] = []
    left_out = 0
    for first, last in _runs(sorted(set(ranks))):
        if len(parts) >= RANGES_NAMED:
            left_out += last - first + 1
        elif last - first >= 2:
            parts.append(f"{first}-{last}")
        else:
            parts += [str(rank) for rank in range(first, last + 1)]
    more = f" and {left_out} more" if left_out else ""
    return f"{', '.join(parts)}{more}"


def ranks_kept(ranks: Iterable[int]) -> str:
    """Format ranks as evidence: separated by commas without spaces, as ranges if there are many."""
    ordered = sorted(set(ranks))
    return ",".join(map(str, ordered)) if len(ordered) <= KEPT else ranges(ordered).replace(", ", ",")


def ranks_of(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0-7"."""
    numbers = set(ranks)
    return f"rank{'' if len(numbers) == 1 else 's'} {ranges(numbers)}"


def ranks_by_host(ranks: Iterable[int], host_of: Mapping[int, str]) -> str:
    """Return "Rank 0 on a" or "Ranks 0-7 on a, 8-15 on b and 16 (host unknown)"; for many hosts, only their number;
    "Some ranks" if there are none."""
    numbers = sorted(set(ranks))
    if not numbers:
        return "Some ranks"
    on: dict[str, list[int]] = {}
    for rank in sorted(numbers, key=lambda rank: rank not in host_of):
        on.setdefault(host_of.get(rank, ""), []).append(rank)
    noun = "Rank" if len(numbers) == 1 else "Ranks"
    if len(on) > NAMED:
        return f"{noun} {ranges(numbers)} on {len(on)} hosts"
    *parts, last = [f"{ranges(of_host)} {f'on {name}' if name else '(host unknown)'}" for name, of_host in on.items()]
    return f"{noun} {', '.join(parts)} and {last}" if parts else f"{noun} {last}"


def _runs(ordered: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of each run of consecutive numbers."""
    start = 0
    for position in range(1, len(ordered) + 1):
        if position == len(ordered) or ordered[position] != ordered[position - 1] + 1:
            yield ordered[start], ordered[position - 1]
            start = position
