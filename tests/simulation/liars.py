"""Members whose bytes are right and whose word is not: of the hashes of their states, and of what settles a dispute."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.daemon.node import Node
from atoll.protocol import messages as m
from atoll.protocol.errors import AtollError
from atoll.protocol.layout import state_hash
from atoll.protocol.messages import Evidence
from tests.simulation.processes import COORDINATOR
from tests.simulation.world import World

SORTS = (
    "shows it slowly",
    "shows a byte now and then",
    "shows a list that does not fit its hash",
    "shows it of another commit",
    "shows nothing",
    "shows no record",
    "is silent",
    "says another hash each time",
    "goes back to an older commit",
    "hangs up",
    "leaves",
)
"""What a liar does when it is asked for evidence."""


class Liar:
    """It tells the truth about commit 0, of which a lie is undone by `atoll reset`, and about commits of which nobody
    else can tell."""

    def __init__(self, node: Node, is_lied_about: Callable[[int], bool], spoils: bytes, *, opens: bool, in_hello: bool):
        self._node, self._is_lied_about, self._spoils = node, is_lied_about, spoils
        self._opens, self._in_hello = opens, in_hello
        self._lists: dict[int, bytes] = {}  # what it shows in a dispute

    def says(self, output: out.Output) -> out.Output:
        match output:
            case out.Send(m.Applied(commit=commit) as said) if self._is_lied_about(commit):
                return replace(output, message=replace(said, state_hash=self._spoilt(commit, said.state_hash)))
            case out.Send(m.Done(last_commit=commit) as said) if self._is_lied_about(commit):
                return replace(output, message=replace(said, state_hash=self._spoilt(commit, said.state_hash)))
            case out.Send(m.Hello(last_commit=commit) as said) if self._in_hello and self._is_lied_about(commit):
                return replace(output, message=replace(said, state_hash=self._spoilt(commit, said.state_hash)))
            case out.Send(m.Shown(evidence=Evidence.CHUNK_HASHES, commit=commit) as said) if commit in self._lists:
                data = self._lists[commit][said.first_byte :][: m.EVIDENCE_PART_BYTES]
                return replace(output, message=replace(said, total_bytes=len(self._lists[commit]), data=data))
        return output

    def _spoilt(self, commit: int, value: bytes) -> bytes:
        """A hash that is made of other hashes of chunks, or of nothing."""
        outer = self._node.disk.plane.outer if self._node.disk.plane is not None else None
        hashes = outer.chunk_hashes(commit) if outer is not None else None
        if not self._opens or hashes is None or outer is None:
            return self._other(value)
        chunk = self._spoils[0] % len(hashes)
        hashes[chunk] = self._other(hashes[chunk])
        self._lists[commit] = b"".join(hashes)
        return state_hash(outer.layout.manifest, outer.slots, hashes)

    def _other(self, value: bytes) -> bytes:
        return bytes(a ^ b for a, b in zip(value, self._spoils, strict=True))


class LiarWhenAsked:
    """What it does in a dispute, whoever began it. `liar`: what it says of its states; None: the truth. `late_s`: all
    that it says of them, and of syncs, is late."""

    def __init__(
        self, world: World, name: str, *, sort: str, liar: Liar | None, late_s: float, generator: random.Random
    ) -> None:
        node = world.nodes[name].node
        assert node is not None
        assert sort in SORTS
        self._world, self._name, self._node, self._sort, self._liar = world, name, node, sort, liar
        self._process = world.nodes[name].process
        self._late_s = late_s
        self._pause_s = generator.choice([0.5, 4.0, 20.0])
        self._random = generator

    def hears(self, event: e.Event) -> e.Event:
        match event:
            case e.Received(message=m.Show() as asked):
                self._is_asked(asked)
        return event

    def does(self, output: out.Output) -> bool:
        match output:
            case out.Send(m.Shown()) if self._sort == "is silent":
                return False
            case out.Send(m.Shown() as shown) if self._sort in ("shows it slowly", "shows a byte now and then"):
                self._later(self._pause_s, shown)
                return False
            case out.Send(m.Applied() | m.Ready() | m.Done() as said) if self._late_s:
                self._later(self._late_s, said)
                return False
        return True

    def says(self, output: out.Output) -> out.Output:
        output = output if self._liar is None else self._liar.says(output)
        match output:
            case out.Send(m.Shown() as shown):
                return replace(output, message=self._told(shown))
        return output

    def _told(self, shown: m.Shown) -> m.Shown:
        is_list = shown.evidence is Evidence.CHUNK_HASHES
        if self._sort == "shows nothing" or (self._sort == "shows no record" and shown.evidence is Evidence.RECORD):
            return replace(shown, total_bytes=0, data=b"", text="not here any more")
        if self._sort == "shows a list that does not fit its hash" and is_list:
            return replace(shown, data=bytes(len(shown.data)))
        if self._sort == "shows it of another commit":
            return self._of_the_commit_before(shown)
        return replace(shown, data=shown.data[:1]) if self._sort == "shows a byte now and then" else shown

    def _of_the_commit_before(self, shown: m.Shown) -> m.Shown:
        assert self._node.disk.plane is not None
        try:
            data = self._node.disk.plane._evidence(shown.evidence, max(0, shown.commit - 1), shown.chunk)
        except (AtollError, OSError) as error:
            return replace(shown, total_bytes=0, data=b"", text=str(error)[:1024])
        return replace(shown, total_bytes=len(data), data=data[shown.first_byte :][: m.EVIDENCE_PART_BYTES])

    def _is_asked(self, asked: m.Show) -> None:
        match self._sort:
            case "says another hash each time":
                self._later(0.0, m.Applied(commit=asked.commit, state_hash=self._random.randbytes(32)))
            case "goes back to an older commit":
                self._later(0.0, m.Applied(commit=max(0, asked.commit - 1), state_hash=self._random.randbytes(32)))
            case "hangs up":
                self._world.later(self._pause_s, lambda: self._world.network.reset(self._name, COORDINATOR))
            case "leaves":
                self._world.run_in(self._process, lambda: self._node.handle(e.LeaveAsked("asked for evidence")))

    def _later(self, delay_s: float, message: m.SiteMessage) -> None:
        """Said then, if it still lives. A lie that is late is one all the same."""
        output = self.says(out.Send(message))

        def say() -> None:
            if not self._process.dead and not self._process.stopped:
                self._world.run_in(self._process, lambda: self._node._execute(output))

        self._world.later(delay_s, say)


def says_otherwise_when_done(kind: str, output: out.Output) -> out.Output:
    """`kind`: another payload, commit, or weights."""
    match output:
        case out.Send(m.Done() as said) if kind == "payload":
            return replace(output, message=replace(said, payload_digest=bytes(len(said.payload_digest))))
        case out.Send(m.Done() as said) if kind == "commit":
            return replace(output, message=replace(said, last_commit=said.last_commit + 1))
        case out.Send(m.Done() as said):
            return replace(output, message=replace(said, tokens=tuple(tokens + 1 for tokens in said.tokens)))
    return output


def shows_all(output: out.Output) -> bool:
    return True


def shows_no_payloads(output: out.Output) -> bool:
    return not (isinstance(output, out.Send) and isinstance(output.message, m.PayloadList))
