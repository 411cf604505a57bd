"""Which of pytest's processes runs which tests, where `make test` starts processes of two kinds.

Tests of whole sites run where the cores are had first, tests that compute where only what is left is had (`nice`):
whatever goes on beside what a test of sites awaits goes on for as long as it is held up, and costs cores all the while.
"""

from __future__ import annotations

from xdist.scheduler import LoadScheduling
from xdist.workermanage import WorkerController

OF_SITES = ("tests/chaos/", "tests/process/")


class ByKind(LoadScheduling):  # type: ignore[misc]
    """A process that has no tests of its kind any more helps the others."""

    collection: list[str] | None
    pending: list[int]

    def _send_tests(self, node: WorkerController, num: int) -> None:
        assert self.collection is not None
        runs_sites = not node.gateway.spec.nice
        of_its_kind = [i for i in self.pending if self.collection[i].startswith(OF_SITES) == runs_sites]
        if chosen := (of_its_kind or self.pending)[:num]:
            self.pending = [i for i in self.pending if i not in chosen]
            self.node2pending[node].extend(chosen)
            node.send_runtest_some(chosen)
