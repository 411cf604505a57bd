"""int8 and sign1 on a GPU, as `gpu.py` measures them: the bits of the node's kernels (protocol/codecs/)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from atoll.protocol.codecs.table import INT8, SIGN1

Encoder = Callable[[Tensor, Tensor], Tensor]
"""Of 1-D fp32 values and what is subtracted: the body, uint8."""
SMALLEST_NORMAL = 2.0**-126
LANES = 16


def _blocks(values: Tensor, minus: Tensor, block: int) -> Tensor:
    values = values - minus
    return F.pad(values, (0, -values.numel() % block)).view(-1, block)


def int8(values: Tensor, minus: Tensor) -> Tensor:
    blocks = _blocks(values, minus, INT8.block)
    top = blocks.abs().amax(1)
    # By a tensor: with a number torch multiplies by its reciprocal, which is another result.
    scales = top / torch.full_like(top, 127.0)
    scales[scales < SMALLEST_NORMAL] = 0
    quants = torch.where(scales[:, None] > 0, blocks / scales[:, None], 0.0).round_().to(torch.int8)
    return torch.cat((scales.view(torch.uint8), quants.view(torch.uint8).view(-1)[: values.numel()]))


def sign1(values: Tensor, minus: Tensor) -> Tensor:
    """Of whole blocks."""
    blocks = _blocks(values, minus, SIGN1.block)
    magnitudes = blocks.abs().view(len(blocks), -1, LANES)
    lanes = torch.zeros_like(magnitudes[:, 0])
    for i in range(magnitudes.shape[1]):
        lanes += magnitudes[:, i]
    half = LANES // 2
    while half:
        lanes = lanes[:, :half] + lanes[:, half : 2 * half]
        half //= 2
    scales = lanes[:, 0] / torch.full_like(lanes[:, 0], float(SIGN1.block))
    scales[scales < SMALLEST_NORMAL] = 0
    signs = ((blocks.view(torch.int32) < 0) & (scales[:, None] > 0)).view(len(blocks), 8, -1)
    packed = torch.zeros_like(signs[:, 0], dtype=torch.uint8)
    for plane in range(8):
        packed |= signs[:, plane].to(torch.uint8) << plane
    return torch.cat((scales.view(torch.uint8), packed.view(-1)))


ENCODERS: dict[str, Encoder] = {"int8": int8, "sign1": sign1}
