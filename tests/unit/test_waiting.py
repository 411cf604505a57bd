"""What is said of a test that hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = """
import asyncio

async def a_word(words): return await words.get()

async def both():
    words = asyncio.Queue()
    other = asyncio.create_task(a_word(words), name="the other")
    await a_word(words)

def test_hangs(): asyncio.run(both())
"""


def test_of_a_test_that_hangs_each_task_is_said_with_the_lines_at_which_it_waits(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "--rootdir", str(tmp_path)]
    command += ["--timeout", "1", "test_it.py"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "Timeout (>1.0s)" in done.stdout, done.stdout
    said = done.stdout.split("innermost last:")[1:]
    assert len(said) == 2, done.stdout
    for lines in said:
        assert "test_it.py:4 a_word" in lines
        assert "queues.py" in lines
    assert sum("test_it.py:9 both" in lines for lines in said) == 1
    assert "the other, innermost" in done.stdout
