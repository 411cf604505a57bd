"""The inner products of all contributions to what a reducer averages in one attempt: chunk after chunk in their order,
each once all contributions to it are here, and added up in that order. The same contributions give the same sums,
however they arrive; no more chunks are held than are multiplied at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from atoll.node.exchange.sync.attempt import Attempt
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.product_messages import MAX_PRODUCTS

Products = tuple[float, ...]
AT_ONCE = 16
"""More than the pool has threads."""


@dataclass(eq=False, kw_only=True)
class Multiplication:
    attempt: Attempt
    chunks: Sequence[int]
    """Of trainable tensors, ascending."""
    multiply: Callable[[int], Products]
    """Of a chunk of which all contributions are here; in a thread."""
    made: Callable[[Products], None]
    """Called once, in the event loop, with the sums over all chunks."""
    _complete: set[int] = field(default_factory=set, init=False)
    _is_started: bool = field(default=False, init=False)
    _num_begun: int = field(default=0, init=False)
    _num_added: int = field(default=0, init=False)
    _ended: dict[int, Products] = field(default_factory=dict, init=False)
    """By chunk, those that wait for the ones before."""

    def __post_init__(self) -> None:
        """Raises InvalidMessage for a plan of more sites than a run that averages by influence may have."""
        num = self.attempt.num_contributors
        if num * (num + 1) // 2 > MAX_PRODUCTS:
            raise InvalidMessage(f"{self.attempt.where}: {num} contributors, in a run that averages by influence")
        self._sums = [0.0] * (num * (num + 1) // 2)

    def start(self) -> None:
        self._is_started = True
        if self.chunks:
            self._go_on()
        else:
            self.made(tuple(self._sums))

    def complete(self, chunks: Iterable[int]) -> None:
        """All contributions to these are here."""
        self._complete.update(chunks)
        self._go_on()

    def _go_on(self) -> None:
        while (
            self._is_started
            and self._num_begun < min(len(self.chunks), self._num_added + AT_ONCE)
            and self.chunks[self._num_begun] in self._complete
        ):
            chunk = self.chunks[self._num_begun]
            self._num_begun += 1
            self._complete.discard(chunk)
            self.attempt.tasks.spawn(self._multiply(chunk))

    async def _multiply(self, chunk: int) -> None:
        self._ended[chunk] = await self.attempt.in_pool(lambda: self.multiply(chunk))
        for next_one in self.chunks[self._num_added : self._num_begun]:
            if (products := self._ended.pop(next_one, None)) is None:
                break
            self._sums = [total + product for total, product in zip(self._sums, products, strict=True)]
            self._num_added += 1
            if self._num_added == len(self.chunks):
                self.made(tuple(self._sums))
        self._go_on()
