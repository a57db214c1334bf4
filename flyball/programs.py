"""Programs that run as ranks (`--no-python`)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from flyball.contracts.errors import NotFound


def find_program(name: str, workdir: Path, environ: Mapping[str, str]) -> str:
    """The file that would run: a path relative to the working folder, or a name in PATH. Raises NotFound."""
    path = workdir / name
    if "/" not in name:
        found = shutil.which(name, path=environ.get("PATH", os.defpath))
        if found:
            return found
        beside = f"; if you mean the file in {workdir}, write ./{name}" if path.is_file() else ""
        raise NotFound(f"No program {name} is in PATH.", hint=f"give its path, or install it on every host{beside}")
    if not path.is_file():
        raise NotFound(f"The program {path} does not exist.", hint="give the path of an executable file")
    if not os.access(path, os.X_OK):
        raise NotFound(f"The program {path} is not executable.", hint=f"chmod +x {path}, or run it without --no-python")
    return str(path)
