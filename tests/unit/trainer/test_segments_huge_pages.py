from __future__ import annotations

import pytest

from ckpt_engine.slots.segment_files import why_no_huge_pages

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
25 22 0:24 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw,size=1g,inode64
30 22 0:40 / /mnt/huge rw - tmpfs none rw,size=1g,huge=always
31 22 0:41 / /mnt/with\\040space rw - tmpfs none rw,huge=advise
32 22 0:42 / /mnt/hugest rw - tmpfs none rw,huge=never
33 30 0:43 / /mnt/huge rw - tmpfs none rw,huge=within_size
34 22 0:44 / /mnt/größe rw - tmpfs  rw,huge=always
"""


@pytest.mark.parametrize(
    ("directory", "switch", "reason"),
    [
        ("/mnt/huge", "never", ""),  # the switch is for shared memory without a mount
        ("/mnt/huge/deep/er", "never", ""),
        ("/mnt/with space", "never", ""),
        ("/mnt/größe", "never", ""),  # and without a source
        ("/mnt/huge", "deny", "denies"),
        ("/mnt/huge", "", "this kernel"),
        ("/mnt/hugest", "never", "remount,huge=advise /mnt/hugest"),
        ("/dev/shm", "never", "remount,huge=advise /dev/shm"),
        ("/dev/shm", "force", ""),
        ("/home", "always", "ext4, not on a tmpfs"),
    ],
)
def test_the_mount_decides(directory: str, switch: str, reason: str) -> None:
    found = why_no_huge_pages(directory, MOUNTS, switch)
    assert (reason in found) if reason else found == ""
