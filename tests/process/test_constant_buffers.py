"""Buffers as models have them, which no step changes and of which a mean would be none: masks, rotations, a plain 1."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.local_run import LocalRun

SCRIPT = Path(__file__).parents[1] / "workers" / "torch_worker.py"
SETTINGS = RunSettings(run_id="run", steps=60, min_sites=3, time_limits="local", sync=SyncSettings(every=3))
LIMIT_S = 150.0
pytestmark = pytest.mark.timeout(400)


def test_constant_buffers_keep_every_bit_through_a_run(tmp_path: Path) -> None:
    """Three sites whose weights do not sum to 1 exactly: a mean of the least number would be -inf."""
    with LocalRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()
        for name in "abc":
            run.start_node(name, [str(SCRIPT), "--constants"], launcher="python")
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0, "c": 0}
        assert len(run.hashes(20)) == 3
        assert len(set(run.hashes(20).values())) == 1
        for name in "abc":
            saved = load_file(run.home(name) / "model" / "model.safetensors")
            assert "angles" not in saved, "each site's own"
            np.testing.assert_array_equal(saved["mask"], np.triu(np.full((8, 8), -math.inf, np.float32), 1))
            assert (saved["least"] == np.finfo(np.float32).min).all()
            assert saved["one"] == 1.0
            log = (run.home(name) / "node.log").read_text()
            assert "the buffer 'mask' holds values that are not finite" in log
