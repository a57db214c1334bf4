"""A container engine of the test's own: dockerd in process, mount and network namespaces of its own, so that its end
ends every container, and nothing reaches this machine's network. Base images are made of Debian packages."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).parents[2]
STAND_IN = Path(__file__).parent / "stand_in"
PACKAGES = ("python3-venv", "mariadb-server-core", "mariadb-client-core", "redis-server")
RELEASE = "bookworm"  # its Python is the 3.11 of the real base image, its MariaDB the 10.11 of the real one
COMPOSE_RELEASE = "trixie"  # the first with the second version of docker compose
WHEELS_PORT = 8480
START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 30.0
FETCH_DEADLINE_S = 600.0
LOOK_INTERVAL_S = 0.25

# In the namespaces: loopback, the wheels for `docker build`, and dockerd. The shell is their first process.
IN_MEMORY = "mount -t tmpfs -o size=10g flyball {folder}/data"  # 4 GB, written and removed once, need no disk
PLENTY_BYTES = 14 << 30
INSIDE = """
set -eu
ip link set lo up
mkdir -p {folder}/data
{in_memory}
{python} -m http.server {port} --bind 0.0.0.0 --directory {wheels} >{folder}/wheels.log 2>&1 &
{dockerd} --host unix://{folder}/docker.sock --data-root {folder}/data --exec-root {folder}/exec \
  --pidfile {folder}/dockerd.pid --cgroup-parent /{name} --default-ulimit nofile=1024:20000 \
  --shutdown-timeout 5 {flags} &
wait $!
"""


class CannotRun(Exception):
    """This machine cannot run the test, and why."""


def until(what: str, look: Callable[[], Any], deadline_s: float, explain: Callable[[], str] = str) -> Any:  # noqa: ANN401 - what `look` returned
    end = time.monotonic() + deadline_s
    while not (found := look()):
        assert time.monotonic() < end, f"not within {deadline_s:.0f} s: {what}\n{explain()}"
        time.sleep(LOOK_INTERVAL_S)
    return found


def run(*words: object, deadline_s: float, **given: Any) -> str:  # noqa: ANN401 - of subprocess.run
    """Run a command; returns its stdout. Fails with its output."""
    try:
        done = subprocess.run(
            [str(word) for word in words], capture_output=True, text=True, timeout=deadline_s, check=False, **given
        )
    except subprocess.TimeoutExpired as late:
        raise AssertionError(f"not within {deadline_s:.0f} s: {words}\n{late.stdout!r}\n{late.stderr!r}") from None
    assert done.returncode == 0, f"{' '.join(map(str, words))}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def check_machine() -> None:
    """Raise CannotRun if this machine has not what the engine needs."""
    if os.geteuid() != 0:
        raise CannotRun("only root may start a container engine")
    needed = [
        "docker",
        "dockerd",
        "containerd",
        "runc",
        "iptables",
        "mmdebstrap",
        "ip",
        "unshare",
        "nsenter",
        "setpriv",
        "apt-get",
    ]
    missing = [name for name in needed if shutil.which(name) is None]
    if missing:
        raise CannotRun(f"not installed: {', '.join(missing)} (apt-get install docker.io mmdebstrap iproute2)")
    trial = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "ip", "link", "set", "lo", "up"],
        capture_output=True,
        text=True,
        timeout=START_DEADLINE_S,
        check=False,
    )
    if trial.returncode:
        raise CannotRun(f"namespaces cannot be made here: {trial.stderr.strip()}")


class ContainerEngine:
    """Starts on creation. `close` ends it with every container, and removes what it kept."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="flyball-compose-"))
        self.wheels = self.folder / "wheels"
        self.wheels.mkdir()
        self.env = {**os.environ, "DOCKER_HOST": f"unix://{self.folder}/docker.sock", "HOME": str(self.folder)}
        self._process: subprocess.Popen[bytes] | None = None
        self.pid = 0  # of the first process in the namespaces

    def start(self) -> None:
        """Raises CannotRun with dockerd's reason."""
        for flags in ("", "--storage-driver vfs"):
            if self._starts(flags):
                return
            reason = self._log_end()
            self._end()
        raise CannotRun(f"dockerd does not start here: {reason}")

    def _starts(self, flags: str) -> bool:
        script = INSIDE.format(
            python=sys.executable,
            port=WHEELS_PORT,
            wheels=self.wheels,
            dockerd=shutil.which("dockerd"),
            folder=self.folder,
            name=self.folder.name,
            in_memory=IN_MEMORY.format(folder=self.folder) if psutil.virtual_memory().available > PLENTY_BYTES else "",
            flags=flags,
        )
        # Nothing outlives this test, however it ends.
        words = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--mount", "--pid", "--fork", "--kill-child"]
        words += ["--mount-proc", "bash", "-c", script]
        with (self.folder / "dockerd.log").open("wb") as log:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=self.env
            )
        end = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < end and self._process.poll() is None:
            trial = ["docker", "version"]
            if not subprocess.run(trial, env=self.env, capture_output=True, timeout=30, check=False).returncode:
                self.pid = psutil.Process(self._process.pid).children()[0].pid
                return True
            time.sleep(LOOK_INTERVAL_S)
        return False

    def _log_end(self) -> str:
        return (self.folder / "dockerd.log").read_text(errors="replace")[-1500:]

    def close(self) -> None:
        self._end()
        groups = [path for path in Path("/sys/fs/cgroup").glob(f"*/{self.folder.name}") if path.is_dir()]
        until("the control groups are gone", lambda: all(map(removed, groups)), START_DEADLINE_S)
        run("rm", "--recursive", "--force", self.folder, deadline_s=FETCH_DEADLINE_S)

    def _end(self) -> None:
        """dockerd first, in peace; then the namespace's first process, with which the kernel ends all others."""
        process, self._process = self._process, None
        if process is None:
            return
        for daemon in [p for p in psutil.Process(process.pid).children(recursive=True) if p.name() == "dockerd"]:
            daemon.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_DEADLINE_S)

    # --- what it runs

    def docker(self, *words: object, deadline_s: float = 120.0) -> str:
        return run("docker", *words, deadline_s=deadline_s, env=self.env)

    def inside(self, *words: object, deadline_s: float = 60.0) -> str:
        """Run a command in the engine's network, as a user of that machine."""
        return run("nsenter", "--target", self.pid, "--net", *words, deadline_s=deadline_s, env=self.env)


def removed(group: Path) -> bool:
    """Whether a control group is gone, after trying to remove it with those in it."""
    try:
        for one in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
            one.rmdir()
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # a process in it has not ended yet
        return False
    return True


def fetch_wheels(folder: Path) -> None:
    """Everything that the image needs from pip, by this machine's own configuration of pip."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    # Debian's Python 3.11.2 is older than the base image's, and needs one package more.
    needs = [*project["project"]["dependencies"], *project["build-system"]["requires"], "async-timeout"]
    run(
        *(sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:"),
        *("--constraint", ROOT / "constraints.txt", "--dest", folder, *needs),
        deadline_s=FETCH_DEADLINE_S,
    )


def debian_mirror() -> str:
    """Where this machine gets Debian's packages from."""
    list_them = ("apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME)")
    if not run(*list_them, deadline_s=60.0).strip():
        run("apt-get", "update", deadline_s=FETCH_DEADLINE_S)
    found = run(*list_them, deadline_s=60.0).splitlines()
    mirror = next((line.split()[0] for line in found if line.split()[1:] == [RELEASE]), "")
    if not mirror:
        raise CannotRun(f"apt has no source of Debian {RELEASE}'s packages")
    return mirror


def make_base(tar: Path) -> None:
    """One root file system of Debian packages for all the base images in the file."""
    hooks = (
        f"--customize-hook=upload {STAND_IN}/entrypoint /usr/local/bin/entrypoint",
        f"--customize-hook=upload {STAND_IN}/healthcheck.sh /usr/local/bin/healthcheck.sh",
        '--customize-hook=chroot "$1" chmod 755 /usr/local/bin/entrypoint /usr/local/bin/healthcheck.sh',
        '--customize-hook=ln -s /usr/bin/python3 "$1"/usr/local/bin/python',
        '--customize-hook=chroot "$1" groupadd --gid 999 mysql',
        '--customize-hook=chroot "$1" useradd --uid 999 --gid 999 --home-dir /var/lib/mysql mysql',
        '--customize-hook=chroot "$1" install -d -o 999 -g 999 /var/lib/mysql /run/mysqld /data',
    )
    slim = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale")]
    run(
        *(
            "mmdebstrap",
            "--variant=apt",
            "--mode=root",
            '--aptopt=Acquire::Languages "none"',
            "--dpkgopt=force-unsafe-io",
        ),
        *(*slim, f"--include={','.join(PACKAGES)}", *hooks, RELEASE, tar, debian_mirror()),
        deadline_s=FETCH_DEADLINE_S,
    )


def fetch_compose(folder: Path) -> Path:
    """Debian's package of docker compose's second version: the program, without installing it."""
    (folder / "lists" / "partial").mkdir(parents=True)
    (folder / "cache" / "archives" / "partial").mkdir(parents=True)
    keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (folder / "sources.list").write_text(f"deb [signed-by={keys}] {debian_mirror()} {COMPOSE_RELEASE} main\n")
    apart = [
        *("-o", f"Dir::Etc::SourceList={folder}/sources.list", "-o", "Dir::Etc::SourceParts=/dev/null"),
        *("-o", f"Dir::State::Lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache"),
        *("-o", "APT::Sandbox::User=root", "-o", "Acquire::Languages=none"),
    ]
    run("apt-get", *apart, "update", deadline_s=FETCH_DEADLINE_S)
    run("apt-get", *apart, "download", "docker-compose", deadline_s=FETCH_DEADLINE_S, cwd=folder)
    run("dpkg", "-x", next(folder.glob("docker-compose_*.deb")), folder / "unpacked", deadline_s=FETCH_DEADLINE_S)
    return next(
        path for path in (folder / "unpacked").rglob("docker-compose") if path.is_file() and os.access(path, os.X_OK)
    )


def base_names() -> list[str]:
    """The base images of everything that starts without a profile, from the files themselves."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"].values()
    named = {service["image"] for service in services if "profiles" not in service}
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    base = next(line.split("=", 1)[1] for line in dockerfile.splitlines() if line.startswith("ARG BASE="))
    return sorted(named - {"flyball:local"} | {base})


def import_base(engine: ContainerEngine, tar: Path, names: Sequence[str]) -> None:
    changes = ('ENTRYPOINT ["entrypoint"]', 'CMD ["bash"]', "ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    words = [word for change in changes for word in ("--change", change)]
    engine.docker("import", *words, tar, names[0], deadline_s=FETCH_DEADLINE_S)
    for name in names[1:]:
        engine.docker("tag", names[0], name)
