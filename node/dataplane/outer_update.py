"""The outer update of one chunk's record: values, then each slot of the outer optimizer. Pure, over arrays."""

from __future__ import annotations

import numpy as np

from atoll.node.dataplane.optim import OuterUpdate
from atoll.node.dataplane.store_files import Bytes
from atoll.protocol.codecs import kernels, parse_header, scratch
from atoll.protocol.codecs.table import UNCHANGED
from atoll.protocol.layout import Layout, Role
from atoll.protocol.spec import payload_codec

Encoded = bytes | bytearray | memoryview


def record_bytes(layout: Layout, slots: tuple[str, ...], chunk: int) -> int:
    """Bytes of a chunk's record: values and, for trainable chunks, each slot."""
    spec = layout.chunks[chunk]
    return spec.num_bytes * (1 + len(slots)) if spec.role is Role.TRAINABLE else spec.num_bytes


def apply(layout: Layout, chunk: int, old: Bytes, payload: Encoded, update: OuterUpdate, *, new: Bytes) -> None:
    """`new` := the record after the commit whose `payload` and `update` they are, from the record before it.

    Raises InvalidMessage for a payload that is not this chunk's.
    """
    spec = layout.chunks[chunk]
    codec, dtype = payload_codec(spec.role, payload), layout.wire_dtype(spec)
    if spec.role is Role.TRAINABLE:
        average = scratch.floats("average", spec.num_elements)
        kernels.decode(payload, codec, spec.num_elements, average, tokens=update.tokens)
        rows = old.view(np.float32).reshape(-1, spec.num_elements)
        out = new.view(np.float32).reshape(-1, spec.num_elements)
        group = layout.manifest.tensors[spec.tensor].group
        update.apply(rows[0], list(rows[1:]), average, out[0], list(out[1:]), group)
    elif codec == UNCHANGED:
        parse_header(payload, codec=codec, num_elements=spec.num_elements, dtype=dtype)
        new[:] = old
    else:
        values = new if spec.role is Role.BUFFER_LOWEST else new.view(np.float32)
        kernels.decode(payload, codec, spec.num_elements, values, dtype)


def updated(layout: Layout, chunk: int, old: bytes, payload: Encoded, update: OuterUpdate) -> bytes:
    """The same, in memory of its own."""
    before = np.frombuffer(old, np.uint8)
    new = np.empty_like(before)
    apply(layout, chunk, before, payload, update, new=new)
    return new.tobytes()
