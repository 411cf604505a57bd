"""A derandomized test draws the same values alone and in a process that has loaded more of the program."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis.internal.conjecture import providers

from tests.harness import same_draws

ROOT = Path(__file__).resolve().parents[2]

PRINTS_DRAWS = """
{before}
from hypothesis import HealthCheck, given, settings, strategies as st

@settings(max_examples=200, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(), st.text(), st.binary(), st.floats())
def draws(integer, text, data, number):
    print(repr((integer, text, data, number)))

draws()
"""
MORE = "import atoll.protocol.messages, atoll.protocol.settings, atoll.coordinator.core.core"
INSTALLED = "from tests.harness import same_draws\nsame_draws.install()"


def drawn_after(*before: str) -> bytes:
    program = PRINTS_DRAWS.format(before="\n".join(before))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, check=True)
    assert len(done.stdout.splitlines()) >= 100
    return done.stdout


def test_draws_do_not_depend_on_what_is_loaded() -> None:
    assert drawn_after(INSTALLED) == drawn_after(INSTALLED, MORE)


def test_of_itself_hypothesis_draws_constants_of_loaded_modules() -> None:
    """Else `same_draws` has nothing left to do and goes."""
    assert drawn_after() != drawn_after(MORE)


def test_a_hypothesis_that_finds_constants_in_another_way_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(providers, "_get_local_constants")
    with pytest.raises(RuntimeError, match="no _get_local_constants"):
        same_draws.install()
