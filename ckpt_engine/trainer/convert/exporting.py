"""Export a step in the formats of others: as whole tensors, streamed, and compared with what was read back.

    safetensors   state.safetensors: all tensors by their paths; the rest of the state is in the metadata
    hf            model.safetensors, or several with model.safetensors.index.json: one entry's tensors, for transformers
    torch         state.pt: torch.save of the state; torch.load(weights_only=True) reads it
    dcp           what torch.distributed.checkpoint.load reads

Numpy arrays become tensors. Everything is written beside the folder, and renamed when it is whole.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from datetime import date, time, timedelta
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from ckpt_engine.rules.memory_plan import readable_size
from ckpt_engine.tiers.durable_files import UNFINISHED, WRITER, remove_left_folders, write_durably
from ckpt_engine.trainer.capture.capture_plan import FORMAT, FORMAT_KEY, STATE_KEY
from ckpt_engine.trainer.convert.safetensors_file import digests_in, element_bytes, in_order, write_file
from ckpt_engine.trainer.convert.scratch import Scratch
from ckpt_engine.trainer.convert.whole_step import WholeStep, shape_of, size_of
from ckpt_engine.trainer.restore.restore_targets import Stored
from ckpt_engine.trainer.state.state_tree import with_metadata
from ckpt_engine.trainer.tensor_bytes import bytes_in_place
from flyball.contracts.errors import CheckpointError, Conflict, CorruptShard, NotFound, StorageFull
from flyball.state_folder import clear_errors, sync_folder

HF_FILE, HF_INDEX = "model.safetensors", "model.safetensors.index.json"
_SPARE_BYTES = 16 << 20  # of a disk, for headers


class ExportFormat(StrEnum):
    DCP = "dcp"
    TORCH = "torch"
    SAFETENSORS = "safetensors"
    HF = "hf"


class ExportOptions(msgspec.Struct, frozen=True):
    """`entry`: of the state, for hf. `max_file_bytes`: of one of hf's files."""

    format: ExportFormat
    entry: str = "model"
    max_file_bytes: int = 5_000_000_000


class ExportedStep(msgspec.Struct, frozen=True):
    """What is in the folder."""

    files: tuple[str, ...]
    tensors: int
    size_bytes: int


def export(step: WholeStep, folder: Path, options: ExportOptions, *, on_bytes: Callable[[int], None]) -> ExportedStep:
    """Write the step to a folder that does not exist yet, or is empty. `on_bytes` is called with the bytes of tensors
    that were written, and again as they are read back.

    Raises Conflict, NotFound for an unknown entry, StorageFull, ConfigurationError, CorruptShard, RestoreFailed.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Conflict(f"{folder} exists and is not empty.", hint="choose another folder")
    names = _names(step, options)
    unfinished = folder.with_name(f".{folder.name}{UNFINISHED}{WRITER}")
    with clear_errors(folder, hint="choose a folder that you may write to"):
        remove_left_folders(folder.parent, f".{folder.name}")
        unfinished.mkdir(parents=True)
    try:
        _check_room(step, unfinished, names, options)
        writing = _Writing(step, unfinished, on_bytes)
        with clear_errors(folder):
            _WRITERS[options.format](writing, names, options)
            files = sorted(path for path in unfinished.iterdir())
            sizes = [path.stat().st_size for path in files]
            sync_folder(unfinished)
            unfinished.rename(folder)
            sync_folder(folder.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return ExportedStep(tuple(path.name for path in files), len(names), sum(sizes))


def _names(step: WholeStep, options: ExportOptions) -> list[str]:
    if options.format is not ExportFormat.HF:
        return list(step.tensors)
    state = step.state(lambda saved: saved)
    if options.entry not in state:
        raise NotFound(
            f"The state has no entry {options.entry!r}; it has {', '.join(map(repr, state))}.",
            hint="name the model's entry with --entry",
        )
    found: dict[str, None] = {}
    for _, saved in _leaves(state[options.entry], ""):
        found.setdefault(saved.name)
    if not found:
        raise NotFound(f"The entry {options.entry!r} has no tensors.", hint="name the model's entry with --entry")
    return list(found)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Stored]]:  # noqa: ANN401 - any state
    if isinstance(value, Stored):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}.{index}" if path else str(index))


def _check_room(step: WholeStep, folder: Path, names: Sequence[str], options: ExportOptions) -> None:
    """Ours, so that a library's error about a full disk need not be understood."""
    needed_bytes = sum(size_of(step.tensors[name]) for name in names) + _SPARE_BYTES
    if options.format is ExportFormat.TORCH:
        needed_bytes *= 2  # the tensors are put together in a file first
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise StorageFull(
            f"{folder.parent} has {readable_size(free_bytes)} free, and the export needs "
            f"{readable_size(needed_bytes)}.",
            hint="free space there, or choose another folder",
        )


class _Writing:
    """An export in progress: reads tensors, notes what they were, and compares."""

    def __init__(self, step: WholeStep, folder: Path, on_bytes: Callable[[int], None]) -> None:
        self.step = step
        self.folder = folder
        self._on_bytes = on_bytes
        self._digests: dict[str, bytes] = {}

    def produce(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for batch in self.step.batches(names):
            for name, tensor in self.step.read(batch).items():
                self.note(name, tensor)
                yield name, tensor

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """This is what goes out under the name."""
        self._digests[name] = xxhash.xxh3_128_digest(bytes_in_place(tensor))
        self._on_bytes(tensor.nbytes)

    def check(self, name: str, found: torch.Tensor | bytes) -> None:
        """This was read back. Raises CorruptShard if it is something else."""
        saved = self.step.tensors[name]
        if isinstance(found, torch.Tensor):
            same_kind = (found.dtype, tuple(found.shape)) == (saved.dtype, shape_of(saved))
            found = xxhash.xxh3_128_digest(bytes_in_place(found.contiguous())) if same_kind else b""
        if found != self._digests.get(name):
            raise CorruptShard(f"The tensor {name!r} was read back otherwise than it was written.", hint="try again")
        self._on_bytes(size_of(saved))

    def check_all(self, checked: Sequence[str]) -> None:
        if sorted(checked) != sorted(self._digests):
            raise CorruptShard("Not all tensors were found in what was written.", hint="try again")


# --- safetensors, hf ---


def _write_safetensors(writing: _Writing, names: Sequence[str], _options: ExportOptions) -> None:
    metadata = {"format": "pt", FORMAT_KEY: FORMAT, STATE_KEY: writing.step.plain_tree()}
    _write_one(writing, writing.folder / "state.safetensors", {name: name for name in names}, metadata)


def _write_hf(writing: _Writing, names: Sequence[str], options: ExportOptions) -> None:
    state = writing.step.state(lambda saved: saved)
    theirs: dict[str, str] = {}  # ours -> the first of its names, as transformers wants tied weights
    for path, saved in _leaves(state[options.entry], ""):
        theirs.setdefault(saved.name, path)
    files: list[list[str]] = [[]]
    filled_bytes = 0
    for name in names:
        size_bytes = size_of(writing.step.tensors[name])
        if files[-1] and filled_bytes + size_bytes > options.max_file_bytes:
            files.append([])
            filled_bytes = 0
        files[-1].append(name)
        filled_bytes += size_bytes
    weight_map = {}
    for number, content in enumerate(files, 1):
        file = HF_FILE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        weight_map.update({theirs[name]: file for name in content})
        _write_one(writing, writing.folder / file, {name: theirs[name] for name in content}, {"format": "pt"})
    if len(files) > 1:
        total_bytes = sum(size_of(writing.step.tensors[name]) for name in names)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        write_durably(writing.folder / HF_INDEX, [json.dumps(index, indent=2).encode() + b"\n"], mode=0o644)


def _write_one(writing: _Writing, path: Path, names: dict[str, str], metadata: dict[str, str]) -> None:
    """Write a file, and read it back. `names`: ours -> the file's."""
    tensors = writing.step.tensors
    ordered = in_order(names, lambda name: element_bytes(tensors[name].dtype))
    described = {names[name]: (tensors[name].dtype, shape_of(tensors[name])) for name in ordered}
    write_file(path, described, metadata, writing.produce(ordered))
    ours = {theirs: name for name, theirs in names.items()}
    for theirs, digest in digests_in(path, list(ours)):
        writing.check(ours[theirs], digest)


# --- torch ---


def _write_torch(writing: _Writing, names: Sequence[str], _options: ExportOptions) -> None:
    scratch = Scratch(writing.folder.parent)
    try:
        whole = {name: scratch.empty(shape_of(saved), saved.dtype) for name, saved in writing.step.tensors.items()}
        for batch in writing.step.batches(names):
            writing.step.read_into({name: whole[name] for name in batch})
            for name in batch:
                writing.note(name, whole[name])
        state = _plain(writing.step.state(lambda saved: whole[saved.name]))
        path = writing.folder / "state.pt"
        with path.open("xb") as file:
            try:
                torch.save(state, file)
            except RuntimeError as error:
                raise CheckpointError(f"torch.save failed: {error}", hint="see the disk, then try again") from error
            file.flush()
            os.fsync(file.fileno())
    finally:
        scratch.close()
    expected = _plain(writing.step.state(lambda saved: saved))
    checked: dict[str, None] = {}
    for saved, tensor in _pairs(expected, torch.load(path, map_location="cpu", mmap=True, weights_only=True)):
        if saved.name not in checked:
            checked[saved.name] = None
            writing.check(saved.name, tensor)
    writing.check_all(list(checked))


# --- dcp ---


def _write_dcp(writing: _Writing, names: Sequence[str], _options: ExportOptions) -> None:
    del names  # all
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
    from torch.distributed.checkpoint.state_dict_saver import save

    outlines: dict[int, Stored] = {}  # by the id of a tensor without memory, which stands for it

    def outline(saved: Stored) -> torch.Tensor:
        tensor = torch.empty(shape_of(saved), dtype=saved.dtype, device="meta")
        outlines[id(tensor)] = saved
        return tensor

    class Streamed(DefaultSavePlanner):
        """Reads each tensor when it is to be written."""

        def resolve_data(self, write_item: WriteItem) -> Any:  # noqa: ANN401 - a tensor or bytes
            if write_item.type is WriteItemType.BYTE_IO:
                return super().resolve_data(write_item)
            name = outlines[id(self.state_dict[write_item.index.fqn])].name
            tensor = writing.step.read([name])[name]
            writing.note(name, tensor)
            return tensor

    stored: list[tuple[str, str, int, int]] = []  # (fqn, file, offset, length)

    class Noting(FileSystemWriter):
        """Notes where each tensor was written."""

        def finish(self, metadata: Any, results: Any) -> None:  # noqa: ANN401 - as torch has them
            super().finish(metadata, results)
            for result in (result for of_rank in results for result in of_rank):
                info = result.storage_data
                stored.append((result.index.fqn, info.relative_path, info.offset, info.length))

    def with_tuples_read(value: Any) -> Any:  # noqa: ANN401 - any state
        """DCP pickles a tuple whole, with its tensors."""
        if isinstance(value, torch.Tensor):
            saved = outlines[id(value)]
            tensor = next(tensor for _, tensor in writing.produce([saved.name]))
            outlines[id(tensor)] = saved
            return tensor
        if isinstance(value, list | tuple):
            return type(value)(with_tuples_read(item) for item in value)
        if isinstance(value, dict):
            return type(value)((key, with_tuples_read(item)) for key, item in value.items())
        return value

    state = _mapped_tuples(_plain(writing.step.state(outline)), with_tuples_read)
    planner = Streamed()
    writer = Noting(writing.folder, single_file_per_rank=False, sync_files=True, thread_count=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        try:
            save(state, storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error
    checked: dict[str, None] = {}
    for fqn, file, offset, length in stored:
        with (writing.folder / file).open("rb") as opened:
            opened.seek(offset)
            content = io.BytesIO(opened.read(length))
        found = torch.load(content, map_location="cpu", weights_only=True)
        for expected, tensor in _pairs(planner.state_dict[fqn], found):
            checked[outlines[id(expected)].name] = None
            writing.check(outlines[id(expected)].name, tensor)
    writing.check_all(list(checked))


_WRITERS: dict[ExportFormat, Callable[[_Writing, Sequence[str], ExportOptions], None]] = {
    ExportFormat.DCP: _write_dcp,
    ExportFormat.TORCH: _write_torch,
    ExportFormat.SAFETENSORS: _write_safetensors,
    ExportFormat.HF: _write_hf,
}


# --- the state as others know it ---


def _plain(value: Any) -> Any:  # noqa: ANN401 - any state
    """Numbers in place of numpy's, and lists, dicts and strings in place of less usual classes: other libraries'
    readers refuse those."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, PurePath | date | time | timedelta | frozenset):
        return set(value) if isinstance(value, frozenset) else str(value)
    if type(value) in (list, tuple, deque, range):
        items = [_plain(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if type(value) in (dict, OrderedDict, defaultdict):
        kind = OrderedDict if isinstance(value, OrderedDict) else dict
        return with_metadata(kind((key, _plain(item)) for key, item in value.items()), value)
    return value


def _mapped_tuples(value: Any, change: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - any state
    """A state with its outermost tuples changed."""
    if isinstance(value, tuple):
        return change(value)
    if isinstance(value, list):
        return [_mapped_tuples(item, change) for item in value]
    if isinstance(value, dict):
        return type(value)((key, _mapped_tuples(item, change)) for key, item in value.items())
    return value


def _pairs(expected: Any, found: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401 - any state
    """The tensors that should be in a state, or what stands for them, with what is there."""
    if isinstance(expected, Stored | torch.Tensor):
        yield expected, found
    elif isinstance(expected, dict):
        for key, item in expected.items():
            yield from _pairs(item, found[key])
    elif isinstance(expected, list | tuple):
        for item, other in zip(expected, found, strict=True):
            yield from _pairs(item, other)
