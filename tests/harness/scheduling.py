"""Which of pytest's processes runs which tests, where `make test` starts processes of two kinds.

Processes that are `nice` run tests that compute; the others run tests of whole sites. The other processes of a site use
cores for as long as its test takes, so a test that computes must not hold it up.
"""

from __future__ import annotations

from xdist.scheduler import LoadScheduling
from xdist.workermanage import WorkerController

OF_SITES = ("tests/chaos/", "tests/process/")
LONG = tuple(
    f"tests/process/test_{name}.py"
    for name in (
        "layouts", "sites_of_several_ranks", "sites_of_several_hosts", "standby", "local_checkpoint", "secured_runs",
        "three_sites_behind_nat", "two_clouds", "audits", "hostile_members", "under_systemd",
    )
)  # fmt: skip
"""Have tests of half a minute and more, and are begun first: else one of them is alone at the end."""


def _place(i: int, test: str) -> tuple[bool, bool, int]:
    """From the front what processes of sites run, from the end the others, in the order of collection: long simulations
    are last, when they do not starve beside sites any more."""
    is_of_sites = test.startswith(OF_SITES)
    return not is_of_sites, not test.startswith(LONG), i if is_of_sites else -i


class ByKind(LoadScheduling):  # type: ignore[misc]
    """A process that has no tests of its own kind left runs those of the other."""

    collection: list[str] | None
    pending: list[int]

    def _send_tests(self, node: WorkerController, num: int) -> None:
        """As many as are asked for: a process begins its last test only when it is told that there is no other."""
        collection = self.collection
        assert collection is not None
        if len(self.pending) == len(collection):  # once: to sort them at each test costs a minute of a core
            self.pending.sort(key=lambda i: _place(i, collection[i]))
        is_nice = bool(node.gateway.spec.nice)
        end = slice(max(0, len(self.pending) - num), None) if is_nice else slice(num)
        if chosen := self.pending[end][:: -1 if is_nice else 1]:
            del self.pending[end]
            self.node2pending[node].extend(chosen)
            node.send_runtest_some(chosen)
