"""A process that starts workers as a node does and then only waits, to be killed. Prints one JSON line when they run.

    python tiny_node.py LAUNCHER NUM_RANKS PROCESSES COMMAND ...

With PROCESSES = 0 it is ready when the ranks have joined and train, else when that many lines `pid N` were printed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import sys

from atoll.node.core.events import Answer, AnswerKind, BoundaryAsked, WorkersJoined
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.launcher import Launcher
from atoll.node.daemon.shared_memory import SharedBuffer
from atoll.node.daemon.site_log import OUTPUT_LOGGER
from atoll.node.local_protocol import Greeting
from atoll.protocol.layout import Layout
from atoll.protocol.settings import RunSettings, settings_to_json
from tests.harness.ranks import Happened, ServedRanks

GENERATION = 1


def failed(error: BaseException) -> None:
    sys.exit(f"the node failed: {error!r}")


class TinyNode:
    def __init__(self, launcher: str, num_ranks: int, num_processes: int, command: list[str]) -> None:
        self.num_ranks = num_ranks
        self.num_processes = num_processes
        self.pids: list[int] = []
        self.server = ServedRanks(self.happened, failed)
        config = NodeConfig(
            coordinator="", name="a", launcher=launcher, command=tuple(command), num_ranks=num_ranks, num_threads=1
        )
        self.launcher = Launcher(config, lambda ending: sys.exit(f"workers ended: {ending.text}"), failed)

    async def run(self) -> None:
        await self.server.start()
        settings = settings_to_json(RunSettings(run_id="tiny"))
        greeting = Greeting(settings_json=settings, data_paths=())
        self.group = self.server.serve(GENERATION, self.num_ranks, greeting)
        await self.launcher.start(GENERATION, self.server.path)
        await asyncio.Event().wait()

    def happened(self, event: Happened) -> None:
        if isinstance(event, WorkersJoined):
            layout = Layout(event.manifest)
            buffers = [SharedBuffer(layout.buffer_bytes, name) for name in ("SNAPSHOT", "PUBLISH")]
            self.admitting = asyncio.get_running_loop().create_task(self.server.admit(layout, *buffers))
        elif isinstance(event, BoundaryAsked):
            self.server.answer(
                GENERATION, event.step, event.seq, Answer(kind=AnswerKind.CONTINUE, next_step=event.step + (1 << 40))
            )
            if self.num_processes == 0:
                self.ready([rank.pid for rank in self.group.ranks])

    def printed(self, record: logging.LogRecord) -> bool:
        if found := re.search(r"\bpid (\d+)$", record.getMessage()):
            self.pids.append(int(found[1]))
            if len(self.pids) == self.num_processes:
                self.ready(self.pids)
        return True

    def ready(self, pids: list[int]) -> None:
        sys.stdout.write(json.dumps({"node": os.getpid(), "pids": pids}) + "\n")
        sys.stdout.flush()


def main(launcher: str, num_ranks: str, num_processes: str, *command: str) -> None:
    async def run() -> None:
        node = TinyNode(launcher, int(num_ranks), int(num_processes), list(command))
        output = logging.getLogger(OUTPUT_LOGGER)
        output.setLevel(logging.INFO)
        output.addFilter(node.printed)
        await node.run()

    asyncio.run(run())


if __name__ == "__main__":
    main(*sys.argv[1:])
