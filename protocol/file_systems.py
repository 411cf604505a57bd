"""What kind of file system a path lies on."""

from __future__ import annotations

import os
import re
from pathlib import Path

NETWORK = (
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "glusterfs", "lustre", "beegfs", "gpfs", "fuse.sshfs",
    "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.gcsfuse", "ncpfs", "ocfs2",
)  # fmt: skip
IN_MEMORY = ("tmpfs", "ramfs")


def kind_of(path: Path) -> str:
    """Its type; '' where that is not known. `path` need not be there yet."""
    try:
        mounts = os.fsdecode(Path("/proc/mounts").read_bytes())
    except OSError:
        return ""  # not Linux: there is no such list
    return kind_among(path.resolve(), mounts)


def kind_among(path: Path, mounts: str) -> str:
    """The same, of the text of /proc/mounts."""
    best, found = -1, ""
    for line in mounts.split("\n"):
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        # Spaces, tabs, line breaks and backslashes are written in octal, all other bytes as they are.
        mount = Path(re.sub(r"\\([0-3][0-7]{2})", lambda code: chr(int(code[1], 8)), fields[1]))
        if path.is_relative_to(mount) and len(mount.parts) >= best:
            best, found = len(mount.parts), fields[2]
    return found
