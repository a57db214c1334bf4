"""What `flyball ckpt import` is pointed at: which files of which format, and of which step.

DIR/.metadata                                           torch.distributed.checkpoint, DLRover's FSDP
DIR/dlrover_latest.txt, DIR/<step>/rank_<rank>.pt       DLRover
DIR/latest_checkpointed_iteration.txt,
DIR/iter_<step>/mp_rank_<tensor>[_<pipeline>]/...       Megatron-LM, DLRover's saver for it
DIR/[<session>/]<rank>/iter_<step>_<rank>_local.pt      NVIDIA's resiliency extension
DIR/*.safetensors                                       safetensors
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from ckpt_engine.contracts.import_wire import MEGATRON_MODEL, ForeignFormat
from flyball.contracts.errors import CorruptShard, NotFound, UsageError

DCP_METADATA, HF_INDEX = ".metadata", "model.safetensors.index.json"
DLROVER_TRACKER, MEGATRON_TRACKER = "dlrover_latest.txt", "latest_checkpointed_iteration.txt"
_TORCH_HEADS = (b"PK\x03\x04", b"\x80")
_MAX_TRACKER_BYTES = 64
_NVIDIA_FILE = re.compile(r"iter_(\d{1,15})_(\d{1,9})_local\.pt")
_RANK_FILE = re.compile(r"rank_(\d{1,9})\.pt")
_MEGATRON_RANK = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")


@dataclass(frozen=True, slots=True)
class Sources:
    """`files`: of all ranks in turn, for DCP the folder, for Megatron a folder per rank. `step`: as far as the
    source says."""

    format: ForeignFormat
    files: tuple[str, ...]
    size_bytes: int
    step: int | None = None


def find_sources(given: Sequence[Path], step: int | None = None) -> Sources:
    """What the sources are. `step`: the one to take, where a folder has several; by default the newest. Raises
    NotFound, UsageError, CorruptShard."""
    if missing := next((path for path in given if not path.exists()), None):
        raise NotFound(
            f"There is no {missing}.", hint="name a checkpoint's folder, or files of torch.save or safetensors"
        )
    folders = [path for path in given if path.is_dir()]
    if found := {file: session for folder in folders for file, session in _nvidia_files(folder)}:
        if len(folders) < len(given):
            raise UsageError("Folders and files cannot be imported at once.", hint="name the folders of all hosts")
        return _of_nvidia(found, step)
    if len(folders) > 1 or (folders and len(given) > 1):
        raise UsageError("Several folders cannot be imported at once.", hint="name one folder, or the ranks' files")
    return _of_folder(given[0], step) if folders else _of_files(given)


def _of_folder(folder: Path, step: int | None) -> Sources:
    if (folder / DCP_METADATA).exists():
        files = [_regular(path) for path in folder.iterdir() if not path.is_dir()]
        return Sources(ForeignFormat.DCP, (str(folder.resolve()),), _size_of(files), _number_in(folder.name))
    if (folder / DLROVER_TRACKER).exists():
        return _of_step(folder, DLROVER_TRACKER, step, ("{}", "iter_{:07d}"))
    if (folder / MEGATRON_TRACKER).exists():
        return _of_step(folder, MEGATRON_TRACKER, step, ("iter_{:07d}",))
    if ranks := _numbered(folder, _RANK_FILE):
        files = [ranks[number] for number in _all_of(ranks, folder)]
        return Sources(ForeignFormat.TORCH, _names(files), _size_of(files), _number_in(folder.name))
    if any(_MEGATRON_RANK.fullmatch(path.name) and path.is_dir() for path in folder.iterdir()):
        return _of_megatron(folder)
    return _of_files(_safetensors_in(folder))


def _of_step(folder: Path, tracker: str, step: int | None, names: Iterable[str]) -> Sources:
    """The step that the tracker file names, or the given one."""
    with _regular(folder / tracker).open("rb") as file:
        content = file.read(_MAX_TRACKER_BYTES).decode(errors="replace").strip()
    number = _number_in(content) if step is None else step
    if number is None:
        raise CorruptShard(f"{folder / tracker} names no step: {content!r}.", hint="name the folder of a step")
    found = [place for name in names if (place := folder / name.format(number)).is_dir()]
    if not found:
        why = f", which {tracker} names" if step is None else ""
        raise NotFound(f"{folder} has no folder of step {number}{why}.", hint="name the step's folder, or its files")
    sources = _of_folder(found[0], None)
    return Sources(sources.format, sources.files, sources.size_bytes, number)


# --- what a rank each wrote ---


def _nvidia_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """In the folder of a rank, of a session, or the root of all sessions; with the session's name if it is in the root.
    A folder that was named itself has whatever name its host's copy got."""
    for depth in ("", "*/", "*/*/"):
        for path in folder.glob(f"{depth}iter_*_local.pt"):
            yield path, path.parent.parent.name if depth == "*/*/" else ""


def _of_nvidia(files: Mapping[Path, str], step: int | None) -> Sources:
    """The newest step that all ranks have. A rank's folder may have copies of other ranks' files."""
    copies: dict[int, dict[int, Path]] = {}  # by step and rank
    sessions, twice = set(), []
    for path in sorted(files):
        match = _NVIDIA_FILE.fullmatch(path.name)
        if match is None:
            continue
        number, rank = map(int, match.groups())
        if files[path]:
            sessions.add(files[path])
        known = copies.setdefault(number, {}).setdefault(rank, path)
        if known.parent.name == path.parent.name == str(rank) and known.resolve() != path.resolve():
            twice.append(f"{known} and {path} are both of rank {rank} itself.")
        if path.parent.name == str(rank):
            copies[number][rank] = path
    if len(sessions) > 1:
        names = ", ".join(sorted(sessions))
        raise UsageError(f"There are several sessions: {names}.", hint="name the folder of one session")
    if twice:
        raise UsageError(twice[0], hint="name the folders of one session")
    count = 1 + max((rank for ranks in copies.values() for rank in ranks), default=-1)
    for number in sorted(copies, reverse=True) if step is None else [step]:
        ranks = copies.get(number, {})
        if len(ranks) == count:
            ordered = [ranks[rank] for rank in range(count)]
            return Sources(ForeignFormat.TORCH, _names(ordered), _size_of(ordered), number)
    steps = ", ".join(f"{number} of ranks {_listed(copies[number])}" for number in sorted(copies))
    raise NotFound(
        f"No step has the files of all {count} ranks{'' if step is None else f' at step {step}'}; there are: {steps}.",
        hint="name the folders of all hosts, or another --step",
    )


def _of_megatron(folder: Path) -> Sources:
    """A folder per place of the model; ranks are in Megatron's order: tensor parallelism varies first."""
    places = {
        tuple(int(number or 0) for number in match.groups()): path
        for path in folder.iterdir()
        if (match := _MEGATRON_RANK.fullmatch(path.name)) and path.is_dir()
    }
    whole = product(*(range(1 + max(place[axis] for place in places)) for axis in range(3)))
    for place in whole:
        if place not in places or not (places[place] / MEGATRON_MODEL).is_file():
            raise CorruptShard(
                f"{folder} lacks {MEGATRON_MODEL} of tensor, pipeline and expert rank {place[0]}, {place[1]}, "
                f"{place[2]}.",
                hint="the checkpoint is not complete",
            )
    ordered = [places[place] for place in sorted(places, key=lambda place: place[::-1])]
    files = [_regular(path) for place in ordered for path in place.iterdir() if not path.is_dir()]
    names = tuple(str(place.resolve()) for place in ordered)
    return Sources(ForeignFormat.MEGATRON, names, _size_of(files), _number_in(folder.name))


def _numbered(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    return {int(match[1]): path for path in folder.iterdir() if (match := pattern.fullmatch(path.name))}


def _all_of(ranks: dict[int, Path], folder: Path) -> list[int]:
    if sorted(ranks) != list(range(len(ranks))):
        raise CorruptShard(f"{folder} has only the files of ranks {_listed(ranks)}.", hint="it is not complete")
    return sorted(ranks)


def _listed(numbers: Iterable[int]) -> str:
    ordered = sorted(numbers)
    return ", ".join(map(str, ordered[:8])) + (" and others" if len(ordered) > 8 else "")


def _number_in(name: str) -> int | None:
    digits = name.removeprefix("iter_")
    return int(digits) if digits.isdecimal() and len(digits) <= 15 else None


# --- files ---


def _of_files(given: Sequence[Path]) -> Sources:
    kinds = {_kind_of(path) for path in given}
    if len(kinds) > 1:
        raise UsageError("The sources are of different formats.", hint="name the files of one checkpoint")
    return Sources(kinds.pop(), _names(given), _size_of(given))


def _safetensors_in(folder: Path) -> list[Path]:
    index = folder / HF_INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(_regular(index).read_text())["weight_map"].values()))
            files = [folder / name for name in names]
        except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
            raise CorruptShard(f"{index} does not parse: {error!r}.", hint="name the safetensors files") from error
        if any(path.parent != folder or not path.is_file() for path in files):
            raise CorruptShard(f"{index} names files that are not there.", hint="the checkpoint is not complete")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files or (folder / "rank0.manifest").exists():
        raise UsageError(
            f"{folder} is no folder of DCP (it has no {DCP_METADATA}), of DLRover, of Megatron or of NVIDIA's local "
            "checkpoints, and has no safetensors files of a model.",
            hint="name such a folder, or files; a step's folder of Flyball needs no import (load_step)",
        )
    return files


def _kind_of(path: Path) -> ForeignFormat:
    with _regular(path).open("rb") as file:
        head = file.read(16)
    if head.startswith(_TORCH_HEADS):
        return ForeignFormat.TORCH
    if len(head) > 8 and head[8:9] == b"{":
        return ForeignFormat.SAFETENSORS
    raise UsageError(f"{path} is neither of torch.save nor of safetensors.", hint="name a DCP folder, or such files")


def _names(paths: Iterable[Path]) -> tuple[str, ...]:
    return tuple(str(_regular(path).resolve()) for path in paths)


def _regular(path: Path) -> Path:
    """The path, whatever links lead to it. Raises UsageError if a FIFO or a device has its name: to open one may wait
    for ever, and it is read without an end."""
    if not path.is_file():
        raise UsageError(f"{path} is not a regular file.", hint="name the files of one checkpoint")
    return path


def _size_of(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)
