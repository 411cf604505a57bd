"""What is installed: a wheel holds real files, and everything that is read at run time."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    # A copy, because setuptools leaves build/ and egg-info behind.
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for name in ("src", "node", "protocol", "coordinator"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    result = subprocess.run([*command, "-w", str(out), str(source)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return zipfile.ZipFile(next(out.glob("atoll-*.whl")))


def test_the_wheel_holds_what_the_repository_has(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for folder in ("node", "protocol", "coordinator"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".proto", ".pyi", ".sql", ".html"):
                assert f"atoll/{path.relative_to(ROOT)}" in names
    assert "atoll/py.typed" in names
    assert "atoll/cli/main.py" in names


def test_the_wheel_has_data_of_each_kind_and_no_links(wheel: zipfile.ZipFile) -> None:
    for suffix in (".proto", ".sql", ".html", "py.typed"):
        assert any(name.endswith(suffix) for name in wheel.namelist()), suffix
    for info in wheel.infolist():
        assert (info.external_attr >> 16) & 0o170000 in (0, 0o100000), f"{info.filename} is not a plain file"
    assert wheel.read("atoll/protocol/errors.py") == (ROOT / "protocol" / "errors.py").read_bytes()
    roots = {name.split("/")[0] for name in wheel.namelist()}
    assert {root for root in roots if not root.endswith(".dist-info")} == {"atoll"}
