"""Encoding, decoding and averaging of chunks by the table of codecs: what all of them have in common.

Formulas and test vectors are in docs/protocol.md, "Encoded chunks".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.protocol.codecs import (
    HEADER_BYTES,
    Data,
    EncodedHeader,
    bundles,
    golden,
    max_encoded_bytes,
    parse_header,
    scratch,
)
from atoll.protocol.codecs.arithmetic import (
    KERNELS,
    NOTHING,
    ONE,
    Arithmetic,
    Bytes,
    Floats,
    Terms,
    over_weights,
)
from atoll.protocol.codecs.compression import compressed, decompressed
from atoll.protocol.codecs.jit import compile_all
from atoll.protocol.codecs.sparse_arithmetic import SparseArithmetic
from atoll.protocol.codecs.table import BUNDLE, CODECS, DENSE, SPARSE, TABLE, UNCHANGED
from atoll.protocol.digest import Digest
from atoll.protocol.errors import InvalidMessage, NonFiniteError
from atoll.protocol.layout import DTYPE_BYTES

ARITHMETIC: dict[str, Arithmetic] = {
    name: import_module(f"atoll.protocol.codecs.{name}").ARITHMETIC for name in (*DENSE, "raw")
}
_WHOLE = bundles.Weight(1.0, 1.0)
SPARSE_ARITHMETIC: dict[str, SparseArithmetic] = {
    name: import_module(f"atoll.protocol.codecs.{name}").ARITHMETIC for name in SPARSE
}


def warm_up() -> None:
    """Compiles every kernel, or loads it from the cache. Safe from any thread."""
    of_codecs = [arithmetic.kernels for arithmetic in ARITHMETIC.values()]
    of_codecs += [arithmetic.kernels for arithmetic in SPARSE_ARITHMETIC.values()]
    compile_all(chain(KERNELS, *of_codecs))


def encode(
    codec: str,
    values: npt.NDArray[Any],
    *,
    minus: Floats = NOTHING,
    error: Floats = NOTHING,
    beta: np.float32 = ONE,
    zstd_level: int | None = None,
    dtype: str = "F32",
    width: int = 0,
) -> bytes:
    """`(values - minus) + beta * error` as an encoded chunk; what is empty is left out.

    All are 1-D fp32 and contiguous; for codec raw `values` are the uint8 bytes of elements of `dtype`. Raises
    NonFiniteError (without the tensor's name, which the caller knows) if a value is not finite, or would not be when
    it is decoded. `zstd_level`: in place of the one in the table, of a dense codec. `width`: of the chunk's rows, for a
    codec that goes through its tiles.
    """
    row = TABLE[codec]
    level = row.zstd_level if zstd_level is None or row.sparse is not None else zstd_level
    num_elements = values.nbytes // DTYPE_BYTES[dtype]
    out = scratch.array("encoded", max_encoded_bytes(codec, num_elements, DTYPE_BYTES[dtype]))
    body = out[HEADER_BYTES:]
    terms = Terms(values, minus, error, np.float32(beta))
    columns = 0 if row.sparse is None else row.sparse.columns_of(width, num_elements)
    if not _fill(codec, terms, columns, body):
        raise NonFiniteError(f"a value is not finite, or too large for {codec}")
    header = EncodedHeader(codec=codec, zstd=False, dtype=dtype, num_elements=num_elements, columns=columns)
    if level:
        small = compressed(_split(body, row.planes).data, level)
        if len(small) < body.size:
            return replace(header, zstd=True).pack() + small
    out[:HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
    return out.tobytes()


def _fill(codec: str, terms: Terms, columns: int, body: Bytes) -> bool:
    if codec in SPARSE_ARITHMETIC:
        return SPARSE_ARITHMETIC[codec].encode(terms, columns, body)
    return ARITHMETIC[codec].encode(terms, body)


def _split(body: Bytes, planes: int) -> Bytes:
    if planes == 1:
        return body
    out = scratch.array("planes", body.size).reshape(planes, -1)
    for plane in range(planes):
        out[plane] = body[plane::planes]
    return out.reshape(-1)


def _joined(body: Bytes, planes: int) -> Bytes:
    if planes == 1:
        return body
    out = scratch.array("joined", body.size)
    for plane, part in enumerate(body.reshape(planes, -1)):
        out[plane::planes] = part
    return out


def _body(data: Data, header: EncodedHeader) -> Bytes:
    """The body after zstd and byte planes, aligned to 4 bytes. Nothing is allocated before sizes are checked."""
    body: Bytes = np.frombuffer(data, np.uint8, offset=HEADER_BYTES)
    if header.zstd:
        raw = decompressed(body.data, header.body_bytes)
        return _joined(np.frombuffer(raw, np.uint8), TABLE[header.codec].planes)
    return body.copy() if body.ctypes.data % 4 else body


def without_zstd(payload: Data, codec: str, num_elements: int) -> Data:
    """The payload of so many elements as `codec` leaves it before zstd, of which two versions make other bytes of one
    body. As it is, if `codec` has no such stage, or it is no such payload."""
    if not TABLE[codec].zstd_level:
        return payload
    try:
        header = parse_header(payload, codec=codec, num_elements=num_elements)
        return replace(header, zstd=False).pack() + _body(payload, header).tobytes()
    except InvalidMessage:
        return payload


def check(
    data: Data,
    codec: str,
    num_elements: int,
    dtype: str = "F32",
    *,
    below: float = math.inf,
    width: int | None = None,
) -> None:
    """Raises InvalidMessage unless `data` is such an encoded chunk, or such a bundle, and all that it decodes to is
    finite, and smaller than the power of two `below`; codec raw carries no numbers. `width`: of the chunk's rows, if it
    is known: what goes through tiles has gone through those."""
    if codec == BUNDLE:
        bundle = bundles.split(data, num_elements)
        for part in bundle.contributions:
            check(part, bundle.codec, num_elements, below=below, width=width)
        return
    header, sparse = parse_header(data, codec=codec, num_elements=num_elements, dtype=dtype), TABLE[codec].sparse
    if sparse is not None and width is not None:
        columns = sparse.columns_of(width, num_elements)
        if header.columns != columns:
            raise InvalidMessage(f"encoded chunk: {header.columns} columns, the layout's chunk has {columns}")
    if codec in SPARSE_ARITHMETIC:
        SPARSE_ARITHMETIC[codec].check(_body(data, header), num_elements, below)
    elif codec != UNCHANGED:
        ARITHMETIC[codec].check(_body(data, header), below)


def decode(
    data: Data, codec: str, num_elements: int, out: npt.NDArray[Any], dtype: str = "F32", *, tokens: Sequence[int] = ()
) -> None:
    """Writes the values of an encoded chunk into `out`: fp32, or for codec raw the uint8 bytes; of a bundle the average
    with the weights `tokens`.

    Raises InvalidMessage if `data` is not such a chunk.
    """
    if codec == BUNDLE:
        bundle = bundles.split(data, num_elements)
        weighed = bundle.weighed(tokens, lambda part: norm_of(part, bundle.codec, num_elements))
        _sum_of(bundle.codec, bundle.columns, weighed, out, over_all=bundle.over_all)
        return
    header = parse_header(data, codec=codec, num_elements=num_elements, dtype=dtype)
    if codec in SPARSE_ARITHMETIC:
        _sum_of(codec, header.columns, [(_WHOLE, data)], out, over_all=True)
    else:
        ARITHMETIC[codec].decode(_body(data, header), out)


def accumulate(data: Data, codec: str, weight: np.float32, acc: Floats) -> float:
    """`acc = acc + weight * value` with `value = scale * quant` for int8; each operation rounded to fp32 by itself. Not
    of a codec that carries some of the values: those are bundled.

    Returns the norm of the values, the root of the sum of their squares: a measure, not the same bits everywhere.
    Raises InvalidMessage if `data` is not an encoded chunk of `acc.size` fp32 values; `acc` is then unchanged.
    """
    header = parse_header(data, codec=codec, num_elements=acc.size)
    return ARITHMETIC[codec].accumulate(_body(data, header), np.float32(weight), acc)


def norm_of(data: Data, codec: str, num_elements: int, *, below: float = math.inf) -> float:
    """Of the values of a codec that carries some of them: the same bits everywhere. At least a scale that is
    not smaller than `below`, also one that no value has. Raises InvalidMessage."""
    header = parse_header(data, codec=codec, num_elements=num_elements)
    norm = _scatter(header, data, _WHOLE, NOTHING, NOTHING)
    largest = 0.0 if below == math.inf else SPARSE_ARITHMETIC[codec].largest_scale(_body(data, header), num_elements)
    return norm if largest < below else max(norm, largest)


def _sum_of(
    codec: str, columns: int, parts: Sequence[tuple[bundles.Weight, Data]], out: Floats, *, over_all: bool
) -> None:
    """Of contributions, each with its weight: their sum, or where there is one of them, that over the weights."""
    finish = SPARSE_ARITHMETIC[codec].finish
    summed = out if finish is None else _room("sums", codec, out.size)
    weights = NOTHING if over_all else _room("weights", codec, out.size)
    for array in (summed, weights):
        array.fill(0)
    for weight, part in parts:
        header = parse_header(part, codec=codec, num_elements=out.size)
        _scatter(header, part, weight, summed, weights)
    if not over_all:
        over_weights(weights, summed)
    if finish is not None:
        finish(summed, columns, out)


def _room(purpose: str, codec: str, num_elements: int) -> Floats:
    sparse = TABLE[codec].sparse
    assert sparse is not None
    return scratch.floats(purpose, sparse.num_values(num_elements))


def _scatter(header: EncodedHeader, data: Data, weight: bundles.Weight, acc: Floats, weights: Floats) -> float:
    both = np.float32(weight.of_values), np.float32(weight.of_site)
    body, arithmetic = _body(data, header), SPARSE_ARITHMETIC[header.codec]
    return arithmetic.scatter(body, header.num_elements, header.columns, *both, acc, weights)


# --- self-test

_NUM_ELEMENTS = 1040
"""Whole blocks of int8 and a rest go through the vector units."""
_NUM_TILED, _TILED_COLUMNS = 8, 128
"""As often one after the other they make 65 rows: tiles of 64 and of one."""
_SPARSE_KINDS = ("ordinary", "subnormal")
"""A transform takes its time, and each start of a node waits for it."""
_WEIGHT = np.float32(1 / 3)
_BETA = np.float32(0.9)


def self_test() -> None:
    """Raises SelfTestFailed if this host computes other bits than the golden results, subnormal numbers included."""
    for codec in CODECS:
        golden.compare(f"codec {codec}", results(codec), _golden(codec))


def _golden(codec: str) -> str:
    return SPARSE_ARITHMETIC[codec].golden if codec in SPARSE_ARITHMETIC else ARITHMETIC[codec].golden


def results(codec: str) -> Digest:
    """What this host makes of all kinds of numbers: encoded, averaged, and decoded behind zstd."""
    found, is_sparse = Digest("atoll/codec-results/v1"), codec in SPARSE_ARITHMETIC
    for kind in _SPARSE_KINDS if is_sparse else golden.KEPT_BITS:
        values, minus, acc, error = np.tile(golden.numbers(kind, 4, _NUM_ELEMENTS), _NUM_TILED if is_sparse else 1)
        plain = partial(encode, codec, zstd_level=0)  # what zstd makes of it may differ from version to version
        data = plain(values, minus=minus)
        if is_sparse:
            header, third = parse_header(data, codec=codec, num_elements=values.size), bundles.Weight(1 / 3, 1 / 3)
            _scatter(header, data, third, acc, NOTHING)
        else:
            accumulate(data, codec, _WEIGHT, acc)
        found.data(data).data(acc.tobytes()).data(plain(values, minus=minus, error=error, beta=_BETA))
        decoded, values = np.empty(values.size, np.float32), values - minus
        decode(encode(codec, values, zstd_level=1), codec, values.size, decoded)
        found.data(plain(values)).data(plain(values, error=error)).data(decoded.tobytes())
        if is_sparse:
            parts = [plain(values, width=_TILED_COLUMNS), plain(error, width=_TILED_COLUMNS)]
            decode(bundles.join(values.size, parts, over_all=False), BUNDLE, values.size, decoded, tokens=(3, 1))
            found.data(parts[0]).data(decoded.tobytes())
            clipped = bundles.join(values.size, [*parts, plain(minus, width=_TILED_COLUMNS)], over_all=False, clip=1.0)
            decode(clipped, BUNDLE, values.size, decoded, tokens=(3, 1, 2))
            found.data(decoded.tobytes())
    return found
