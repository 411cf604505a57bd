"""A test that leaves the environment of its process changed fails, and the next one has it as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = """
import os

def test_leaves_one(): os.environ["OF_A_TEST"] = "1"
def test_has_none(): assert "OF_A_TEST" not in os.environ
def test_sets_it_back(monkeypatch): monkeypatch.setenv("OF_A_TEST", "2")
"""


def test_a_test_that_leaves_a_variable_changed_fails(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "--rootdir", str(tmp_path), "test_it.py"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "3 passed, 1 error" in done.stdout, done.stdout
    assert "leaves variables changed, OF_A_TEST: None -> '1'" in done.stdout
