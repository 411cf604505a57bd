"""Each run of pytest sees the source as it is then, says how it ended, and is ended with what it started."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.pidfd import still_there
from tests.mutation.warm_pytest import WarmPytest

LIMIT_S = 60.0
PRODUCT = "VALUE = {value}\n"
TEST = """
import os, sys
import product

def test_it():
    assert "atoll" not in sys.modules and not any(name.startswith("tests.") for name in sys.modules)
    assert product.VALUE == 1, "another value"
"""
NAMES_ITS_FILE = """
def test_it():
    assert test_it.__code__.co_filename == __file__
"""
LEAVES_A_PROCESS = """
import subprocess

def test_it():
    with open("pid", "w") as file:
        file.write(str(subprocess.Popen(["sleep", "1000"]).pid))
"""
HANGS = """
import signal

def test_it():
    signal.pause()
"""


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmPytest]:
    found = WarmPytest()
    yield found
    found.close()


def run(warm: WarmPytest, tree: Path, limit_s: float = LIMIT_S) -> tuple[int | None, str]:
    return warm.run(tree, ["-q", "-pno:cacheprovider", "test_it.py"], limit_s)


def test_a_run_sees_the_source_as_it_is_then(warm: WarmPytest, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TEST)
    product = tmp_path / "product.py"
    for number, (value, code, said) in enumerate([(1, 0, "1 passed"), (2, 1, "another value"), (1, 0, "1 passed")]):
        product.write_text(PRODUCT.format(value=value))
        os.utime(product, (number, number))
        found, output = run(warm, tmp_path)
        assert found == code, output
        assert said in output


def test_what_was_compiled_elsewhere_names_the_file_that_it_is_in(warm: WarmPytest, tmp_path: Path) -> None:
    first, copy = tmp_path / "first", tmp_path / "copy"
    first.mkdir()
    (first / "test_it.py").write_text(NAMES_ITS_FILE)
    for tree in (first, copy):
        code, output = run(warm, tree)
        assert code == 0, output
        if tree == first:
            assert list(first.glob("__pycache__/*pytest*"))
            shutil.copytree(first, copy)


def test_what_a_run_leaves_behind_is_ended(warm: WarmPytest, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(LEAVES_A_PROCESS)
    code, output = run(warm, tmp_path)
    assert code == 0, output
    assert not still_there([int((tmp_path / "pid").read_text())], LIMIT_S)


def test_a_run_that_takes_too_long_is_ended(warm: WarmPytest, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(HANGS)
    code, _ = run(warm, tmp_path, limit_s=0.1)
    assert code is None
