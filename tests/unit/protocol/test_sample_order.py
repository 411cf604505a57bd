"""The global order of samples is a permutation of every pass, the same wherever it is computed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from atoll.protocol.sample_order import SampleOrder

PAGE = Path(__file__).parents[3] / "docs" / "protocol.md"


@pytest.mark.parametrize("num_samples", [1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65, 100, 127, 1000, 1023, 1025, 4097])
@pytest.mark.parametrize("number_of_pass", [0, 1, 17])
def test_every_pass_has_every_sample_once(num_samples: int, number_of_pass: int) -> None:
    order = SampleOrder(7, 0, num_samples)
    first = number_of_pass * num_samples
    assert sorted(order.sample(p) for p in range(first, first + num_samples)) == list(range(num_samples))


def test_it_does_not_depend_on_what_was_asked_before() -> None:
    one, other = SampleOrder(7, 0, 50), SampleOrder(7, 0, 50)
    forwards = [one.sample(p) for p in range(200)]
    assert [other.sample(p) for p in reversed(range(200))] == forwards[::-1]


def test_passes_seeds_and_lines_differ() -> None:
    def start(seed: int, line: int, number_of_pass: int) -> list[int]:
        return [SampleOrder(seed, line, 1000).sample(1000 * number_of_pass + p) for p in range(20)]

    starts = [start(1, 0, 0), start(1, 0, 1), start(2, 0, 0), start(1, 3, 0)]
    assert len({tuple(s) for s in starts}) == 4


def test_it_is_shuffled_well_enough() -> None:
    """Neighbours are as far apart as in a random order, and each sample comes at every place alike."""
    size = 1000
    order = SampleOrder(3, 0, size)
    samples = np.array([order.sample(p) for p in range(size)])
    assert abs(np.abs(np.diff(samples)).mean() - size / 3) < size / 20
    assert abs(np.corrcoef(samples, np.arange(size))[0, 1]) < 0.1
    counts = np.zeros((8, 8))
    small = SampleOrder(5, 0, 8)
    for p in range(8 * 800):
        counts[p % 8, small.sample(p)] += 1
    assert counts.min() > 50
    assert counts.max() < 160


def test_arrays_and_integers_give_the_same() -> None:
    for num_samples in (3, 1000, (1 << 40) + 12345):
        order = SampleOrder(11, 2, num_samples)
        values = np.array([0, 1, 2, num_samples - 1], dtype=np.uint64)
        many = order.permuted(4, values)
        assert many.dtype == np.uint64
        assert [int(v) for v in many] == [order.permuted(4, int(v)) for v in values]


def test_no_samples_have_no_order() -> None:
    for num_samples in (0, -1, 1 << 49):
        with pytest.raises(ValueError, match="an order of"):
            SampleOrder(1, 0, num_samples)


def test_the_vectors_of_the_page() -> None:
    (block,) = re.findall(r"```json sample-order-vector\n(.*?)```", PAGE.read_text(), re.S)
    vector = json.loads(block)
    for case in vector["cases"]:
        order = SampleOrder(vector["seed"], case["line"], case["num_samples"])
        assert list(order.keys(case["first_position"] // case["num_samples"])) == case["keys"]
        got = [order.sample(case["first_position"] + i) for i in range(len(case["samples"]))]
        assert got == case["samples"]


def test_it_needs_no_numpy() -> None:
    code = "import sys, atoll.protocol.sample_order, atoll.protocol.ranges; print('numpy' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
