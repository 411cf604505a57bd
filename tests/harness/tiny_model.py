"""A small model whose states and payloads are real, so that sites in stories can show what their hashes are made of. A
state is called s0, s1, ... after its commit. Any other name is a state with another chunk `damaged`, but those that
begin with "made-up", which are no more than a hash."""

from __future__ import annotations

import struct
from functools import cache

from atoll.protocol import messages as m
from atoll.protocol.codecs import EncodedHeader
from atoll.protocol.codecs.bundles import join
from atoll.protocol.codecs.sparse import TOPK2
from atoll.protocol.digest import DIGEST_BYTES, Digest
from atoll.protocol.layout import Layout, Manifest, Role, chunk_hash, state_hash
from atoll.protocol.messages import Commit, Evidence
from atoll.protocol.outer import outer_at
from atoll.protocol.plans import payload_digest, payload_hash, weights
from atoll.protocol.recompute import recomputed, record_bytes, slots_of
from atoll.protocol.settings import RunSettings

DAMAGED_CHUNK = 3


class TinyModel:
    def __init__(self, settings: RunSettings, manifest: Manifest) -> None:
        self._settings = settings
        self._layout = Layout(manifest, settings.sync.chunk_elements, settings.sync.fragments)
        self._fragments: dict[int, int] = {}  # of commits
        self._tokens: dict[int, tuple[int, ...]] = {}
        self._steps: dict[int, int] = {}
        self._slots = slots_of(settings.outer)
        self.damaged = DAMAGED_CHUNK
        self.records = cache(self._records)

    def state(self, name: str, commit: int) -> bytes:
        if name.startswith("made-up"):
            return Digest("story").text(name).finish()
        return state_hash(self._layout.manifest, self._slots, self.hashes(name, commit))

    def hashes(self, name: str, commit: int) -> list[bytes]:
        found = [chunk_hash(record) for record in self.records(commit)]
        if name != f"s{commit}":
            found[self.damaged] = Digest("story").text(name).finish()
        return found

    def payloads_digest(self, plan: m.Plan | m.Commit) -> bytes:
        self._fragments[plan.sync], self._tokens[plan.sync] = plan.fragment, weights(plan)
        if isinstance(plan, m.Plan):
            self._steps[plan.sync] = plan.num_steps
        return payload_digest(self._settings.run_id, plan, [payload_hash(p) for p in self._payloads(plan.sync) if p])

    def show(self, asked: m.Show, held: str) -> bytes:
        """By a site that says that its state of that commit was `held`."""
        match asked.evidence:
            case Evidence.CHUNK_HASHES:
                return b"".join(self.hashes(held, asked.commit))
            case Evidence.RECORD:
                return self.records(asked.commit)[asked.chunk]
            case Evidence.PAYLOAD_HASHES:
                return b"".join(payload_hash(p) if p else bytes(DIGEST_BYTES) for p in self._payloads(asked.commit))
            case _:
                return self._payloads(asked.commit)[asked.chunk]

    def _records(self, commit: int) -> tuple[bytes, ...]:
        """Commits and syncs have the same numbers here."""
        chunks, tensors = self._layout.chunks, self._layout.manifest.tensors
        if not commit:
            sizes = [record_bytes(c.role, "F32", c.num_elements, self._settings.outer) for c in chunks]
            return tuple(struct.pack(f"<{size // 4}f", *[0.5 + i] * (size // 4)) for i, size in enumerate(sizes))
        payloads = self._payloads(commit)
        done = Commit(
            commit=commit,
            sync=commit,
            attempt=1,
            term=1,
            payload_digest=b"",
            run_step=sum(self._steps.get(sync, 0) for sync in range(1, commit + 1)),
            run_tokens=0,
            contributors=(),
            rates=rates_of(self._settings, self._layout.manifest),
        )
        return tuple(
            record  # frozen, empty, or of another fragment
            if chunk.index >= len(payloads) or not payloads[chunk.index]
            else recomputed(
                role=chunk.role,
                dtype=tensors[chunk.tensor].dtype,
                num_elements=chunk.num_elements,
                step=outer_at(self._settings, done, tensors[chunk.tensor].group),
                record=record,
                payload=payloads[chunk.index],
                tokens=self._tokens.get(commit, (1,)),
            )
            for chunk, record in zip(chunks, self.records(commit - 1), strict=True)
        )

    def _payloads(self, commit: int) -> list[bytes]:
        found = []
        for chunk in self._layout.chunks[: self._layout.num_sync_chunks]:
            count, fragment = chunk.num_elements, self._fragments.get(commit, 0)
            if not self._layout.travels(chunk.index, fragment):
                found.append(b"")
                continue
            if chunk.role is Role.TRAINABLE and self._settings.sync.codec == "topk2":
                parts = [
                    _first_alone(count, place + commit / 8) for place in range(len(self._tokens.get(commit, (1,))))
                ]
                found.append(join(count, parts, over_all=False))
                continue
            header = EncodedHeader(codec="fp32", zstd=False, dtype="F32", num_elements=count).pack()
            found.append(header + struct.pack(f"<{count}f", *[commit / 8 + chunk.index] * count))
        return found


def rates_of(settings: RunSettings, manifest: Manifest) -> tuple[float, ...]:
    """What every site says of its optimizer; nothing where values are averaged."""
    if not settings.sync.steps_at_nodes:
        return ()
    return tuple(rate for group in range(manifest.num_groups) for rate in (0.5 / (1 + group), 0.125))


def _first_alone(num_elements: int, value: float) -> bytes:
    """A contribution of which one element is sent."""
    header = EncodedHeader(codec="topk2", zstd=False, dtype="F32", num_elements=num_elements, columns=64)
    scales, entries, segments = TOPK2.parts_bytes(num_elements)
    return header.pack() + struct.pack("<ff", value, 0).ljust(scales + entries, b"\0") + b"\1".ljust(segments, b"\0")
