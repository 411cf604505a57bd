"""The last release, against which this one is tested: its protocol as it is kept in tests/released, and its code out of
git's history.

    python -m tests.harness.released COMMIT      keeps that commit's protocol from now on
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "released"
IMAGE = FOLDER / "protocol.binpb"
RECORD = FOLDER / "release.toml"
BUF = Path(sys.executable).with_name("buf")
CODE = ("src", "node", "protocol", "coordinator", "tests/workers/plain_worker.py")
VERSION = re.compile(r"^PROTOCOL_VERSION = (\d+)$", re.MULTILINE)
HOSTS_VERSION = re.compile(r"^HOSTS_VERSION = (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    commit: str
    protocol_version: int
    hosts_version: int
    """Of what hosts of a site say to each other; 0: it had none."""


@dataclass(frozen=True, slots=True)
class Code:
    """Of a release, in a folder of its own."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Of processes that are to run it; those that they start do too."""
        return {"PYTHONPATH": str(self.folder / "src")}

    @property
    def worker(self) -> list[str]:
        return [sys.executable, str(self.folder / "tests" / "workers" / "plain_worker.py")]

    @contextmanager
    def speaking(self, protocol_version: int) -> Iterator[None]:
        """As if it were of another version of the protocol."""
        path = self.folder / "protocol" / "__init__.py"
        before = path.read_text()
        text, times = VERSION.subn(f"PROTOCOL_VERSION = {protocol_version}", before)
        assert times == 1
        path.write_text(text)
        try:
            yield
        finally:
            path.write_text(before)


def last_release() -> Release:
    return Release(**tomllib.loads(RECORD.read_text()))


def code_of(commit: str, folder: Path) -> Code:
    """Skips the test where git has no such commit."""
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", commit, *CODE]
    try:
        packed = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no git, so no code of the last release")
    if packed.returncode:
        pytest.skip(f"no code of the last release here, {commit}: {packed.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as tar:
        tar.extractall(folder, filter="data")
    _take_compiled(folder)
    return Code(folder)


def _take_compiled(folder: Path) -> None:
    """Kernels of files that have not changed since are not compiled anew: a quarter of a minute. numba knows a file by
    its time and size."""
    for compiled in (path for top in CODE[1:4] for path in (ROOT / top).rglob("__pycache__/*.nb?")):
        source = compiled.parents[1] / f"{compiled.name.partition('.')[0]}.py"
        theirs = folder / source.relative_to(ROOT)
        if theirs.is_file() and theirs.read_bytes() == source.read_bytes():
            shutil.copystat(source, theirs)
            place = folder / compiled.relative_to(ROOT)
            place.parent.mkdir(exist_ok=True)
            shutil.copyfile(compiled, place)


def image_of(code: Code) -> bytes:
    """The protocol of that code, as buf compares it."""
    command = [str(BUF), "build", str(code.folder), "--exclude-source-info", "-o", "-#format=binpb"]
    (code.folder / "buf.yaml").write_bytes((ROOT / "buf.yaml").read_bytes())
    return subprocess.run(command, capture_output=True, check=True).stdout


def hosts_version_of(folder: Path) -> int:
    """Of the code there."""
    found = HOSTS_VERSION.search((folder / "node" / "host_protocol.py").read_text())
    return int(found[1]) if found is not None else 0


def keep(commit: str, folder: Path) -> None:
    named = subprocess.run(["git", "-C", str(ROOT), "rev-parse", commit], capture_output=True, text=True, check=True)
    code = code_of(named.stdout.strip(), folder)
    found = VERSION.search((folder / "protocol" / "__init__.py").read_text())
    assert found is not None
    of_hosts = hosts_version_of(folder)
    IMAGE.write_bytes(image_of(code))
    head = "".join(line for line in RECORD.read_text().splitlines(keepends=True) if line.startswith("#"))
    RECORD.write_text(
        f'{head}commit = "{named.stdout.strip()}"\nprotocol_version = {found[1]}\nhosts_version = {of_hosts}\n'
    )


def main(argv: list[str]) -> int:
    import tempfile

    (commit,) = argv
    with tempfile.TemporaryDirectory() as folder:
        keep(commit, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
