"""Golden vectors of the codecs, the same as in docs/protocol.md: little-endian bytes in hexadecimal.

Each has 16 fp32 `values` and `minus`, the encoded `values - minus`, and `acc + weight * decoded` for each codec.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecVector:
    name: str
    values: str
    minus: str
    weight: str
    acc: str
    encoded: dict[str, str]
    accumulated: dict[str, str]


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
        encoded={
            "fp32": (
                "010100010000000010000000000000000000803f0080803f0080813fabaaaabe00000000000000800a79c63fe1d9abbf"
                "998a823f4a60e4bf959863bfc874623f2fb168bf659732be4afb58bd1c781c3f"
            ),
            "bf16": "01020001000000001000000000000000803f803f823fabbe00000080c63facbf833fe4bf64bf623f69bf33be59bd1c3f",
            "int8": "01030001000200001000000000000000a32c663c474748e800006ea04981c13fbff4fc2c",
        },
        accumulated={
            "fp32": (
                "4254a33f5ca1493fc6935f3f605ac43e1132f93fe485543e2d4390bffd5b7dbf300d36bd0fb780bf7a6a263f4211a33f"
                "e0b581bf52de473f689cb0bf22f80ebf"
            ),
            "bf16": (
                "4254a33f064c493f1ce95f3fef3dc43e1132f93fe485543e866b90bf67757dbfe82831bdf69680bf0148263fccfda23f"
                "03c381bf9ad5473f759cb0bf2c200fbf"
            ),
            "int8": (
                "8238a33f8814493f2e8f5f3fc6b2c33e1132f93fe485543e127c90bf0ee17dbf08442ebd0fb780bf5cc1263f7416a33f"
                "e6e381bf7b5d483f96bfb0bf9c600ebf"
            ),
        },
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
        encoded={
            "fp32": (
                "010100010000000010000000000000000000fe03000040000000c000000020010000c0800000fc830000800000000000"
                "010000000400008001004000f3410f0045420f80000000000100000002000000"
            ),
            "bf16": "01020001000000001000000000000000fe034000c0002001c080fc83800000000000008040000f000f80000000000000",
            "int8": "01030001000200001000000000000000000080007f000202fe8201000000010000000000",
        },
        accumulated={
            "fp32": (
                "64672703a75741005b461a8051e337003382da80d5aa2a8343ff35006a37090042431f00ce2a09805e1a07803821bf00"
                "96bb58810b3fa58049a30481ce339780"
            ),
            "bf16": (
                "64672703a75741005b461a8051e337003382da80d5aa2a8343ff35006a37090042431f00cd2a09805f1a07803c0bbf00"
                "8ab058810b3fa58049a30481cf339780"
            ),
            "int8": (
                "6467270352022c0005f10480fc8d220089d7ef80d5aa2a8343ff35006a37090042431f00cd2a0980f73a0e003c0bba00"
                "8a3056810b3fa58049a30481cf339780"
            ),
        },
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
        encoded={
            "fp32": (
                "010100010000000010000000000000000000fc836666da83cdccb8833333978333336b83000028839a99c98266660682"
                "666606029a99c9020000280333336b0333339703cdccb8036666da030000fc03"
            ),
            "bf16": "01020001000000001000000000000000fc83da83b98397836b832883ca8206820602ca0228036b039703b903da03fc03",
            "int8": "010300010002000010000000000000000000000000000000000000000000000000000000",
        },
        accumulated={
            "fp32": (
                "acb4228323d40f83107ded826cf1cc82c5b4918274f56282362b0b82219ca080ca1f3501f89303025ad06302811b9102"
                "2cd6d0020e630103ed9a120390902503"
            ),
            "bf16": (
                "acb42283df8f0f8354c1ed8228adcc82a392918274f562827a6f0b82118b9f80429734013cd803025ad063025ff99002"
                "e891d00230850103a956120390902503"
            ),
            "int8": (
                "736aa900d4ae380075958e00237d35808480b1009cab17807a26268045cac5002fd9030078931680cc821e00c714bb80"
                "1fc973004dfbc500562a2000f8ed4d80"
            ),
        },
    ),
)
