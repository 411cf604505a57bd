"""An event loop on simulated time: it never sleeps, runs "threads" in between, and repeats itself exactly.

Time jumps to the next thing that is due. What goes to an executor runs inline, a little later; how much later is
drawn from the seed. Tasks and futures hash by number, so that sets of them have one order.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import random
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

START_S = 1000.0
MAX_TURNS_AT_ONE_TIME = 200_000
MOST_THREAD_S = 0.02
TURN_S = 1e-9


@dataclass(eq=False)
class Process:
    """One start of one program on one machine. Dead: nothing of it runs any more, not even its `finally` blocks.
    Stopped: nothing of it runs until it goes on."""

    machine: str
    start: int
    dead: bool = False
    stopped: bool = False
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    """Kept, so that what was killed is not cleaned up by the garbage collector."""
    waiting: list[Any] = field(default_factory=list)
    """What came due while it was stopped."""

    def __str__(self) -> str:
        return f"{self.machine}.{self.start}"


HERE: contextvars.ContextVar[Process | None] = contextvars.ContextVar("HERE", default=None)
"""The process that the running code belongs to, if any."""


THREAD_S: contextvars.ContextVar[float] = contextvars.ContextVar("THREAD_S", default=0.0)
"""How much longer the running code's work in threads takes than that of others."""


def here() -> Process:
    """The process that the running code belongs to."""
    process = HERE.get()
    assert process is not None, "no simulated process runs this"
    return process


class Deadlock(Exception):
    """Nothing is due any more."""


class Spinning(Exception):
    """The loop turns without time passing."""


class SimFuture(asyncio.Future[Any]):
    def __init__(self, *, loop: SimLoop) -> None:
        super().__init__(loop=loop)
        self._number = next(loop.numbers)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class SimTask(asyncio.Task[Any]):
    def __init__(self, coroutine: Coroutine[Any, Any, Any], *, loop: SimLoop, **options: Any) -> None:
        self._number = next(loop.numbers)  # before the base class puts it into a set
        super().__init__(coroutine, loop=loop, **options)
        context = options.get("context")
        process = HERE.get() if context is None else context.get(HERE)
        if process is not None:
            process.tasks.append(self)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


def _nothing() -> None:
    pass


class _NoSelector(selectors.BaseSelector):
    """There are no file descriptors: "waiting" moves the clock."""

    def __init__(self) -> None:
        self.loop: SimLoop | None = None

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, -1, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, -1, 0, None)

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return {}

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        raise KeyError(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert self.loop is not None
        self.loop.pass_time(timeout)
        return []


class SimLoop(asyncio.SelectorEventLoop):
    _ready: deque[Any]  # handles
    _scheduled: list[Any]  # timer handles, a heap

    def __init__(self, seed: int) -> None:
        self.now = START_S
        self.random = random.Random(f"threads {seed}")
        self.numbers = itertools.count(1)
        """Of futures and tasks. Sets are in their order, so a schedule does not depend on those before it."""
        self._turns = 0
        self.is_in_thread = False
        """What runs now was given to an executor."""
        self.abandoned = False
        """Over: what the garbage collector finds of it may clean up as it likes."""
        selector = _NoSelector()
        super().__init__(selector)
        selector.loop = self
        self._clock_resolution = 1e-9
        self.set_task_factory(lambda loop, coroutine, **options: SimTask(coroutine, loop=self, **options))

    def time(self) -> float:
        return self.now

    def create_future(self) -> SimFuture:
        return SimFuture(loop=self)

    # --- processes that die or stand still

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        if self.abandoned:
            return asyncio.Handle(callback, args, self, context)
        handle = asyncio.Handle(callback, args, self, context)
        process = HERE.get() if context is None else context.get(HERE)
        if process is None or not (process.dead or process.stopped):
            self._ready.append(handle)
        elif not process.dead:
            process.waiting.append(handle)
        return handle

    def freeze(self, process: Process) -> None:
        """Nothing of it runs from now on; what was due, and its timers, wait in it."""
        assert process.dead or process.stopped

        def is_its(handle: Any) -> bool:
            return handle._context.get(HERE) is process

        process.waiting += [h for h in self._ready if is_its(h)]
        timers = [h for h in self._scheduled if is_its(h)]
        process.waiting += sorted(timers, key=lambda h: h._when)
        for place, handle in enumerate(self._ready):
            if is_its(handle):  # as many as there were: the loop may be in the middle of them
                self._ready[place] = nothing = asyncio.Handle(_nothing, (), self)
                nothing.cancel()
        self._scheduled = [h for h in self._scheduled if not is_its(h)]
        heapq.heapify(self._scheduled)
        for timer in timers:
            timer._scheduled = False
        if process.dead:
            process.waiting.clear()

    def go_on(self, process: Process) -> None:
        process.stopped = False
        waiting, process.waiting = process.waiting, []
        for handle in waiting:
            if handle._cancelled:
                continue
            when: float | None = getattr(handle, "_when", None)
            if when is not None and when > self.now:
                heapq.heappush(self._scheduled, handle)
                handle._scheduled = True
            else:
                self._ready.append(handle)

    def forget(self) -> None:
        """Everything that is still due."""
        self.abandoned = True
        self._ready.clear()
        self._scheduled.clear()
        self.close()

    def pass_time(self, timeout: float | None) -> None:
        if timeout is None:
            raise Deadlock(f"at {self.now:.3f} nothing is due any more")
        if timeout > 0:
            self.now += timeout
            self._turns = 0
            return
        self._turns += 1
        self.now += TURN_S  # else what is due in less than a float can tell would never be
        if self._turns > MAX_TURNS_AT_ONE_TIME:
            raise Spinning(f"at {self.now:.3f} the loop turned {self._turns} times without time passing")

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Runs `func` whole, at one moment a little later; nothing else runs meanwhile."""
        future: asyncio.Future[T] = self.create_future()
        context = contextvars.copy_context()

        def run() -> None:
            if future.cancelled():
                return  # a real pool would drop work that has not begun
            self.is_in_thread = True
            try:
                result = func(*args)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)
            finally:
                self.is_in_thread = False

        self.call_later(self.random.uniform(0, MOST_THREAD_S) + THREAD_S.get(), run, context=context)
        return future


class InlineExecutor(Executor):
    """In place of a thread pool, for work that nobody awaits: it is done when it is handed in."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pass
