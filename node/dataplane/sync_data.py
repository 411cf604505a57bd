"""The arithmetic of one sync over SNAPSHOT and the outer state: contributions, their average, and checks of what
arrives. Called by the exchange from several threads at once."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.node.dataplane import averages, outliers
from atoll.node.dataplane.averaged import Figures, Sample
from atoll.node.dataplane.averages import Contributions
from atoll.node.dataplane.bases import base_of
from atoll.node.dataplane.blocks import gathered
from atoll.node.dataplane.error_feedback import Errors, leave_over
from atoll.node.dataplane.kept_contributions import Kept
from atoll.node.dataplane.outer_state import OuterRecords, PinnedChunk
from atoll.node.dataplane.outliers import Outlier, above, limits
from atoll.node.dataplane.store_files import Bytes
from atoll.protocol import clipping
from atoll.protocol.codecs import arithmetic, bundles, kernels, scratch, unchanged
from atoll.protocol.codecs.table import UNCHANGED
from atoll.protocol.errors import AtollError, AverageError, InvalidMessage, NonFiniteError, StateError
from atoll.protocol.layout import DTYPE_BYTES, Chunk, Layout, Role
from atoll.protocol.messages import Averaged
from atoll.protocol.plans import payload_hash
from atoll.protocol.spec import Aggregation, Contribution, Spec, payload_codec

Floats = npt.NDArray[np.float32]
SAMPLED_EVERY = 8
"""Commits: a chunk that is looked at closer is decoded once more for each contributor."""


def _once() -> Iterator[bool]:
    """True at the first `next`, of whatever thread."""
    return iter((True,))


@dataclass(eq=False)
class SyncData:
    """Nothing here grows with the model: it is made in an event loop."""

    layout: Layout
    travels: Spec
    outer: OuterRecords
    snapshot: memoryview  # the shared buffer, of `layout.buffer_bytes`
    dtypes: Mapping[str, str]
    """The worker's own, by the name of the trainable tensor; each has a base (`bases.check_base_dtypes`)."""
    last_payload: Callable[[int], tuple[bytes, tuple[int, ...]] | None] = lambda chunk: None
    """Of a chunk in the commit that the base is, and the weights of that; None if it is not here."""
    fragment: int = 0
    base_commit: int = 0
    errors: Errors | None = None
    error_commits: tuple[int, ...] = ()
    """Of each fragment of the run: the commit that advanced this site's error; 0: there is none."""
    beta1: float = 0.0
    """Of momenta, if these travel."""
    is_audited: bool = False
    own: range | None = None  # the chunks that this process of the site exchanges; None: all of them
    keeps_own_alone: bool = False  # payloads of other chunks are another process's affair
    chunks: tuple[int, ...] = field(init=False)  # those that travel
    all_chunks: tuple[int, ...] = field(init=False)  # the same, with those that are another process's affair
    kept: Kept | None = field(default=None, init=False)
    """In a run with audits: this site's contributions, which are encoded once."""
    _nearest: list[tuple[float, Outlier]] = field(default_factory=list, init=False)
    """Of each chunk that was averaged, by share of the limit."""
    _figures: Figures = field(default_factory=Figures, init=False)
    _is_first_sent: Iterator[bool] = field(default_factory=_once, init=False)
    _is_first_averaged: Iterator[bool] = field(default_factory=_once, init=False)
    _sent: dict[int, bytes] = field(default_factory=dict, init=False)
    """Of contributions that are bundled, their hashes."""

    def __post_init__(self) -> None:
        """Raises InvalidMessage if there is no such fragment."""
        self.chunks = self.all_chunks = chunks = self.layout.chunks_of(self.fragment)
        if self.keeps_own_alone and self.own is not None:
            self.chunks = chunks[bisect_left(chunks, self.own.start) : bisect_left(chunks, self.own.stop)]

    def is_own(self, chunk: int) -> bool:
        """Whether this process exchanges it."""
        return self.own is None or chunk in self.own

    def contribution(self, chunk: int) -> bytes:
        """The encoded contribution of this site: base minus local, a gradient, the value of a buffer, or that it is
        unchanged. Raises NonFiniteError naming the tensor."""
        spec = self._sync_chunk(chunk)
        data = self._contribution(spec) if self.kept is None else self.kept.read(chunk)
        if self.travels.of(spec.role).aggregation.is_bundle:
            self._sent[chunk] = payload_hash(data)
        return data

    def contribution_on_base(self, chunk: int) -> bytes:
        """The same, and a StateError if its base is gone."""
        with self.outer.pinned(chunk) as record:
            if record.version > self.base_commit:
                raise StateError(f"chunk {chunk} is at commit {record.version} already, and its base is gone")
            return self.contribution(chunk)

    def proof(self, chunk: int) -> bytes:
        """With audits: that the root of this site's contributions is over the one to this chunk; else empty."""
        return b"" if self.kept is None else self.kept.proof(chunk)

    def _sent_hash(self, chunk: int) -> bytes:
        """Of this site's contribution, which may have been sent before this was made."""
        return self._sent.get(chunk) or payload_hash(self.contribution(chunk))

    def _contribution(self, spec: Chunk) -> bytes:
        chunk = spec.index
        local = gathered(np.frombuffer(self.snapshot, np.uint8), spec)
        if self._is_unchanged(spec, local):
            return unchanged(spec.num_elements, self.layout.wire_dtype(spec))
        way = self.travels.of(spec.role)
        if way.aggregation is Aggregation.LOWEST:
            return self._encode(spec, local)
        values = local.view(np.float32)
        if way.contribution is Contribution.VALUE:
            return self._encode(spec, values)
        with self.outer.pinned(chunk) as record:
            values, minus = self._difference(spec, record, values)
            with self._error(chunk) as error:
                sent = self._encode(spec, values, minus, error)
                if self._is_sampled and next(self._is_first_sent, False):
                    lost = scratch.floats("lost", spec.num_elements)
                    whole = self._lost(spec, sent, values, minus, error, lost)
                    self._figures.codec_error = (arithmetic.norm(lost) / whole if whole else 0.0,)
                return sent

    def _difference(self, spec: Chunk, record: PinnedChunk, local: Floats) -> tuple[Floats, Floats]:
        """What travels of a trainable chunk, and what is to be subtracted from it: of gradients and momenta nothing."""
        match self.travels.of(spec.role).contribution:
            case Contribution.GRADIENT | Contribution.LOCAL_MOMENTUM:
                return local, arithmetic.NOTHING
            case Contribution.MOMENTUM:
                momentum = record.data.view(np.float32)[spec.num_elements : 2 * spec.num_elements]
                moved = np.float32(self.beta1) * momentum + np.float32(1 - self.beta1) * local
                return moved, arithmetic.NOTHING
        return base_of(record.values, self.dtypes[self.layout.name_of(spec.index)]), local

    def left_over(self, chunk: int, out: Floats) -> float:
        """What the codec loses of this site's contribution to a trainable chunk: `a - decode(encode(a))`; the norm of
        `a`."""
        spec = self._sync_chunk(chunk)
        local = gathered(np.frombuffer(self.snapshot, np.uint8), spec).view(np.float32)
        with self.outer.pinned(chunk) as record, self._error(chunk) as error:
            if record.version > self.base_commit:
                raise StateError(f"chunk {chunk} is at commit {record.version} already, and its base is gone")
            values, minus = self._difference(spec, record, local)
            return self._lost(spec, self._encode(spec, values, minus, error), values, minus, error, out)

    def _lost(  # noqa: PLR0917
        self, spec: Chunk, sent: bytes, values: Floats, minus: Floats, error: Floats, out: Floats
    ) -> float:
        """`out := a - decode(sent)`, where `a` is what was encoded; the norm of `a`."""
        np.copyto(out, values)
        if minus.size:
            out -= minus
        return leave_over(self.travels.of(spec.role).up, sent, error, self._beta, out)

    @property
    def _beta(self) -> np.float32:
        return self.errors.beta if self.errors is not None else arithmetic.ONE

    def _error(self, chunk: int) -> AbstractContextManager[Floats]:
        if self.errors is None:
            return nullcontext(arithmetic.NOTHING)
        return self.errors.of(chunk, self.error_commits[self.layout.fragment_of[chunk]])

    def _is_unchanged(self, spec: Chunk, local: Bytes) -> bool:
        """Whether a buffer is what the workers received of the base, bit for bit. A trainable tensor never is: its
        momentum moves it whatever the contributions are."""
        if self.travels.of(spec.role).contribution is not Contribution.VALUE:
            return False
        with self.outer.pinned(spec.index) as record:
            return np.array_equal(local, self._buffer_base(spec, record).view(np.uint8))

    def _buffer_base(self, spec: Chunk, record: PinnedChunk) -> npt.NDArray[Any]:
        """The base of a buffer's chunk as all sites hold it, cast included: its dtype is in the manifest."""
        dtype = self.layout.manifest.tensors[spec.tensor].dtype
        return base_of(record.values, dtype) if spec.role is Role.BUFFER_MEAN else record.values

    def max_bytes(self, chunk: int) -> int:
        """The most that an encoded contribution to this chunk can have."""
        spec = self._sync_chunk(chunk)
        return self.travels.max_bytes(spec.role, spec.num_elements, DTYPE_BYTES[self.layout.wire_dtype(spec)])

    def payload_bytes(self, chunk: int, num_contributors: int) -> int:
        """The most that a payload of this chunk can have, where so many contribute."""
        spec = self._sync_chunk(chunk)
        itemsize = DTYPE_BYTES[self.layout.wire_dtype(spec)]
        return self.travels.payload_bytes(spec.role, spec.num_elements, itemsize, num_contributors)

    def check(self, chunk: int, data: bytes | bytearray | memoryview) -> None:
        """Raises InvalidMessage unless it is an encoded chunk of this place in the layout, and finite: what a peer sent
        must not fail later, in the average of all or after the commit."""
        spec = self._sync_chunk(chunk)
        self._check(spec, data, self.travels.of(spec.role).up)

    def _check(self, spec: Chunk, data: bytes | bytearray | memoryview, codec: str, below: float = math.inf) -> None:
        try:
            codec = self.travels.of(spec.role).codec_in(data, codec)
            dtype, width = self.layout.wire_dtype(spec), spec.row_elements
            kernels.check(data, codec, spec.num_elements, dtype, below=below, width=width)
        except InvalidMessage as error:
            raise InvalidMessage(f"chunk {spec.index} of {self.layout.name_of(spec.index)!r}: {error}") from None

    def reduce(
        self,
        chunk: int,
        contributions: Contributions,
        error: Floats = arithmetic.NOTHING,
        left: Floats = arithmetic.NOTHING,
    ) -> bytes:
        """The payload: the average of (tokens, encoded contribution) in the order of site ids, encoded once, with what
        was lost of averages before (`error`) added to it. `left`: where what it loses is written, if it is not empty.

        `avg = 0 + w_0*v_0 + w_1*v_1 + ...` with `w_i = fp32(tokens_i / sum)`. For BUFFER_LOWEST the first
        contribution. An unchanged contribution counts with the base; if all are, so is the payload. A contribution may
        be a function that reads it, so that one at a time is in memory. Raises InvalidMessage for a malformed
        contribution or tokens of 0, AverageError naming the tensor if contributions are outliers, with their places, or
        the average is not finite.
        """
        spec = self._sync_chunk(chunk)
        weights, way = averages.weights_of(contributions), self.travels.of(spec.role)
        if way.aggregation is Aggregation.LOWEST:
            first = averages.read(contributions[0][1])
            self.check(chunk, first)
            return bytes(first)
        if way.aggregation.is_bundle:
            return self._bundle(spec, contributions)
        average = scratch.floats("average", spec.num_elements)
        norms: Sequence[float | None]  # None: unchanged
        if way.contribution is Contribution.VALUE:
            norms = self._add_buffers(spec, contributions, weights, average)
        else:
            norms = averages.add_up(way, contributions, weights, average)
        if all(norm is None for norm in norms):
            return unchanged(spec.num_elements, "F32")
        self._refuse_outliers(spec, [norm or 0.0 for norm in norms])
        self._make_robust(spec, contributions, weights, [norm or 0.0 for norm in norms], average)
        if way.contribution is Contribution.VALUE and (None not in norms or self._is_base_finite(spec)):
            # A mean of finite values is finite: what is beyond is the rounding of weights and sums.
            np.clip(average, -averages.LARGEST, averages.LARGEST, out=average)
        try:
            payload = averages.encode(way, average, error)
        except NonFiniteError as problem:
            name = self.layout.name_of(chunk)
            raise AverageError(f"the average of {_place(name, spec)}: {problem}", name) from None
        if left.size:
            averages.lose(way, average, payload, error, left)
        self._look_at(spec, contributions, payload)
        return payload

    def keeps_left_over(self, chunk: int) -> bool:
        """Whether what the codec loses of an average is added to the next one."""
        return self.travels.of(self.layout.chunks[chunk].role).error_beta_down > 0

    def _bundle(self, spec: Chunk, contributions: Contributions) -> bytes:
        """What all sites average, and clip, as they apply it. A contribution is looked at here as one that is
        averaged; one of a scale that no site would take in a payload stands out, whether or not a value has it."""
        parts, way = [averages.read(of) for _, of in contributions], self.travels.of(spec.role)
        norms = [kernels.norm_of(part, way.up, spec.num_elements, below=self._largest[1]) for part in parts]
        self._refuse_outliers(spec, norms)
        if way.robust != "off":
            self._figures.note(norms, clipping.factors(norms, way.clip))
        payload = averages.bundle(way, spec.num_elements, parts)
        self._look_at(spec, contributions, payload)
        return payload

    def _make_robust(
        self, spec: Chunk, contributions: Contributions, weights: list[float], norms: list[float], average: Floats
    ) -> None:
        """Changes the average where contributions are clipped or trimmed."""
        way = self.travels.of(spec.role)
        if way.robust == "off":
            return
        factors = clipping.factors(norms, way.clip)
        self._figures.note(norms, factors)
        averages.make_robust(way, contributions, weights, factors, average)

    @property
    def _is_sampled(self) -> bool:
        return self.travels.trainable.robust != "off" and self.base_commit % SAMPLED_EVERY == 0

    def _look_at(self, spec: Chunk, contributions: Contributions, payload: bytes) -> None:
        """At the first trainable chunk that is averaged, closer. What cannot be read again leaves the average as it
        is, and nothing is said of it."""
        if self._is_sampled and spec.role is Role.TRAINABLE and next(self._is_first_averaged, False):
            with suppress(AtollError, OSError):
                self._figures.sample = self._sample(spec, contributions, payload)

    def _sample(self, spec: Chunk, contributions: Contributions, payload: bytes) -> Sample:
        way = self.travels.of(spec.role)
        average, value = (scratch.floats(name, spec.num_elements) for name in ("sampled", "value"))
        kernels.decode(payload, way.down, spec.num_elements, average, tokens=[tokens for tokens, _ in contributions])
        cosines, norms = [], []
        for _, of in contributions:
            kernels.decode(averages.read(of), way.up, spec.num_elements, value)
            cosines.append(arithmetic.cosine(value, average))
            norms.append(arithmetic.norm(value))
        last = self._last_average(spec)
        of_mean = math.fsum(norms) / len(norms)
        return Sample(
            cosines=tuple(cosines),
            average_share=arithmetic.norm(average) / of_mean if of_mean else 0.0,
            last_cosine=() if last is None else (arithmetic.cosine(average, last),),
        )

    def averaged(self) -> Averaged | None:
        """What is said of all that was averaged here; None if nothing is."""
        return self._figures.as_message()

    def _add_buffers(
        self, spec: Chunk, contributions: Contributions, weights: list[float], average: Floats
    ) -> list[float | None]:
        """`average := 0 + w_0*v_0 + ...`; of each the norm of its difference from the base, None if it is unchanged."""
        average.fill(0)
        added = zip(contributions, weights, strict=True)
        return [self._add_buffer(spec, averages.read(of), np.float32(weight), average) for (_, of), weight in added]

    def _add_buffer(self, spec: Chunk, data: bytes, weight: np.float32, average: Floats) -> float | None:
        """`average += weight * value`; see `_add_buffers`."""
        way = self.travels.of(spec.role)
        codec = way.codec_in(data, way.up)
        with self.outer.pinned(spec.index) as record:
            base = self._buffer_base(spec, record)
            if codec == UNCHANGED:
                self._check(spec, data, codec)
                arithmetic.add(base, weight, average)
                return None
            value = scratch.floats("value", spec.num_elements)
            kernels.decode(data, codec, spec.num_elements, value)
            arithmetic.add(value, weight, average)
            with np.errstate(over="ignore", invalid="ignore"):  # beyond the limit then
                return arithmetic.norm(np.subtract(value, base, out=value))

    def _is_base_finite(self, spec: Chunk) -> bool:
        with self.outer.pinned(spec.index) as record:
            return arithmetic.is_finite(record.values)

    def _refuse_outliers(self, spec: Chunk, norms: list[float]) -> None:
        if found := self._outliers(spec, norms):
            name = self.layout.name_of(spec.index)
            what = ", ".join(f"{norm:.3g} (limit {limit:.3g})" for _, norm, limit in found)
            raise AverageError(f"contributions to {_place(name, spec)} of norm {what}", name, found)

    @property
    def _largest(self) -> tuple[float, float]:
        """Norm of a contribution to a trainable chunk, and value of a payload."""
        if self.travels.trainable.contribution is not Contribution.DELTA:
            return outliers.LARGEST_GRADIENT, outliers.LARGEST_AVERAGE_GRADIENT
        return outliers.LARGEST_CONTRIBUTION, outliers.LARGEST_AVERAGE

    def _outliers(self, spec: Chunk, norms: list[float]) -> tuple[Outlier, ...]:
        with self.outer.pinned(spec.index) as record:
            base_norm = arithmetic.norm(record.values)
        is_value = self.travels.of(spec.role).contribution is Contribution.VALUE
        num_others, largest = (1, math.inf) if is_value else (2, self._largest[0])
        last_norm = (lambda: 0.0) if is_value else (lambda: self._last_norm(spec))
        held_against = limits(norms, base_norm, last_norm, num_others=num_others, largest=largest)
        if not is_value:
            shares = [norm / limit for norm, limit in zip(norms, held_against, strict=True)]
            place = shares.index(max(shares))
            self._nearest.append((shares[place], (place, norms[place], held_against[place])))
        return above(norms, held_against, largest)

    def stood_out(self) -> Outlier | None:
        """Of all contributions to trainable chunks that were averaged, the one that was nearest to its limit."""
        return max(self._nearest)[1] if self._nearest else None

    def _last_norm(self, spec: Chunk) -> float:
        """Of the last average; 0 if it is not known."""
        last = self._last_average(spec)
        return 0.0 if last is None else arithmetic.norm(last)

    def _last_average(self, spec: Chunk) -> Floats | None:
        found = self.last_payload(spec.index)
        if found is None:
            return None
        payload, tokens = found
        last = scratch.floats("last", spec.num_elements)
        kernels.decode(payload, payload_codec(spec.role, payload), spec.num_elements, last, tokens=tokens)
        return last

    def check_payload(
        self, chunk: int, data: bytes | bytearray | memoryview, num_contributors: int, place: int | None = None
    ) -> None:
        """The same of a payload where so many contribute: no average of differences may be so large that outer updates
        of it overflow. `place`: of this site among the contributors; in a bundle there is what it sent."""
        spec = self._sync_chunk(chunk)
        way = self.travels.of(spec.role)
        below = math.inf if way.contribution is Contribution.VALUE else self._largest[1]
        if not way.aggregation.is_bundle:
            self._check(spec, data, way.down, below)
            return
        bundle = bundles.split(data, spec.num_elements, num_contributors)  # before what they hold is looked at
        found = Aggregation.BUNDLE_OVER_ALL if bundle.over_all else Aggregation.BUNDLE
        if (bundle.codec, found, bundle.clip) != (way.up, way.aggregation, way.clipped):
            raise InvalidMessage(
                f"chunk {chunk}: a bundle of codec {bundle.codec}, averaged {found.value}, clipped at {bundle.clip}; "
                f"codec {way.up} is expected, {way.aggregation.value}, {way.clipped}"
            )
        sent = bundle.contributions[place] if place is not None and self.is_own(chunk) else None
        if sent is not None and payload_hash(sent) != self._sent_hash(chunk):
            raise InvalidMessage(f"chunk {chunk}: a bundle in which this site's contribution is another one")
        self._check(spec, data, way.down, below)

    def payload_hash(self, data: bytes | bytearray | memoryview) -> bytes:
        return payload_hash(data)

    def _encode(
        self,
        spec: Chunk,
        values: npt.NDArray[Any],
        minus: Floats = arithmetic.NOTHING,
        left: Floats = arithmetic.NOTHING,
    ) -> bytes:
        codec, dtype = self.travels.of(spec.role).up, self.layout.wire_dtype(spec)
        try:
            return kernels.encode(
                codec, values, minus=minus, error=left, beta=self._beta, dtype=dtype, width=spec.row_elements
            )
        except NonFiniteError as error:
            name = self.layout.name_of(spec.index)
            advice = "lower the learning rate or look for the loss that overflowed"
            if spec.role is Role.BUFFER_MEAN:
                advice = (
                    "a buffer that changes has to be finite to be averaged; if it is by design (a mask), leave it to "
                    f'each site: atoll.join(..., buffers={{"{name}": "local"}}); if not, {advice}'
                )
            raise NonFiniteError(f"this site's {_place(name, spec)}: {error}; {advice}") from None

    def _sync_chunk(self, chunk: int) -> Chunk:
        if not self.layout.travels(chunk, self.fragment):
            raise InvalidMessage(f"chunk {chunk} takes no part in this sync; there are {len(self.chunks)} that do")
        return self.layout.chunks[chunk]


def _place(name: str, spec: Chunk) -> str:
    last = spec.strip_starts[-1] + spec.strip_elements - 1
    rows = f" ({spec.num_strips} rows of {spec.strip_elements})" if spec.num_strips > 1 else ""
    return f"{name!r}, elements {spec.first_element} to {last}{rows}"
