"""A PKI of one's own: authorities that trustme has made, as the folder that `--trust` names."""

from __future__ import annotations

from pathlib import Path

import trustme


def write_authority(folder: Path, authority: trustme.CA) -> None:
    folder.mkdir(mode=0o700)
    authority.cert_pem.write_to_path(str(folder / "root.pem"))
    (folder / "root.key").touch(mode=0o600)
    authority.private_key_pem.write_to_path(str(folder / "root.key"))
