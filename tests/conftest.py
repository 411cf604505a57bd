"""For all tests."""

import gc
import os
from collections.abc import Generator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.harness import loop_guard, same_draws
from tests.harness.warm_start import lasting

gc.disable()  # until all tests are known: of what loads until then nothing is garbage

# With these pytest looks for every difference of what an assertion compares: minutes where it is 100 kB.
for name in ("CI", "BUILD_NUMBER"):
    os.environ.pop(name, None)

# Threads that compute wait for each other in loops: where others use the cores too, a step of a small model that takes
# a millisecond takes a second.
os.environ["OMP_NUM_THREADS"] = "1"

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
# Of a mutation it is enough to know that it was noticed: the smallest example takes longer to find than any.
settings.register_profile("mutation", settings.get_profile("atoll"), phases=(Phase.explicit, Phase.generate))
settings.load_profile("atoll")

pytest_plugins = ["tests.harness.waiting"]
ENVIRONMENT = pytest.StashKey[dict[str, str]]()
"""Of a test: as it began."""
GARBAGE_THRESHOLDS = 5_000, 10, 10
MANY_FILES = 256
"""Of the 1,024 that a process may have open on many machines."""


def pytest_collection_finish() -> None:
    """What is loaded now is no garbage, and is not looked through again and again: an eighth of a simulation's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _states_are_closed() -> Iterator[None]:
    """The maps of a state keep files open until the garbage collector runs, which it rarely does in a large process."""
    yield
    if len(os.listdir("/proc/self/fd")) > MANY_FILES:
        gc.collect()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[ENVIRONMENT] = lasting(os.environ)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """A test leaves the environment as it was: the forks of `tests.harness.warm_start` have that of the first of them,
    and later tests of the same process, which are others each time, would have none."""
    yield
    before, after = item.stash[ENVIRONMENT], lasting(os.environ)
    changed = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    for name in changed:
        os.environ.pop(name, None)
        os.environ.update({name: before[name]} if name in before else {})
    if changed:
        pytest.fail(
            "it leaves variables changed, "
            + ", ".join(f"{name}: {before.get(name)!r} -> {after.get(name)!r}" for name in changed)
            + ": a test sets them with monkeypatch; where a library does as it is imported, its import belongs to the "
            "head of the file",
            pytrace=False,
        )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """None: xdist's own."""
    if config.getoption("dist") != "load" or not any("nice" in spec for spec in config.getoption("tx")):
        return None
    from tests.harness.scheduling import ByKind

    return ByKind(config, log)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Of tests that run in several processes the summary would not count those that are left out here."""
    if items and (output := getattr(items[0].config, "workeroutput", None)) is not None:
        output["num_deselected"] = output.get("num_deselected", 0) + len(items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    reporter = node.config.pluginmanager.get_plugin("terminalreporter")
    num_deselected = getattr(node, "workeroutput", {}).get("num_deselected", 0)
    reporter.stats["deselected"] = [SimpleNamespace()] * num_deselected  # each process leaves out the same


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[Any]:
    """One a process."""
    from tests.harness.postgresql import Server

    with Server() as server:
        yield server
