"""What a script sets in its environment before it imports torch. A worker that is forked from the standby has torch
already, so such a setting comes too late for it: the worker then starts in a fresh interpreter.

Found by reading the script, and the modules beside it, in the order in which they run. What that cannot find (a file of
settings, another package) is found when the script imports torch, and said.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

# What torch and what it loads read when they are loaded. The rest is read when it is used.
_READ_EARLY = (
    *("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "NPY_", "DNNL_", "ONEDNN_", "SYMPY_"),
    *("TORCH", "PYTORCH_", "ATEN_", "TRITON_", "KINETO_", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "HIP_", "ROCR_"),
)
_READ_LATE = ("TORCH_NCCL_", "TORCH_HOME", "TORCHELASTIC_")
_WITH_TORCH = frozenset(
    {
        *("torch", "torchvision", "torchaudio", "torchtitan", "functorch", "lightning", "pytorch_lightning"),
        *("transformers", "accelerate", "deepspeed", "megatron", "timm", "peft", "datasets"),
    }
)
_MAX_FILES = 16
_MAX_BYTES = 256 << 10  # of each
_UNKNOWN = "a variable"


def is_read_early(name: str) -> bool:
    """Whether it is too late to set this variable once torch was imported."""
    return name.startswith(_READ_EARLY) and not name.startswith(_READ_LATE)


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The variables that are read early and have another value now."""
    return sorted(name for name in {*before, *now} if is_read_early(name) and before.get(name) != now.get(name))


def found_in(script: Path) -> str:
    """The first variable that `script` sets before it imports torch, and that is read then; '' if there is none."""
    return _Reading(script.parent).read(script) or ""


class _TorchIsThere(Exception):
    """What follows comes too late under python as well."""


class _Reading:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: set[Path] = set()

    def read(self, script: Path) -> str | None:
        try:
            return self._file(script)
        except _TorchIsThere:
            return None

    def _file(self, path: Path) -> str | None:
        if path in self._seen or len(self._seen) >= _MAX_FILES or not path.is_file():  # a pipe is read once
            return None
        self._seen.add(path)
        try:
            with path.open("rb") as file:
                text = file.read(_MAX_BYTES)
            tree = ast.parse(text)
        except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):  # python says it when it runs
            return None
        return self._block(tree.body)

    def _block(self, statements: list[ast.stmt]) -> str | None:
        for statement in statements:
            match statement:
                case ast.Import():
                    found = self._imports([alias.name for alias in statement.names])
                case ast.ImportFrom():
                    found = self._imports([statement.module or ""])
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():  # it may be called at once
                    found = next(_settings(statement), None)
                case _:
                    found = self._other(statement)
            if found:
                return found
        return None

    def _other(self, statement: ast.stmt) -> str | None:
        """A simple statement, or one with blocks."""
        blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
        blocks[1:1] = [handler.body for handler in getattr(statement, "handlers", [])]
        if not any(blocks):
            return next(_settings(statement), None)
        for block in blocks:
            if found := self._block(block):
                return found
        return None

    def _imports(self, names: list[str]) -> str | None:
        for name in names:
            root = name.partition(".")[0]
            if root in _WITH_TORCH:
                raise _TorchIsThere
            place = self._folder.joinpath(*name.split("."))
            for path in (place.with_suffix(".py"), place / "__init__.py") if name else ():
                if path.is_file() and (found := self._file(path)):
                    return found
        return None


def _settings(tree: ast.AST) -> Iterator[str]:
    """The variables that are read early, and set somewhere in `tree`."""
    for node in ast.walk(tree):
        for name in _set_by(node):
            if name == _UNKNOWN or is_read_early(name):
                yield name


def _set_by(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            yield from (
                _text(one.slice) for one in targets if isinstance(one, ast.Subscript) and _is_environ(one.value)
            )
        case ast.AugAssign(target=target, value=value) if _is_environ(target):
            yield from _names_in(value)
        case ast.Call(func=ast.Attribute(value=owner, attr=method), args=args, keywords=keywords):
            if _is_environ(owner) and method in ("setdefault", "pop"):
                yield from map(_text, args[:1])
            elif _is_environ(owner) and method == "update":
                yield from (keyword.arg or _UNKNOWN for keyword in keywords)
                for given in args:
                    yield from _names_in(given)
            elif method in ("putenv", "unsetenv"):
                yield from map(_text, args[:1])
            elif method == "load_dotenv":
                yield _UNKNOWN
        case ast.Call(func=ast.Name(id="putenv" | "unsetenv"), args=args):
            yield from map(_text, args[:1])
        case ast.Call(func=ast.Name(id="load_dotenv")):
            yield _UNKNOWN


def _is_environ(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in ("environ", "environb")


def _names_in(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Dict(keys=keys):
            yield from (_UNKNOWN if key is None else _text(key) for key in keys)
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords):
            yield from (keyword.arg or _UNKNOWN for keyword in keywords)
        case _:
            yield _UNKNOWN


def _text(node: ast.expr) -> str:
    value = node.value if isinstance(node, ast.Constant) else None
    return value.decode(errors="replace") if isinstance(value, bytes) else value if isinstance(value, str) else _UNKNOWN
