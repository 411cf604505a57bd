"""Golden vectors of the outer update, the same as in docs/protocol.md: little-endian fp32 in hexadecimal."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterVector:
    """16 values `x`, momenta `m` and averages `d`, and what each optimizer makes of them."""

    name: str
    learning_rate: str
    momentum: str
    x: str
    m: str
    d: str
    sgd_x: str
    nesterov_m: str
    nesterov_x: str


OUTER_VECTORS = (
    OuterVector(
        name="ordinary",
        learning_rate="3333333f",
        momentum="6666663f",
        x=(
            "d23e113f834808bf52716b3b30545a3ffa73f83ebe5ad2bf4dcbcc3e45d5d8beb4afaabe38ea1f40796ad63f1f4a1b3e"
            "ab804f3f5f9abdbffe51c73f2966ea3e"
        ),
        m=(
            "249ae9be2aea7a3d467d82bf241c80bfb25214be7a69233f3a00913ff392b23f4b10443f9f62cfbe29211440f757c53f"
            "9241a3bef7cd1f3fff3f36bf80328cbe"
        ),
        d=(
            "645fd0bdad3cf93ef757103f012e173fe0ed063fb96058be17f635be0467fb3e50d4c63f27f93fbf2ff0003fdbd5ec3e"
            "7348e63f12a4483f549ec73ecfe5b4be"
        ),
        sgd_x=(
            "5e7a233f26845fbfdd3dc8be9201e13e6835ee3de16bbfbf843d063f4a6844bf25dab5bf9f8241409c49a93fad4730be"
            "86c9e5bee6e901c01663a43f8383343f"
        ),
        nesterov_m=(
            "e32a03bf82bb0a3f0e13b5be18d69ebef01ccb3ee6f3b93ee282573f3591df3f6c870f40f7a58ebf178d25406fd1ec3f"
            "e68cc13f853bac3f766e80bea18919bf"
        ),
        nesterov_x=(
            "101d763f76759bbf5e542cbe5889223f70d108be7eb5dcbfc011c4bb100defbf6e5935c0c7716e40443a9dbefb3aabbf"
            "2e62b3bfba2a38c0719db83f079f8a3f"
        ),
    ),
    OuterVector(
        name="subnormal",
        learning_rate="3333333f",
        momentum="6666663f",
        x=(
            "d8b07180c8766f00c025750058d54e80f616c880818c4b004bbc11801b57a380b9373100b5f61c807833260044f70580"
            "42d97d0048da7a003d56128090295000"
        ),
        m=(
            "71898a0047dddf8061c519805310028016a85b8088ed02006fc041002ab57f80805a4880ac7d128056b5a280f0697d80"
            "142e320021e2b200021c9600761e4c00"
        ),
        d=(
            "d59bc9809adf6d8018247380554051802492488068f33680bac40b807c5fcb00bf642b80c41c618087f7580096ca1680"
            "d86e95002efe04008f031a0092785080"
        ),
        sgd_x=(
            "706f1b001a60bc0004bfc5001df51580434a9580b0037200627f0980c6d91881d8974f00d403270066131880f2fc0900"
            "de3e15008e5b7700ee8b2480f67d8800"
        ),
        nesterov_m=(
            "f0ec4c80faac1b81bc558a80d31b5380d10f9b80d450348077682f00a36f5800ff826c8012c1718079783980eea98780"
            "5098c200e5fca500c41ca100c2f60b80"
        ),
        nesterov_x=(
            "fde54b006d434001d6720e01a8661e00e69933802cf992005b5d278042b534819df493001aae6e0075210c00cd745f00"
            "6859658008c90e00220c8a807f079000"
        ),
    ),
)
