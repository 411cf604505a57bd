"""fp32: the values as they are."""

from __future__ import annotations

import numpy as np

from atoll.protocol.codecs import arithmetic
from atoll.protocol.codecs.arithmetic import Arithmetic, Bytes, Floats, Golden


def _encode(values: Floats, minus: Floats | None, body: Bytes) -> bool:
    out = body.view(np.float32)
    if minus is None:
        out[:] = values
    else:
        arithmetic.subtract(values, minus, out)
    return arithmetic.is_finite(out)


def _decode(body: Bytes, out: Floats) -> None:
    out[:] = body.view(np.float32)


def _accumulate(body: Bytes, weight: np.float32, acc: Floats) -> float:
    return arithmetic.add_with_norm(body.view(np.float32), weight, acc)


def _check(body: Bytes, below: float) -> None:
    arithmetic.refuse_if(arithmetic.largest(body.view(np.float32)) >= arithmetic.bits_of(below), below)


ARITHMETIC = Arithmetic(
    encode=_encode,
    decode=_decode,
    accumulate=_accumulate,
    check=_check,
    golden=(
        Golden(
            "010100010000000010000000000000000000803f0080803f0080813fabaaaabe00000000000000800a79c63fe1d9abbf"
            "998a823f4a60e4bf959863bfc874623f2fb168bf659732be4afb58bd1c781c3f",
            "4254a33f5ca1493fc6935f3f605ac43e1132f93fe485543e2d4390bffd5b7dbf300d36bd0fb780bf7a6a263f4211a33f"
            "e0b581bf52de473f689cb0bf22f80ebf",
        ),
        Golden(
            "010100010000000010000000000000000000fe03000040000000c000000020010000c0800000fc830000800000000000"
            "010000000400008001004000f3410f0045420f80000000000100000002000000",
            "64672703a75741005b461a8051e337003382da80d5aa2a8343ff35006a37090042431f00ce2a09805e1a07803821bf00"
            "96bb58810b3fa58049a30481ce339780",
        ),
        Golden(
            "010100010000000010000000000000000000fc836666da83cdccb8833333978333336b83000028839a99c98266660682"
            "666606029a99c9020000280333336b0333339703cdccb8036666da030000fc03",
            "acb4228323d40f83107ded826cf1cc82c5b4918274f56282362b0b82219ca080ca1f3501f89303025ad06302811b9102"
            "2cd6d0020e630103ed9a120390902503",
        ),
    ),
)
