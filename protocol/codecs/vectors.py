"""Golden vectors of the codecs, the same as in docs/protocol.md: little-endian bytes in hexadecimal.

What a codec makes of them is in its module: the encoded `values - minus`, and `acc + weight * decoded`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecVector:
    """16 fp32 numbers each."""

    name: str
    values: str
    minus: str
    weight: str
    acc: str


CODEC_VECTORS = (
    CodecVector(
        name="ordinary",
        values=(
            "0000803f0080803f0080813fabaaaabe0000000000000080e4cfc23f0f7292bf7f38933f846fe4bff18045bfe273823f"
            "28176dbf92dcd4be16d880bd6e64033f"
        ),
        minus=(
            "0000000000000000000000000000000000000000000000009249eabc913e4b3e2d6f053edba5f3b91dbdf03deecb093e"
            "25bf8cbcbf2177be89d322bc6f9dc8bd"
        ),
        weight="abaaaa3e",
        acc=(
            "2e53713f62ede73e713e093fef3dfd3e1132f93fe485543e866bd2bfbcca0abfc8cfc4bed85bd2be0148723f42a67a3f"
            "5bdb35bf45c0563fca59aebf2c2043bf"
        ),
    ),
    CodecVector(
        name="subnormal",
        values=(
            "0000fe03000040000000c000000020010000c0800000fc83000080000000000001000000030000800000400040420f00"
            "40420f80070000000000000005000000"
        ),
        minus=(
            "00000000000000000000000000000000000000000000000000000000000000000000000001000000010000804d000000"
            "05000000070000000100008003000000"
        ),
        weight="abaaaa3e",
        acc=(
            "3abe3d8052022c005b465a805ac7328033829a80ae5a558098540b006a37090042431f00cd2a0980b46f1c803c0bba00"
            "8a3056810b3fa58049a30481cf339780"
        ),
    ),
    CodecVector(
        name="below",
        values=(
            "0000fc836666da83cdccb8833333978333336b83000028839a99c98266660682666606029a99c9020000280333336b03"
            "33339703cdccb8036666da030000fc03"
        ),
        minus=(
            "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
            "00000000000000000000000000000000"
        ),
        weight="abaaaa3e",
        acc=(
            "736aa900d4ae380075958e00237d35808480b1009cab17807a26268045cac5002fd9030078931680cc821e00c714bb80"
            "1fc973004dfbc500562a2000f8ed4d80"
        ),
    ),
)
