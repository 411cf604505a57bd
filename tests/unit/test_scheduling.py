"""Which process of pytest is given which test next."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.harness.scheduling import LONG, ByKind

ROOT = Path(__file__).parents[2]


class Process:
    def __init__(self, nice: int) -> None:
        self.gateway = SimpleNamespace(spec=SimpleNamespace(nice=nice))
        self.given: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices


def test_each_kind_of_process_has_its_own_tests_first_and_sites_the_long_ones() -> None:
    tests = [
        "tests/unit/test_a.py::t",
        "tests/unit/test_b.py::t",
        "tests/simulation/test_c.py::t",
        "tests/process/test_bans.py::t",
        f"{LONG[0]}::t",
        "tests/chaos/test_kills.py::t",
    ]
    scheduling: Any = object.__new__(ByKind)
    scheduling.collection, scheduling.pending = tests, list(range(len(tests)))
    scheduling.node2pending = defaultdict(list)
    runs_sites, computes = Process(0), Process(10)
    scheduling._send_tests(computes, 1)
    scheduling._send_tests(runs_sites, 2)
    scheduling._send_tests(computes, 1)
    scheduling._send_tests(runs_sites, 1)
    scheduling._send_tests(computes, 3)
    assert (computes.given, runs_sites.given) == ([0, 1, 2], [4, 3, 5])
    assert scheduling.pending == []


def test_the_long_ones_are_there() -> None:
    assert not [name for name in LONG if not (ROOT / name).is_file()]
