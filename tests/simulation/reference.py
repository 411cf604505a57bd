"""What the commit log means, computed in one process: the outer state after the last commit, and what a site that
trains on while the sites talk makes of it.

Codecs are the product's (they have tests of their own); who is averaged with which weight from which base, and the
outer update, are written out here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from atoll.protocol.codecs import HEADER_BYTES, kernels
from atoll.protocol.codecs.table import SPARSE
from atoll.protocol.layout import Chunk, Layout, Role
from atoll.protocol.log_length import LogLength
from atoll.protocol.messages import Commit
from atoll.protocol.settings import RunSettings
from tests.harness.chunks import cut_out
from tests.harness.phases import is_of_gradients, local_steps
from tests.harness.reference_codecs import Sent, average_of, clipped, decode_sparse, finished, left_in
from tests.simulation.sites import Part, Sealed, Step, to_bf16

F32 = npt.NDArray[np.float32]
Records = dict[int, bytes]
"""Of each chunk: values, then slots."""


def replay(
    layout: Layout,
    settings: RunSettings,
    start: Records,
    log: Sequence[Commit],
    handed_in: Mapping[Commit, Sequence[Sealed]],
    *,
    errors: Errors,
    of_averages: ErrorsOfAverages,
) -> list[Records]:
    """The state after each commit, commit 0 first. `handed_in`: of each commit's contributors, in their order."""
    states = [dict(start)]
    for commit in log:
        state, (rate, mu) = dict(states[-1]), rates(settings, commit)
        total = sum(member.tokens for member in commit.contributors)
        for chunk in layout.chunks[: layout.num_sync_chunks]:
            if commit.fragment not in (layout.fragment_of[chunk.index], len(layout.fragments)):
                continue
            size, values = chunk.num_bytes, state[chunk.index]
            locals_ = [cut_out(s.values, chunk) for s in handed_in[commit]]
            if chunk.role is Role.BUFFER_LOWEST:
                state[chunk.index] = locals_[0]
                continue
            if chunk.role is Role.BUFFER_MEAN and all(local == values for local in locals_):
                continue
            x = np.frombuffer(values[:size], "<f4")
            is_gradient = settings.sync.strategy != "diloco"
            is_momentum = settings.sync.strategy == "momentum" and not is_of_gradients(settings.sync, commit.commit)
            sync, average = settings.sync, np.zeros(chunk.num_elements, np.float32)
            parts: list[Sent] = []
            arrived, norms = [], []
            is_trained = chunk.role is Role.TRAINABLE
            up, down = (sync.up or sync.codec, sync.down or sync.codec) if is_trained else ("fp32", "fp32")
            warms_up = is_trained and sync.strategy == "momentum" and not is_momentum
            if warms_up:
                up = down = sync.warmup_codec
                assert not any(commit.error_commits), f"commit {commit.commit} is of gradients, which have no errors"
            for place, (local, sealed) in enumerate(zip(locals_, handed_in[commit], strict=True)):
                mine = np.frombuffer(local, "<f4")
                if is_trained:
                    moved = mine if is_gradient else (to_bf16(x) if sealed.bf16 else x) - mine
                    if is_momentum and local_steps(sync, commit.commit) == 1:
                        beta1, m = settings.outer.momentum, np.frombuffer(values[size : 2 * size], "<f4")
                        moved = np.float32(beta1) * m + np.float32(1 - beta1) * mine
                    mine = moved if warms_up else errors.added(commit, place, chunk, moved)
                decoded = _through(up, mine, parts)
                if is_trained and not warms_up:
                    errors.keep(commit, place, chunk, mine - decoded)
                arrived.append(decoded)
                norms.append(_norm(up, mine))
            clip = sync.clip if is_trained and sync.robust == "clip" else 0.0
            weights = [member.tokens / total for member in commit.contributors]
            if is_trained and sync.robust == "gram":
                whole = sum(member.influence for member in commit.contributors)
                weights = [member.influence / whole for member in commit.contributors]
            for decoded, weight, factor in zip(arrived, weights, clipped(norms, clip), strict=True):
                average = average + np.float32(weight * factor) * decoded
            if is_trained and sync.robust == "trim":
                places = left_in(norms, sync.clip, sync.trim)
                average = trimmed([arrived[i] for i in places], [weights[i] for i in places], sync.trim)
            if parts:
                tokens = [member.tokens for member in commit.contributors]
                average = average_of(parts, tokens, over_all=sync.mean_over == "all", clip=clip)
                average = finished(up, average, chunk.num_elements)
            elif is_trained and not warms_up:
                average = of_averages.through(commit, chunk, average, down)
            else:
                average = _through(down, average)
            if chunk.role is Role.BUFFER_MEAN:
                state[chunk.index] = average.tobytes()
                continue
            if is_gradient and len(x):
                group = layout.manifest.tensors[chunk.tensor].group
                state[chunk.index] = stepped(settings, commit, group, values, average)
                continue
            m = mu * np.frombuffer(values[size:], "<f4") + average
            state[chunk.index] = (x - rate * (average + mu * m)).tobytes() + m.tobytes()
        states.append(state)
    return states


def stepped(settings: RunSettings, commit: Commit, group: int, record: bytes, g: F32) -> bytes:
    """Values and slots after a step with that average gradient. Each operation is rounded by itself."""
    outer = settings.outer
    rate, decay = (np.float32(number) for number in commit.rates[2 * group : 2 * group + 2])
    x, *slots = list[F32](np.frombuffer(record, "<f4").reshape(-1, len(g)))
    if outer.optimizer == "sgd":
        return (x - rate * g).tobytes()
    if outer.optimizer == "signsgd":
        sign: F32 = np.sign(g)
        return (x - rate * (sign + decay * x)).tobytes()
    b1, b2 = np.float32(outer.momentum), np.float32(outer.beta2)
    if outer.optimizer == "nesterov":
        m = b1 * slots[0] + g
        return (x - rate * (g + b1 * m)).tobytes() + m.tobytes()
    is_frozen, num_gradients = False, commit.run_step
    if settings.sync.strategy == "momentum":
        of_gradients = [is_of_gradients(settings.sync, number) for number in range(1, commit.commit + 1)]
        is_frozen, num_gradients = not of_gradients[-1], sum(of_gradients)
    m, v = g, slots[1]
    if not is_frozen:
        m = b1 * slots[0] + np.float32(1 - outer.momentum) * g
        v = b2 * slots[1] + np.float32(1 - outer.beta2) * (g * g)
    c1 = np.float32(1 - power(outer.momentum, commit.run_step))
    c2 = np.float32(1 - power(outer.beta2, num_gradients))
    step: F32 = (m / c1) / (np.sqrt(v / c2) + np.float32(outer.epsilon))
    if is_frozen:
        step = step.clip(np.float32(-1), np.float32(1))
    return (x - rate * (step + decay * x)).tobytes() + m.tobytes() + v.tobytes()


def power(base: float, exponent: int) -> float:
    """By squaring, from the lowest bit of the exponent on."""
    found = 1.0
    for place, bit in enumerate(reversed(f"{exponent:b}")):
        square = base
        for _ in range(place):
            square *= square
        found *= square if bit == "1" else 1.0
    return found


def trimmed(arrived: Sequence[F32], weights: Sequence[float], trim: int) -> F32:
    """The mean of each element without so many of its lowest and highest values; of equal ones the first is lower."""
    cut = min(trim, (len(arrived) - 1) // 2)
    order = np.argsort(np.stack(arrived), axis=0, kind="stable")
    is_left = np.ones(order.shape, bool)
    for cut_out_ in (order[:cut], order[len(arrived) - cut :]):
        np.put_along_axis(is_left, cut_out_, False, axis=0)
    total, weight = np.zeros_like(arrived[0]), np.zeros_like(arrived[0])
    for values, exact, left in zip(arrived, weights, is_left, strict=True):
        total[left] = total[left] + np.float32(exact) * values[left]
        weight[left] = weight[left] + np.float32(exact)
    return total / weight


def rates(settings: RunSettings, commit: Commit) -> tuple[np.float32, np.float32]:
    """Learning rate and momentum of the outer step: evenly up from 0 over a first share of the run, and down over a
    last share, to a tenth and to 0."""
    changed = json.loads(commit.changed_json or "{}")
    outer, steps = settings.outer, changed.get("run.steps", settings.steps)
    part = commit.run_step / steps if steps else commit.run_tokens / changed.get("run.tokens", settings.tokens)
    done = min(1.0, part)
    learning_rate = changed.get("outer.learning_rate", outer.learning_rate)
    momentum = changed.get("outer.momentum", outer.momentum)

    def ramp(first: float, last: float, end: float) -> float:
        up = min(1.0, done / first) if first else 1.0
        down = min(1.0, (1.0 - done) / last) if last else 1.0
        return up * (end + (1 - end) * down)

    rate = learning_rate * ramp(outer.warmup, outer.decay, 0.1)
    return np.float32(rate), np.float32(momentum * ramp(outer.momentum_warmup, outer.momentum_decay, 0.0))


class Errors:
    """What each site has left over, whichever start of it, by the numbers in the commit records."""

    def __init__(self, layout: Layout, settings: RunSettings) -> None:
        self._layout, self._sync = layout, settings.sync
        self._left: dict[tuple[int, int], tuple[int, int, F32]] = {}  # by site and chunk: commit, start and error
        self.num_of_earlier_starts = 0
        """Of chunks, that were added to a contribution of a later start."""

    def added(self, commit: Commit, place: int, chunk: Chunk, delta: F32) -> F32:
        """To the pseudo-gradient of the contributor at that place."""
        if not self._sync.error_feedback:
            assert not commit.error_commits
            return delta
        covered = self._sync.fragments_in(commit.fragment)
        said = commit.error_commits[place * len(covered) : (place + 1) * len(covered)]
        number = said[covered.index(self._layout.fragment_of[chunk.index])]
        if not number:
            return delta
        member = commit.contributors[place]
        at, start, left = self._left.get((member.site_id, chunk.index), (0, 0, delta))
        if at != number:
            raise AssertionError(
                f"site {member.site_id} says in commit {commit.commit} that its error feedback of chunk {chunk.index} "
                f"is of commit {number}; it contributed last to commit {at}"
            )
        self.num_of_earlier_starts += start != member.incarnation
        return delta + np.float32(self._sync.error_feedback) * left

    def keep(self, commit: Commit, place: int, chunk: Chunk, left: F32) -> None:
        member = commit.contributors[place]
        self._left[member.site_id, chunk.index] = commit.commit, member.incarnation, left


AttemptName = tuple[int, int, int]
"""Sync, term, attempt."""


@dataclass(frozen=True, slots=True)
class Average:
    """That of a chunk in an attempt, as its reducer was seen to make it."""

    reducer: int
    """The number of the start of a node."""
    added: AttemptName | None
    """Whose error was added."""


class ErrorsOfAverages:
    """What each reducer has left over of the averages in the commits: it is added to the next average of a chunk where
    the same start of a node makes it, and to no other."""

    def __init__(
        self,
        settings: RunSettings,
        length: LogLength,
        averaged: Mapping[tuple[int, int, int, int], Average],
        *,
        went_back: bool,
    ) -> None:
        self._sync = settings.sync
        self._length, self._num_bytes = length, dict[int, int]()  # of commits
        self._averaged = averaged
        self._went_back = went_back
        """Errors of commits before may be gone."""
        self._left: dict[int, tuple[int, AttemptName, int, F32]] = {}  # by chunk: commit, attempt, reducer, error
        self.num_added = 0

    def through(self, commit: Commit, chunk: Chunk, average: F32, codec: str) -> F32:
        """What arrives of that average."""
        if not self._sync.error_feedback_down or not len(average):
            return _through(codec, average)
        self._num_bytes[commit.commit] = self._length.bytes_of(commit)
        name = commit.sync, commit.term, commit.attempt
        made = self._averaged[*name, chunk.index]
        number, before, reducer, left = self._left.get(chunk.index, (0, None, 0, average))
        where = f"commit {commit.commit}, chunk {chunk.index}"
        if made.added is not None:
            if (made.added, made.reducer) != (before, reducer):
                raise AssertionError(f"{where}: the error of {made.added} is added; the commit before is {before}")
            average = average + np.float32(self._sync.error_feedback_down) * left
            self.num_added += 1
        elif (
            made.reducer == reducer
            and not self._went_back
            and not self._counts_no_more(before, commit)
            and commit.commit - number < self._length.num_kept(commit.commit - 1, self._num_bytes)
        ):
            raise AssertionError(f"{where}: the error of the same reducer's average in {before} is not added")
        if self._sync.audits and made.added is not None and self._counts_no_more(before, commit):
            raise AssertionError(f"{where}: the error of {before} is added, of another start of the coordinator")
        arrived = _through(codec, average)
        self._left[chunk.index] = commit.commit, name, made.reducer, average - arrived
        return arrived

    def _counts_no_more(self, before: AttemptName | None, commit: Commit) -> bool:
        """With audits, errors of averages under another start of the coordinator, which heard no word of them."""
        return bool(self._sync.audits) and before is not None and before[1] != commit.term


def trained(part: Part, chunk: Chunk, states: Sequence[Records], learned: Mapping[Step, F32], *, bf16: bool) -> F32:
    """What a snapshot holds of a fragment: the outer values that the site was given last, and what its steps changed
    since the snapshot before. Where it mixed, the local copy of then has a part in them: that snapshot and the steps
    since."""

    def outer(commit: int) -> F32:
        return np.frombuffer(states[commit][chunk.index][: chunk.num_bytes], "<f4")

    base, mixed = outer(part.base), part.mixed
    if mixed is None:
        return sum((learned[s] for s in part.steps), to_bf16(base) if bf16 else base)
    before = sum((learned[s] for s in mixed.steps), np.frombuffer(cut_out(mixed.snapshot, chunk), "<f4"))
    start = np.float32(mixed.alpha) * before + np.float32(1 - mixed.alpha) * outer(mixed.version)
    start = start + (base - outer(mixed.version))  # shifts since
    return sum((learned[s] for s in part.steps if s not in mixed.steps), start)


def _norm(codec: str, values: F32) -> float:
    """As the reducer measures it, of a codec that carries all values."""
    if codec in SPARSE or not len(values):
        return 0.0
    encoded = kernels.encode(codec, np.ascontiguousarray(values))
    return kernels.accumulate(encoded, codec, np.float32(1), np.zeros(len(values), np.float32))


def _through(codec: str, values: F32, parts: list[Sent] | None = None) -> F32:
    """What arrives of `values`. `parts`: where that of a codec that carries some of them is added."""
    out = np.zeros(len(values), np.float32)
    if len(values):
        encoded = kernels.encode(codec, np.ascontiguousarray(values))
        kernels.decode(encoded, codec, len(values), out)
        if codec in SPARSE and parts is not None:
            parts.append(decode_sparse(codec, encoded[HEADER_BYTES:], len(values)))
    return out
