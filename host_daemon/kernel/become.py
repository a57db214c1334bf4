"""Becomes another user, and then a program: `python -I -S become.py UID GID GROUPS ENVIRONMENT WORD...`.

It runs as root, so it imports nothing of a job's: its environment is empty, and the program's is in the open file
ENVIRONMENT. Only then the job's variables count, PYTHONPATH and LD_PRELOAD among them.
"""

import json
import os
import sys


def main() -> None:
    uid, gid, groups, descriptor = sys.argv[1:5]
    with os.fdopen(int(descriptor), "rb") as file:
        environment = json.load(file)
    os.setgroups([int(group) for group in groups.split(",") if group])
    os.setresgid(int(gid), int(gid), int(gid))
    os.setresuid(int(uid), int(uid), int(uid))
    os.umask(0o077)
    os.execve(sys.argv[5], sys.argv[5:], environment)


if __name__ == "__main__":
    main()
