"""The outer update of one chunk without numpy, bit for bit what the sites compute: it settles disputes over a state.

Arrays of floats hold fp32, and arithmetic on what comes out of them is fp64. The product of two fp32 numbers is exact
in fp64, and a sum rounded to fp64 and then to fp32 is the sum rounded to fp32 (53 >= 2 * 24 + 2 bits), so putting one
result at a time back into an array is what fp32 arithmetic gives. tests/unit/dataplane/test_recompute.py compares.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence

from atoll.protocol.codecs import HEADER_BYTES, EncodedHeader, bundles, parse_header
from atoll.protocol.codecs.compression import decompressed
from atoll.protocol.codecs.table import BUNDLE, TABLE, UNCHANGED, floats, to_bytes
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.layout import DTYPE_BYTES, FP32_ROLES, Role
from atoll.protocol.outer import OuterStep
from atoll.protocol.outer_settings import AUTO, OuterSettings
from atoll.protocol.spec import payload_codec

_AT_ONCE = 1 << 16  # elements: what is computed in between takes memory for so many
_SLOTS = {"sgd": (), "nesterov": ("momentum",), "adamw": ("momentum", "variance"), "signsgd": ()}


def slots_of(outer: OuterSettings | OuterStep) -> tuple[str, ...]:
    """What the outer optimizer keeps beside the values of a trainable chunk, in this order."""
    assert outer.optimizer != AUTO, "it is chosen as the run begins"
    return _SLOTS[outer.optimizer]


def record_bytes(role: Role, dtype: str, num_elements: int, settings: OuterSettings | OuterStep) -> int:
    """Of a chunk's record: its values, and its slots if it is trained."""
    if role is Role.TRAINABLE:
        return 4 * num_elements * (1 + len(slots_of(settings)))
    return num_elements * (4 if role in FP32_ROLES else DTYPE_BYTES[dtype])


def recomputed(
    *,
    role: Role,
    dtype: str,
    num_elements: int,
    step: OuterStep,
    record: bytes,
    payload: bytes,
    tokens: Sequence[int] = (),
) -> bytes:
    """The record after the commit whose `payload` and weights it is, from the `record` before it. `dtype` is the
    tensor's own.

    Raises InvalidMessage if they are not of such a chunk.
    """
    if len(record) != record_bytes(role, dtype, num_elements, step):
        raise InvalidMessage(f"a record of {len(record)} bytes, which is no such chunk's")
    carried = dtype if role is Role.BUFFER_LOWEST else "F32"
    codec = payload_codec(role, payload)
    if codec == BUNDLE:
        return _moved(record, bundles.plain(payload, num_elements, tokens), step)
    header = parse_header(payload, codec=codec, num_elements=num_elements, dtype=carried)
    if codec == UNCHANGED:
        return record
    body, plain = _body(payload, header), TABLE[codec].plain
    if role is not Role.TRAINABLE or plain is None:
        return body
    return _moved(record, plain(body, num_elements), step)


def _moved(record: bytes, average: array[float], step: OuterStep) -> bytes:
    values = floats(record[: 4 * len(average)])
    rate = array("f", [step.learning_rate])[0]
    if step.optimizer == "sgd":
        return to_bytes(_sgd(values, average, rate))
    if step.optimizer == "signsgd":
        return to_bytes(_signsgd(values, average, rate, array("f", [step.weight_decay])[0]))
    momentum = floats(record[4 * len(values) : 8 * len(values)])
    if step.optimizer == "nesterov":
        return _nesterov(values, momentum, average, rate, array("f", [step.momentum])[0])
    return _adamw(values, momentum, floats(record[8 * len(values) :]), average, step)


def _sgd(values: array[float], average: array[float], rate: float) -> array[float]:
    out = array("f")
    for first in range(0, len(values), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        out.extend(_minus(values[part], _times(rate, average[part])))
    return out


def _signsgd(values: array[float], average: array[float], rate: float, decay: float) -> array[float]:
    out = array("f")
    for first in range(0, len(values), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        signs = array("f", [(d > 0) - (d < 0) for d in average[part]])
        out.extend(_minus(values[part], _times(rate, _plus(signs, _times(decay, values[part])))))
    return out


def _nesterov(values: array[float], momentum: array[float], average: array[float], rate: float, mu: float) -> bytes:
    out_values, out_momentum = array("f"), array("f")
    for first in range(0, len(values), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        moved = _plus(_times(mu, momentum[part]), average[part])
        out_momentum.extend(moved)
        step = _plus(average[part], _times(mu, moved))
        out_values.extend(_minus(values[part], _times(rate, step)))
    return to_bytes(out_values) + to_bytes(out_momentum)


def _adamw(
    values: array[float], momentum: array[float], variance: array[float], average: array[float], step: OuterStep
) -> bytes:
    beta1, beta2 = step.momentum, step.beta2
    rate, decay, b1, c1, b2, c2, bias1, bias2, epsilon = array(
        "f",
        [step.learning_rate, step.weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, *step.bias, step.epsilon],
    )
    out_values, out_momentum, out_variance = array("f"), array("f"), array("f")
    for first in range(0, len(values), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        x, m, v = values[part], average[part], variance[part]
        if not step.is_frozen:
            squares = array("f", [a * a for a in average[part]])
            m = _plus(_times(b1, momentum[part]), _times(c1, average[part]))
            v = _plus(_times(b2, variance[part]), _times(c2, squares))
        up = array("f", [a / bias1 for a in m])
        down = array("f", [math.sqrt(a) for a in array("f", [a / bias2 for a in v])])
        down = array("f", [a + epsilon for a in down])
        moved = array("f", [a / b for a, b in zip(up, down, strict=True)])
        if step.is_frozen:
            moved = array("f", [min(1.0, max(-1.0, a)) for a in moved])
        out_values.extend(_minus(x, _times(rate, _plus(moved, _times(decay, x)))))
        out_momentum.extend(m)
        out_variance.extend(v)
    return b"".join(map(to_bytes, (out_values, out_momentum, out_variance)))


def _times(factor: float, values: Iterable[float]) -> array[float]:
    return array("f", [factor * value for value in values])


def _plus(values: array[float], more: array[float]) -> array[float]:
    return array("f", [a + b for a, b in zip(values, more, strict=True)])


def _minus(values: array[float], less: array[float]) -> array[float]:
    return array("f", [a - b for a, b in zip(values, less, strict=True)])


def _body(payload: bytes, header: EncodedHeader) -> bytes:
    """After zstd and byte planes. Nothing is allocated before sizes are checked."""
    if not header.zstd:
        return payload[HEADER_BYTES:]
    size, planes = header.body_bytes, TABLE[header.codec].planes
    body = decompressed(memoryview(payload)[HEADER_BYTES:], size)
    if planes == 1:
        return body
    joined = bytearray(size)
    for plane in range(planes):
        joined[plane::planes] = body[plane * (size // planes) : (plane + 1) * (size // planes)]
    return bytes(joined)
