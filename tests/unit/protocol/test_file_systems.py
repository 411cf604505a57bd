"""On which file system a path lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.protocol.file_systems import kind_among, kind_of

MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
tmpfs /home/me/fast tmpfs rw 0 0
server:/x /with\\040space cifs rw 0 0
server:/y /mnt/Größe nfs4 rw 0 0
server:/z /mnt/\udce4 nfs rw 0 0
tmpfs /mnt/a\\134x41\\011b ramfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib", "ext4"),
        ("/home/me", "nfs4"),
        ("/home/me/fast/run", "tmpfs"),
        ("/homeless", "ext4"),
        ("/with space", "cifs"),
        ("/mnt/Größe/run", "nfs4"),
        ("/mnt/\udce4", "nfs"),  # a byte that is no UTF-8
        ("/mnt/a\\x41\tb", "ramfs"),
    ],
)
def test_the_file_system_of_a_path(path: str, kind: str) -> None:
    assert kind_among(Path(path), MOUNTS) == kind


def test_the_kind_of_a_folder_that_is_not_there_yet_is_that_of_those_above_it(tmp_path: Path) -> None:
    assert kind_of(tmp_path / "a" / "b") == kind_of(tmp_path) != ""
    assert kind_of(Path("/proc/self/fd/not there")) == "proc"
