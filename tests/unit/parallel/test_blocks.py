"""Attention of one block, by matrix products as on devices that have no kernel for it, and by the one for CPUs."""

from __future__ import annotations

import pytest
import torch

from atoll.node.parallel.blocks import Block, BlockOnCpu, attention, block_of


@pytest.mark.parametrize(("num_keys", "is_diagonal"), [(5, True), (5, False), (3, False)])
def test_matrix_products_and_the_kernel_agree(num_keys: int, is_diagonal: bool) -> None:
    torch.manual_seed(1)
    q, d_out = torch.randn(2, 2, 4, 5, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 4, num_keys, 8, dtype=torch.float64)
    one, other = Block(q, k, v, is_diagonal), BlockOnCpu(q, k, v, is_diagonal)
    results = one.attention(), other.attention()
    torch.testing.assert_close(*results, rtol=0, atol=1e-14)
    # As of a block among others: more weights, and another result.
    out, log_sum = results[0]
    out, log_sum = out * 0.5, log_sum + 0.7
    torch.testing.assert_close(
        one.gradients(d_out, out, log_sum), other.gradients(d_out, out, log_sum), rtol=0, atol=1e-14
    )


def test_matrix_products_are_computed_in_fp32() -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out, log_sum = Block(q, k, v, is_diagonal=True).attention()
    assert out.dtype == log_sum.dtype == torch.float32
    torch.testing.assert_close(out, attention(q, k, v), rtol=0, atol=1e-6)


def test_query_heads_use_keys_in_groups() -> None:
    torch.manual_seed(1)
    q, kv = torch.randn(1, 6, 4, 8), torch.randn(2, 1, 2, 4, 8)
    k, v = kv
    found = attention(q, k, v)
    for head in range(6):
        group = slice(head // 3, head // 3 + 1)
        one = attention(q[:, head : head + 1], k[:, group], v[:, group])
        torch.testing.assert_close(found[:, head : head + 1], one, rtol=0, atol=1e-6)
    assert block_of(q, k, v, is_diagonal=False).k.shape == q.shape
