"""The arithmetic of one sync over SNAPSHOT and the outer state: contributions, their average, and checks of what
arrives. Called by the exchange from several threads at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from atoll.node.dataplane.bases import cast_base, check_base_dtype
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.payload_file import payload_hash
from atoll.protocol.codecs import codec_of, kernels, max_encoded_bytes, scratch
from atoll.protocol.errors import InvalidMessage, NonFiniteError
from atoll.protocol.layout import DTYPE_BYTES, Chunk, Layout, Role
from atoll.protocol.settings import SyncSettings

Floats = npt.NDArray[np.float32]


class SyncData:
    """`snapshot` is the shared buffer of `layout.buffer_bytes`; `dtypes` maps trainable names to the worker's dtype.

    Raises ConfigError for a dtype that has no base.
    """

    def __init__(
        self,
        layout: Layout,
        settings: SyncSettings,
        outer: OuterState,
        snapshot: memoryview,
        dtypes: Mapping[str, str],
    ) -> None:
        self.layout = layout
        self._codec = settings.codec
        self._zstd_level = settings.zstd_level
        self._outer = outer
        self._snapshot = snapshot.cast("B")
        self._dtypes = dict(dtypes)
        self.chunks = [c.index for c in layout.chunks[: layout.num_sync_chunks] if c.num_elements]
        for spec in layout.manifest.tensors:
            if spec.role is Role.TRAINABLE:
                check_base_dtype(self._dtypes[spec.name], spec.name)

    def contribution(self, chunk: int) -> bytes:
        """The encoded contribution of this site: base minus local, or the value of a buffer.

        Raises NonFiniteError naming the tensor.
        """
        spec = self._sync_chunk(chunk)
        local = self._snapshot[spec.offset_bytes : spec.offset_bytes + spec.num_bytes]
        if spec.role is Role.BUFFER_LOWEST:
            dtype = self.layout.manifest.tensors[spec.tensor].dtype
            return kernels.encode("raw", np.frombuffer(local, np.uint8), zstd_level=self._zstd_level, dtype=dtype)
        values = np.frombuffer(local, np.float32)
        if spec.role is Role.BUFFER_MEAN:
            return self._encode(spec, values, None, "this site's")
        with self._outer.pinned(chunk) as record:
            base = record.values
            dtype = self._dtypes[self.layout.name_of(chunk)]
            if dtype != "F32":
                base = scratch.floats("base", spec.num_elements)
                cast_base(record.values, dtype, base)
            return self._encode(spec, base, values, "this site's")

    def max_bytes(self, chunk: int) -> int:
        """The most an encoded contribution or payload of this chunk can have."""
        spec = self._sync_chunk(chunk)
        return max_encoded_bytes(codec_of(spec.role, self._codec), spec.num_elements, self._itemsize(spec))

    def check(self, chunk: int, data: bytes | bytearray | memoryview) -> None:
        """Raises InvalidMessage unless it is an encoded chunk of this place in the layout, and finite: what a peer sent
        must not fail later, in the average of all or after the commit."""
        spec = self._sync_chunk(chunk)
        codec = codec_of(spec.role, self._codec)
        try:
            kernels.check(data, codec, spec.num_elements, self._wire_dtype(spec))
        except InvalidMessage as error:
            raise InvalidMessage(f"chunk {chunk} of {self.layout.name_of(chunk)!r}: {error}") from None

    def reduce(self, chunk: int, contributions: Sequence[tuple[int, bytes | Callable[[], bytes]]]) -> bytes:
        """The payload: the average of (tokens, encoded contribution) in the order of site ids, encoded once.

        `avg = 0 + w_0*v_0 + w_1*v_1 + ...` with `w_i = fp32(tokens_i / sum)`. For BUFFER_LOWEST the first
        contribution. A contribution may be a function that reads it, so that one at a time is in memory. Raises
        InvalidMessage for a malformed contribution or tokens of 0, NonFiniteError naming the tensor.
        """
        spec = self._sync_chunk(chunk)
        total = sum(tokens for tokens, _ in contributions)
        if not contributions or any(tokens <= 0 for tokens, _ in contributions):
            raise InvalidMessage(f"reduction of chunk {chunk}: every contributor needs tokens above 0")
        if spec.role is Role.BUFFER_LOWEST:
            first = _read(contributions[0][1])
            self.check(chunk, first)
            return bytes(first)
        average = scratch.floats("average", spec.num_elements)
        average.fill(0)
        codec = codec_of(spec.role, self._codec)
        for tokens, data in contributions:
            kernels.accumulate(_read(data), codec, np.float32(tokens / total), average)
        return self._encode(spec, average, None, "the average's")

    def payload_hash(self, data: bytes | bytearray | memoryview) -> bytes:
        return payload_hash(data)

    def _encode(self, spec: Chunk, values: Floats, minus: Floats | None, whose: str) -> bytes:
        try:
            return kernels.encode(codec_of(spec.role, self._codec), values, minus=minus, zstd_level=self._zstd_level)
        except NonFiniteError as error:
            name = self.layout.manifest.tensors[spec.tensor].name
            raise NonFiniteError(
                f"{whose} {name!r}, elements {spec.first_element} to {spec.first_element + spec.num_elements - 1}: "
                f"{error}; lower the learning rate or look for the loss that overflowed"
            ) from None

    def _sync_chunk(self, chunk: int) -> Chunk:
        if not 0 <= chunk < self.layout.num_sync_chunks or not self.layout.chunks[chunk].num_elements:
            raise InvalidMessage(f"chunk {chunk} takes no part in syncs; there are {len(self.chunks)} that do")
        return self.layout.chunks[chunk]

    def _wire_dtype(self, spec: Chunk) -> str:
        return self.layout.manifest.tensors[spec.tensor].dtype if spec.role is Role.BUFFER_LOWEST else "F32"

    def _itemsize(self, spec: Chunk) -> int:
        return DTYPE_BYTES[self._wire_dtype(spec)]


def _read(contribution: bytes | Callable[[], bytes]) -> bytes:
    return contribution() if callable(contribution) else contribution
