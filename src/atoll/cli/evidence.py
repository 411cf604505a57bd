"""Check a file that an auditor kept of a payload that is not the average.

In a run with `sync.audits` and certificates each site signs what it contributes and what it averages. An auditor that
finds a payload wrong keeps these words and the contributions in its home, and its log names the file. Whoever has the
run's root and the file can compute the same, without the coordinator, later too: what it prints, the reducer has
signed. Exit code 0: it shows that the reducer's payload is wrong; 7: it does not.

examples:
  atoll evidence ~/atoll/evidence/commit-7-chunk-3.pb --root ~/atoll/trust/roots.pem
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.protocol.trust.certificates import Certificate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="in the folder `evidence` of a site's home")
    parser.add_argument(
        "--root", type=Path, required=True, metavar="PEM", help="the run's root: roots.pem of a site, or root.pem"
    )


def run(args: argparse.Namespace) -> int:
    from atoll.node.dataplane import false_payload
    from atoll.protocol.errors import HostError, InvalidMessage, StateError

    try:
        if args.file.stat().st_size > false_payload.MAX_FILE_BYTES:
            raise StateError(f"{args.file} is larger than {false_payload.MAX_FILE_BYTES} bytes, which no such file is")
        roots = _roots(args.root)
        print(false_payload.check(false_payload.read(args.file.read_bytes()), roots))
    except OSError as error:
        raise HostError(f"{error.filename}: {error.strerror}") from None
    except InvalidMessage as error:
        raise StateError(f"{args.file} shows nothing against a reducer: {error}") from None
    return 0


def _roots(path: Path) -> Sequence[Certificate]:
    """Raises ConfigError, OSError."""
    from atoll.protocol.errors import ConfigError, InvalidMessage
    from atoll.protocol.trust import certificates

    try:
        return certificates.from_pem(path.read_bytes())
    except InvalidMessage as error:
        raise ConfigError(f"--root {path} is no root of a run: {error}") from None
