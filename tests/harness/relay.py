"""A TCP relay in front of a server: links that a test can cut, stop, and count."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from atoll.protocol.addresses import parse_address


class Relay:
    """Forwards to `target`; while `refusing` it takes no connections."""

    def __init__(self, target: str) -> None:
        self._target = parse_address(target)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.refusing = False
        self.num_connections = 0
        self.num_bytes = 0
        self.on_bytes: Callable[[int], None] = lambda total: None
        self.num_trickled = 0
        self._slice: tuple[int, float] | None = None
        self.change: Callable[[bytes], bytes] = lambda data: data
        self.address = ""

    async def start(self) -> Relay:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        self._flowing.set()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def hang(self) -> None:
        """Connections stay, no byte passes."""
        self._flowing.clear()

    def trickle(self, num_bytes: int, every_s: float) -> None:
        """From now on so many bytes pass at a time, in each direction of each connection."""
        self._slice = num_bytes, every_s

    def hang_old(self) -> None:
        """No byte passes any more over the connections there are; new ones are as usual."""
        self._flowing.clear()
        self._flowing = asyncio.Event()
        self._flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            writer.transport.abort()
            return
        self.num_connections += 1
        there, back = await asyncio.open_connection(*self._target)
        self._writers |= {writer, back}
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._pump(source, sink, self._flowing))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, flowing: asyncio.Event) -> None:
        try:
            while data := await source.read(1 << 16):
                await flowing.wait()
                self.num_bytes += len(data)
                self.on_bytes(self.num_bytes)
                data = self.change(data)
                while data:
                    some, every_s = self._slice or (len(data), 0.0)
                    if self._slice is not None:
                        await asyncio.sleep(every_s)
                        self.num_trickled += 1
                    sink.write(data[:some])
                    data = data[some:]
                    await sink.drain()
        except OSError:
            pass  # the link was cut
        finally:
            sink.transport.abort()
            self._writers.discard(sink)
