"""Chooses the user's variables that `flyball run --supervisor` forwards to workers on other hosts. Pure.

The default is an allow-list: variables that change how Python, PyTorch and the libraries around it compute. Slurm
forwards the whole environment (`--export=ALL`), mpirun only named variables (`-x NAME`). Neither fits if the hosts
differ from the machine that submits the job. `--env` adds to the list, as `-x` does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flyball.contracts.errors import UsageError

MAX_BYTES = 128 << 10  # all variables together: they are stored with the job, and go with every command
ALL, NONE = "ALL", "NONE"

ALLOWED = frozenset({
    *("LANG", "LANGUAGE", "TZ"),
    *("LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
})  # fmt: skip
ALLOWED_PREFIXES = (
    "PYTHON", "PYTORCH_", "TORCH", "CUDA_", "CUDNN_", "CUBLAS_", "NCCL_", "GLOO_", "UCX_", "FI_", "TRITON_", "NVTE_",
    "OMP_", "MKL_", "KMP_", "OPENBLAS_", "LC_", "HF_", "TRANSFORMERS_", "DATASETS_", "DIFFUSERS_", "TOKENIZERS_",
    "ACCELERATE_", "DEEPSPEED_", "WANDB_", "MLFLOW_", "COMET_", "NEPTUNE_", "CLEARML_", "TENSORBOARD_",
)  # fmt: skip

# Variables of one machine, one login or one process: not forwarded unless named.
_OF_A_HOST = frozenset({
    *("CUDA_VISIBLE_DEVICES", "PYTHONHOME", "PYTHONEXECUTABLE", "PYTHONSTARTUP", "PATH", "HOME", "USER", "LOGNAME"),
    *("SHELL", "PWD", "OLDPWD", "SHLVL", "_", "HOSTNAME", "HOST", "TERM", "DISPLAY", "TMPDIR", "MAIL", "TMUX", "STY"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR"),
    *("MASTER_PORT", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
})  # fmt: skip
_OF_A_HOST_PREFIXES = (
    "FLYBALL_",
    "PET_",
    "TORCHELASTIC_",
    "SLURM_",
    "SSH_",
    "XDG_",
    "DBUS_",
    "LS_COLORS",
    "INVOCATION_",
)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_WORD = re.compile(
    r"(?:^|_)(?:PASS|PAT|AUTH|DSN|COOKIE)(?:_|$)"
    r"|TOKEN(?!IZER|S(?:_|$))|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|^AWS_",
    re.IGNORECASE,
)
_PASSWORD_IN_ADDRESS = re.compile(r"://[^/@\s]*:[^/@\s]+@")


class Forwarded(NamedTuple):
    """Variables for the workers of other hosts."""

    plain: Mapping[str, str]
    secret: Mapping[str, str]  # seal these before they leave this process


def is_secret(name: str, value: str) -> bool:
    """Whether a variable counts as secret: by its name, or because of a password in an address."""
    return bool(_SECRET_WORD.search(name) or _PASSWORD_IN_ADDRESS.search(value))


def explicit(environ: Mapping[str, str], words: Sequence[str]) -> dict[str, str]:
    """The variables that `--env NAME` and `--env NAME=VALUE` name. Raises UsageError."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if word in (ALL, NONE):
            continue
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"--env {name} is not the name of a variable.", hint="for example --env NAME, or --env NAME=VALUE"
            )
        if name.startswith("FLYBALL_"):
            raise UsageError(f"--env {name}: Flyball sets these itself.", hint="leave it out")
        if not equals and name not in environ:
            raise UsageError(f"--env {name}: this variable is not set.", hint=f"export it, or give --env {name}=VALUE")
        if equals and is_secret(name, value):
            raise UsageError(
                f"--env {name}=...: do not put a secret on the command line: `ps` shows it, and shells keep it.",
                hint=f"export {name}, and give --env {name}",
            )
        found[name] = value if equals else environ[name]
    return found


def select(environ: Mapping[str, str], words: Sequence[str]) -> Forwarded:
    """The forwarded variables: the allow-list (or ALL, or NONE), then the named ones. Raises UsageError."""
    named = explicit(environ, words)
    if ALL in words and NONE in words:
        raise UsageError("--env ALL and --env NONE contradict each other.", hint="leave one of them out")
    chosen = {} if NONE in words else {n: v for n, v in environ.items() if _is_chosen(n, v, ALL in words)}
    chosen |= named
    size = 0
    for name, value in chosen.items():
        try:
            size += len(name) + len(value.encode())
        except UnicodeEncodeError:
            raise UsageError(f"The variable {name} is not valid UTF-8.", hint="unset it, or use --env NONE") from None
    if size > MAX_BYTES:
        raise UsageError(
            f"The variables for the workers have {size} bytes, more than {MAX_BYTES}.",
            hint="use --env NONE, and name the ones you need",
        )
    secret = {name: value for name, value in chosen.items() if is_secret(name, value)}
    return Forwarded({name: value for name, value in chosen.items() if name not in secret}, secret)


def _is_chosen(name: str, value: str, is_all: bool) -> bool:
    if name in _OF_A_HOST or name.startswith(_OF_A_HOST_PREFIXES) or not _NAME.fullmatch(name):
        return False
    if is_all:
        return True
    allowed = name in ALLOWED or name.startswith(ALLOWED_PREFIXES)
    return allowed and not _SECRET_WORD.search(name)  # an address with a password is needed; it gets sealed
