"""The documentation's pages as tests read them: their blocks, and the commands in these."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^( *)(```|~~~)(\S*)")
# Languages of blocks that are typed into a shell, if they begin with a command. Others are files and pictures.
_SHELL = ("", "bash", "console", "sh", "shell", "text")
# What the pages type. A word that is not here makes a block be no commands.
PROGRAMS = (
    *("flyball", "python", "python3", "pip", "pytest", "mutmut", "make", "git", "bash", "sh", "nohup", "wait"),
    *(
        "docker",
        "export",
        "cd",
        "echo",
        "env",
        "for",
        "scontrol",
        "gcloud",
        "curl",
        "ssh",
        "systemctl",
        "useradd",
        "install",
        "apt",
        "openssl",
    ),
    *("srun", "sbatch", "torchrun", "accelerate", "deepspeed", "mpirun", "kubectl", "journalctl", "scp", "rm", "kill"),
)


@dataclass(frozen=True)
class Line:
    """A line of a block."""

    page: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.number}: {self.text}"


@dataclass(frozen=True)
class Block:
    """A fenced or an indented block; `language` is "" for the latter."""

    language: str
    lines: tuple[Line, ...]


def pages() -> list[Path]:
    """What users and developers read. Decisions tell what was, so they are not held to what is."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if page.parent.name != "decisions"]


@cache
def blocks_of(page: Path) -> tuple[Block, ...]:
    name = str(page.relative_to(ROOT))
    found: list[Block] = []
    language: str | None = None  # of the fence that is open
    inner: list[Line] = []

    def close(of: str) -> None:
        if any(line.text.strip() for line in inner):
            found.append(Block(of, tuple(inner)))
        inner.clear()

    for number, text in enumerate(page.read_text().splitlines(), 1):
        fence = _FENCE.match(text)
        if fence:
            close(language or "")
            language = None if language is not None else fence[3]
        elif language is not None or text.startswith("    "):
            inner.append(Line(name, number, text))
        elif text.strip():
            close("")
    return tuple(found)


def program_of(text: str) -> str:
    """The first word of a command line, after variables for it, without the folder of its program."""
    words = re.sub(r"^(\w+=(\$\(.*\)|\S*)\s*)+", "", text.removeprefix("$ ")).split()
    return words[0].rpartition("/")[2] if words else ""


def commands_of(page: Path) -> Iterator[Line]:
    """Each command that a page types, with the lines that a backslash continues as one."""
    for block in blocks_of(page):
        if block.language not in _SHELL:
            whole = " ".join(line.text.strip() for line in block.lines)
            for inside in re.findall(r"\bexec (flyball [^\"]*)", whole):  # a container's command
                yield Line(block.lines[0].page, block.lines[0].number, inside)
            continue
        typed = [line for line in block.lines if line.text.strip()]
        if block.language == "console":
            typed = [line for line in typed if line.text.startswith("$ ")]
        elif program_of(typed[0].text.lstrip("# ")) not in PROGRAMS:
            continue  # a picture, or what a command prints
        whole = ""
        for line in typed:
            whole += line.text.strip().removeprefix("$ ")
            if whole.endswith("\\"):
                whole = whole[:-1]
                continue
            if re.sub(r"#.*|\"[^\"]*\"", "", whole).count("'") % 2:
                whole += "\n"
                continue
            yield Line(line.page, line.number, whole)
            whole = ""


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^( *)(```|~~~).*?^\1\2", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
