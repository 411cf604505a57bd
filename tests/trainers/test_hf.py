"""`examples/hf_trainer.py`, a script of Hugging Face's Trainer, as two sites: real processes, and the real library."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: make test-more")
pytest.importorskip("accelerate", reason="accelerate is not installed: make test-more")

from tests.trainers.sites import late_joiner_ends_equal

pytestmark = [pytest.mark.more, pytest.mark.timeout(900)]


@pytest.mark.parametrize("words", [[], ["--lora"]], ids=["whole", "adapter"])
def test_two_sites_one_of_them_late_end_equal(tmp_path: Path, words: list[str]) -> None:
    """Of an adapter the base is at every site by itself: what travels is small."""
    if words:
        pytest.importorskip("peft", reason="peft is not installed: make test-more")
    out = ["--out", str(tmp_path / "out")]
    status = late_joiner_ends_equal(tmp_path, "hf_trainer.py", [*out, *words], tokens_a_sample=64)
    assert status["num_parameters"] == (1024 if words else 37_024)
