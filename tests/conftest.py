"""For all tests."""

import os
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.harness import loop_guard, same_draws

loop_guard.install()
if not int(os.environ.get("ATOLL_FUZZ_TIMES", "0")):  # else others are wanted: tests/harness/fuzzing.py
    same_draws.install()

# The same examples every time, and no limit on the time of one: a busy machine is no failure.
settings.register_profile(
    "atoll",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("atoll")

SPREAD = (("simulation",), ("fuzz",), ("chaos", "process"))
"""Folders of tests that compute, twice, and of tests that mostly wait for processes, the longest of these first."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In several processes, tests that compute run among those that wait, from the first to the last: one kind after
    the other would have more to do than there are cores, and then half of it."""
    if not hasattr(config, "workerinput"):
        return
    by_folder = defaultdict(list)
    for item in items:
        by_folder[item.path.relative_to(config.rootpath / "tests").parts[0]].append(item)
    placed: list[tuple[float, pytest.Item]] = []
    for folders in SPREAD:
        group = [item for folder in folders for item in by_folder.pop(folder, ())]
        placed += [(place / len(group), item) for place, item in enumerate(group)]
    among = [item for _, item in sorted(placed, key=lambda pair: pair[0])]
    items[:] = [*chain.from_iterable(by_folder.values()), *among]


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Of tests that run in several processes the summary would not count those that are left out here."""
    if items and (output := getattr(items[0].config, "workeroutput", None)) is not None:
        output["num_deselected"] = output.get("num_deselected", 0) + len(items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    reporter = node.config.pluginmanager.get_plugin("terminalreporter")
    num_deselected = getattr(node, "workeroutput", {}).get("num_deselected", 0)
    reporter.stats["deselected"] = [SimpleNamespace()] * num_deselected  # each process leaves out the same
