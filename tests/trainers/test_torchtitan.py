"""`examples/torchtitan_trainer.py`, torchtitan's Trainer and its Llama on the CPU, as two sites: real processes, and
the real library."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-more")
pytest.importorskip("triton", reason="triton, which torchtitan imports, is not installed: make test-more")

from tests.trainers.sites import EXAMPLES, late_joiner_ends_equal

pytestmark = [pytest.mark.more, pytest.mark.timeout(900)]

ON_CPU = Path(__file__).with_name("torchtitan_on_cpu.py")
SEQUENCE = 32


def test_two_sites_one_of_them_late_end_equal(tmp_path: Path) -> None:
    """Schedules and the trainer's counts follow the run; the samples are leased from the trainer's own data set."""
    words = [
        str(EXAMPLES / "torchtitan_trainer.py"), "--module", "torchtitan_trainer", "--config", "bytes_debugmodel",
        "--training.local_batch_size", "2", "--training.seq_len", str(SEQUENCE), "--dump_folder", str(tmp_path / "out"),
    ]  # fmt: skip
    status = late_joiner_ends_equal(tmp_path, str(ON_CPU), words, tokens_a_sample=SEQUENCE, chunk_elements=1 << 18)
    assert status["num_parameters"] > 1_000_000
