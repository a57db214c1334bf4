"""A training script that attacks its daemon and its engine through everything that it shares with them: `MODE SECONDS`.

It harms its own files only, as another submitter's job on the same host would be able to.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import shutil
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

import flyball

job = flyball.attach()
model = torch.nn.Linear(64, 64)
start = job.restore({"model": model})
for step in range(start, start + 8):
    time.sleep(0.02)
    job.step(step)
    job.save(step, {"model": model})

MODE, SECONDS = sys.argv[1], float(sys.argv[2])
NAME = os.environ["FLYBALL_JOB"]
PREFIX = os.environ["FLYBALL_SHM_PREFIX"]
STATE = Path(os.environ["FLYBALL_ENGINE_NOTIFY"]).parent
ERROR_FILE = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
MINE = [path for path in Path(PREFIX).parent.glob(f"{Path(PREFIX).name}.{NAME}.*")]
BEACONS = [path for path in MINE if path.name.endswith(".beacon")]
CONTROLS = [path for path in MINE if path.name.endswith(".ctl")]
SLOTS = [path for path in MINE if path.name[:-1].endswith(".s")]
LOGS = list((STATE / "logs" / NAME).glob("g*/rank0.log"))
random.seed(3)
until_s = time.monotonic() + SECONDS


def over() -> bool:
    return time.monotonic() >= until_s


def wait() -> None:
    while not over():
        time.sleep(0.02)


def scribble(paths: list[Path]) -> None:
    while not over():
        for path in paths:
            size = path.stat().st_size
            with path.open("r+b") as file:
                for _ in range(100):
                    file.seek(random.randrange(max(1, min(size, random.choice((4096, size))))))
                    file.write(os.urandom(random.choice((1, 4, 8, 64))))
        time.sleep(0.02)


def shorten(paths: list[Path]) -> None:
    while not over():
        for path in paths:
            os.truncate(path, random.choice((0, 100, 4096)))
            os.truncate(path, random.choice((0, 8192, path.stat().st_size)))
        time.sleep(0.01)
    for path in paths:
        os.truncate(path, 0)


def replace(paths: list[Path], make: Callable[[Path], object]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
        make(path)


def huge(path: Path) -> None:
    path.write_bytes(b'{"message":"')
    os.truncate(path, 6 << 30)


def notify() -> None:
    address = os.environ["FLYBALL_ENGINE_NOTIFY"]
    news = (
        b'{"job":"quiet","rank":0,"step":99999999}',
        b'{"kind":"captured","job":"quiet","generation":1,"rank":0,"step":999999}',
        b"[" * 5000,
    )
    for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        try:
            with socket.socket(socket.AF_UNIX, kind) as sock:
                sock.connect(address)
                while not over():
                    try:
                        sock.send(random.choice((os.urandom(random.randint(0, 200)), *news)))
                    except OSError:
                        time.sleep(0.01)
        except OSError as error:
            print(kind, error, flush=True)


def engine_socket() -> None:
    held = []
    bodies = (
        os.urandom(300),
        struct.pack("<I", 2**31) + b"x",
        b"{" * 3000,
        struct.pack("<I", 20) + b'{"type":"forget_job"}',
        b"",
    )
    while not over():
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect(str(STATE / "engine.sock"))
            sock.settimeout(0.5)
            sock.sendall(random.choice(bodies))
        except OSError as error:
            print(error, flush=True)
            time.sleep(0.01)
        if len(held) < 200:
            held.append(sock)  # half-sent, and open
        else:
            sock.close()


def conditions() -> None:
    folder = STATE / "conditions"
    folder.mkdir(exist_ok=True)
    os.mkfifo(folder / "a.json")
    (folder / "b.json").write_text("[" * 500_000)
    huge(folder / "c.json")
    (folder / "d.json").symlink_to("/dev/zero")
    (folder / "e.json").symlink_to("/etc/shadow")
    (folder / "f.json").mkdir()
    for number in range(3000):
        text = f'{{"kind":"k{number}","severity":"critical","message":"m"}}'
        (folder / f"x{number}.json").write_text(text)
    wait()
    shutil.rmtree(folder)


def flood() -> None:
    line = b"x" * 1_000_000 + b"\n"
    for _ in range(300):
        os.write(1, line)


def orphans() -> None:
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            time.sleep(30)
            os._exit(0)
    os._exit(3)


def other_names() -> None:
    """Names of the process and of an open file that are no text, while its beacon stands still."""
    ctypes.CDLL(None).prctl(15, b"\xff) Z \xfe(", 0, 0, 0)
    path = os.fsencode(STATE / "logs" / NAME) + b"/\xff\xfe"
    os.mkfifo(path)
    opened = os.open(path, os.O_RDWR)
    threading.Timer(SECONDS, lambda: os.write(opened, b"!")).start()
    os.read(opened, 1)


def beside_beacons(make: Callable[[Path], object]) -> None:
    for path in BEACONS:
        for suffix in (".seen", ".stacks"):
            replace([Path(f"{path}{suffix}")], make)
    for step in range(start + 8, start + 50):
        job.step(step)
        time.sleep(0.02)
    wait()


def lock_controls() -> None:
    held = [path.open("r+b") for path in CONTROLS]
    for file in held:
        with_lock = threading.Thread(target=fcntl.flock, args=(file, fcntl.LOCK_EX), daemon=True)
        with_lock.start()
    wait()
    os._exit(3)


def next_generation() -> None:
    """What the next generation's workers will be given is there already, and is something else."""
    log = LOGS[0].parent.parent / "g2" / "rank0.log"
    log.parent.mkdir()
    os.mkfifo(log)
    ERROR_FILE.with_name("g2-r0.json").mkdir()
    Path(f"{PREFIX}.{NAME}.g2.r0.beacon").mkdir()
    os._exit(3)


ATTACKS: dict[str, Callable[[], object]] = {
    "beacon": lambda: scribble(BEACONS),
    "beacontrunc": lambda: shorten(BEACONS),
    "ctl": lambda: scribble(CONTROLS),
    "ctltrunc": lambda: shorten(CONTROLS),
    "slots": lambda: scribble(SLOTS),
    "slottrunc": lambda: shorten(SLOTS),
    "notify": notify,
    "engsock": engine_socket,
    "logfifo": lambda: (replace(LOGS, os.mkfifo), wait()),
    "errfifo": lambda: (replace([ERROR_FILE], os.mkfifo), os._exit(3)),
    "errhuge": lambda: (huge(ERROR_FILE), os._exit(3)),
    "errdeep": lambda: (ERROR_FILE.write_text("[" * 2_000_000), os._exit(3)),
    "logfifoexit": lambda: (replace(LOGS, os.mkfifo), os._exit(3)),
    "condfifo": conditions,
    "logflood": flood,
    "fork": orphans,
    # beyond those that were found
    "names": other_names,
    "seenfifo": lambda: beside_beacons(os.mkfifo),
    "seenhuge": lambda: beside_beacons(huge),
    "segmentfifo": lambda: (replace([*BEACONS, *CONTROLS, *SLOTS], os.mkfifo), wait()),
    "ctllock": lock_controls,
    "next": next_generation,
}
signal.signal(signal.SIGBUS, signal.SIG_DFL)
print("attack", MODE, flush=True)
ATTACKS[MODE]()
print("end", flush=True)
