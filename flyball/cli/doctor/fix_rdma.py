"""`flyball doctor --fix rdma`: make Debian's pyverbs importable in this environment."""

from __future__ import annotations

import importlib
import platform
import sysconfig
from pathlib import Path
from typing import Final

from ckpt_engine.peers.transport.rdma.verbs import RdmaUnavailable, load_pyverbs
from flyball.contracts.errors import ConfigurationError, NotFound
from flyball.state_folder import clear_errors

DEBIAN: Final = Path("/usr/lib/python3/dist-packages/pyverbs")


def link_pyverbs(package: Path = DEBIAN, site: Path | None = None) -> str:
    """Link the package's folder into this environment's `site` folder, if its Python is this one. Says what was done.

    Raises NotFound if the package is not installed, ConfigurationError if it is for another Python or cannot be linked,
    RdmaUnavailable if it is linked and cannot be imported.
    """
    try:
        return f"nothing to do: pyverbs is imported from {_imported_from()}"
    except RdmaUnavailable as error:
        if not package.is_dir():
            raise NotFound(
                f"{package} does not exist, so there is nothing to link.",
                hint="apt install python3-pyverbs ibverbs-providers, then run this again; on other distributions "
                "install their package of rdma-core's Python bindings (PyPI's pyverbs does not build unaided)",
            ) from error
    _check_python(package)
    link = (site or Path(sysconfig.get_paths()["platlib"])) / package.name
    with clear_errors(link, hint="run this as the owner of the environment"):
        if link.is_symlink():
            link.unlink()  # to a folder that is gone, or to a package of another Python: it could not be imported
        elif link.exists():
            raise ConfigurationError(
                f"{link} is there already, and cannot be imported.",
                hint="pip uninstall pyverbs, then run this again",
            )
        link.symlink_to(package, target_is_directory=True)
    importlib.invalidate_caches()
    try:
        _imported_from()
    except RdmaUnavailable:
        link.unlink()
        raise
    return f"linked {link} to {package}"


def _imported_from() -> Path:
    return Path(load_pyverbs().errors.__file__).parent


def _check_python(package: Path) -> None:
    ours = sysconfig.get_config_var("EXT_SUFFIX")  # .cpython-311-x86_64-linux-gnu.so
    built = sorted({file.name.removeprefix("device.") for file in package.glob("device.*.so")})
    if f"device{ours}" not in {file.name for file in package.glob("device.*.so")}:
        raise ConfigurationError(
            f"{package} was built for another Python ({', '.join(built) or 'none'}); this one is "
            f"{platform.python_version()} ({ours}).",
            hint="make this environment with the distribution's own Python (/usr/bin/python3 -m venv), or build "
            "rdma-core for this one: docs/reference/rdma.md, 'Enable it'",
        )
