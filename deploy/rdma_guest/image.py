"""What a guest boots from: Debian packages, downloaded and unpacked into a folder, and an initramfs made of them.

Nothing is installed on this host, and no right but that to run apt-get is needed.
"""

from __future__ import annotations

import fcntl
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

KERNEL = r"linux-image-6\.1\.\d+-\d+-amd64"
PACKAGES = (
    "busybox-static",
    "ibverbs-providers",
    "iproute2",  # `rdma link add`
    "libbpf1",
    "libelf1",
    "libibumad3",
    "libibverbs1",
    "libmnl0",
    "libnl-3-200",
    "libnl-route-3-200",
    "libpci3",
    "librdmacm1",
    "perftest",
    "python3-pyverbs",
)
# rdma_rxe asks for "crc32" by name; crc32_generic is the variant that runs on every CPU model.
MODULES = ("virtio_pci", "virtio_net", "9pnet_virtio", "9p", "overlay", "crc32_generic", "rdma_ucm", "rdma_rxe")
DOWNLOAD_DEADLINE_S = 300.0
MERGED_FOLDERS = ("bin", "sbin", "lib", "lib64")  # links into /usr on the host; packages still name some of them
HERE = Path(__file__).parent


class Unavailable(Exception):
    """This machine cannot run a guest; the text is the reason, in one line."""


@dataclass(frozen=True)
class GuestFiles:
    """Unpacked packages: the kernel, its modules, and what is laid over the host's root."""

    kernel: Path
    modules: Path
    busybox: Path
    packages: Path


def guest_files(cache: Path) -> GuestFiles:
    """Download and unpack what is not in the folder `cache` yet. Raises Unavailable with the reason."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:  # somebody else may be downloading
        fcntl.flock(lock, fcntl.LOCK_EX)
        files, wanted = cache / "files", " ".join(PACKAGES)
        made_of = cache / "made-of"
        if not (made_of.exists() and made_of.read_text() == wanted):
            new = cache / "new"
            shutil.rmtree(new, ignore_errors=True)
            _download_and_unpack(new)
            shutil.rmtree(files, ignore_errors=True)
            new.rename(files)
            made_of.write_text(wanted)
    (kernel,) = (files / "kernel" / "boot").glob("vmlinuz-*")
    (modules,) = (files / "kernel" / "lib" / "modules").iterdir()
    return GuestFiles(kernel, modules, files / "packages" / "usr" / "bin" / "busybox", files / "packages")


def _download_and_unpack(folder: Path) -> None:
    for tool in ("apt-get", "apt-cache", "dpkg"):
        if shutil.which(tool) is None:
            raise Unavailable(f"no {tool}: the kernel and pyverbs come as Debian packages")
    debs = folder / "debs"
    debs.mkdir(parents=True)
    try:
        kernel = _download(debs)
    except Unavailable:
        _run(["apt-get", "update", "-qq"], folder)  # the lists may be old or missing
        kernel = _download(debs)
    print(f"unpacking {kernel} and {len(PACKAGES)} packages", flush=True)
    for deb in sorted(debs.glob("*.deb")):
        part = "kernel" if deb.name.startswith("linux-image") else "packages"
        _run(["dpkg", "-x", str(deb), part], folder)
    packages = folder / "packages"
    for name in MERGED_FOLDERS:
        if (packages / name).is_dir():  # a folder of this name would hide the host's link
            shutil.copytree(packages / name, packages / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(packages / name)
    shutil.rmtree(debs)


def _download(folder: Path) -> str:
    known = _run(["apt-cache", "pkgnames", "linux-image-6.1."], folder).split()
    kernels = [name for name in known if re.fullmatch(KERNEL, name)]
    if not kernels:
        raise Unavailable("apt-cache knows no linux-image-6.1.*-amd64")
    kernel = max(kernels, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
    print(f"downloading {kernel} and {len(PACKAGES)} packages", flush=True)
    _run(["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", kernel, *PACKAGES], folder)
    return kernel


def _run(command: list[str], folder: Path) -> str:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=DOWNLOAD_DEADLINE_S
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"`{shlex.join(command[:2])}` took more than {DOWNLOAD_DEADLINE_S:.0f} s") from None
    if done.returncode:
        why = (done.stderr.strip() or "no message").splitlines()[-1]
        raise Unavailable(f"`{shlex.join(command[:2])}` failed: {why}")
    return done.stdout


def initramfs(files: GuestFiles, settings: Mapping[str, str]) -> bytes:
    """A cpio archive: busybox, the modules in the order in which they are loaded, and `settings` as shell variables."""
    modules = modules_in_order(files.modules, MODULES)
    lines = "".join(f"{name}={shlex.quote(value)}\n" for name, value in settings.items())
    entries = [
        ("busybox", 0o100755, files.busybox.read_bytes()),
        ("init", 0o100755, (HERE / "init.sh").read_bytes()),
        ("start.sh", 0o100755, (HERE / "start.sh").read_bytes()),
        ("settings", 0o100600, lines.encode()),
        ("modules", 0o040755, b""),
        ("modules/order", 0o100644, "".join(f"{path.name}\n" for path in modules).encode()),
        *((f"modules/{path.name}", 0o100644, path.read_bytes()) for path in modules),
    ]
    return b"".join(_cpio(*entry) for entry in [*entries, ("TRAILER!!!", 0, b"")])


def _cpio(name: str, mode: int, data: bytes) -> bytes:
    """One file in the "newc" format that the kernel reads."""
    fields = [0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0]
    head = b"070701" + "".join(f"{field:08x}" for field in fields).encode() + name.encode() + b"\0"
    return head + b"\0" * (-len(head) % 4) + data + b"\0" * (-len(data) % 4)


def modules_in_order(folder: Path, names: tuple[str, ...]) -> list[Path]:
    """The files of these kernel modules and of all that they need, needed ones first.

    A package holds no modules.dep: depmod makes it when a kernel is installed. So each module is asked what it needs.
    """
    by_name = {_module_name(path.name): path for path in folder.rglob("*.ko")}
    built_in = {_module_name(line.rpartition("/")[2]) for line in (folder / "modules.builtin").read_text().splitlines()}
    ordered: dict[str, Path] = {}

    def add(name: str) -> None:
        if name in ordered or name in built_in:
            return
        if name not in by_name:
            raise Unavailable(f"the kernel {folder.name} has no module {name}")
        needs = re.search(rb"\0depends=([^\0]*)\0", by_name[name].read_bytes())
        for needed in needs.group(1).decode().split(",") if needs else ():
            if needed:
                add(_module_name(needed))
        ordered[name] = by_name[name]

    for name in names:
        add(name)
    return list(ordered.values())


def _module_name(file_name: str) -> str:
    return file_name.removesuffix(".ko").replace("-", "_")
