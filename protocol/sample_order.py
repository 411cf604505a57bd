"""The global order of samples: a keyed permutation of [0, N) for each pass. Pure; see docs/protocol.md.

A Feistel network over the smallest power of two that is not below N, walked until it lands below N. The same code
serves Python integers and numpy arrays of uint64: no product exceeds 64 bits.
"""

from __future__ import annotations

from typing import Any

from atoll.protocol.digest import Digest

GLOBAL_LINE = 0
"""The line of positions that all sites share. With data = "local" each site has its own, named by its site id."""
MAX_SAMPLES = 1 << 48
MAX_POSITION = 1 << 62
NUM_ROUNDS = 8
_MASK = 0xFFFFFFFF


class SampleOrder:
    """Which sample a position is: position `p` is sample `(p // num_samples, p % num_samples)` as (pass, index)."""

    def __init__(self, seed: int, line: int, num_samples: int) -> None:
        if not 0 < num_samples <= MAX_SAMPLES:
            raise ValueError(f"an order of {num_samples} samples")
        self.seed = seed
        self.line = line
        self.num_samples = num_samples
        bits = max(2, (num_samples - 1).bit_length())
        self._low_bits = bits // 2
        self._high_bits = bits - bits // 2
        self._keys: dict[int, tuple[int, ...]] = {}

    def keys(self, number_of_pass: int) -> tuple[int, ...]:
        """Of the rounds of one pass, 32 bits each."""
        found = self._keys.get(number_of_pass)
        if found is None:
            digest = Digest("atoll/sample-order/v1").uint(self.seed).uint(self.line).uint(self.num_samples)
            data = digest.uint(number_of_pass).finish()
            found = tuple(int.from_bytes(data[i : i + 4], "little") for i in range(0, 4 * NUM_ROUNDS, 4))
            if len(self._keys) > 1:
                self._keys.clear()  # a batch spans two passes at most, as a rule
            self._keys[number_of_pass] = found
        return found

    def permuted(self, number_of_pass: int, value: Any) -> Any:
        """One walk of the network: a permutation of [0, 2**bits). `value`: int, or an array of uint64."""
        low_mask, high_mask = (1 << self._low_bits) - 1, (1 << self._high_bits) - 1
        keys = self.keys(number_of_pass)
        low, high = value & low_mask, value >> self._low_bits
        for place in range(0, NUM_ROUNDS, 2):
            high = high ^ (_mixed(low ^ keys[place]) & high_mask)
            low = low ^ (_mixed(high ^ keys[place + 1]) & low_mask)
        return (high << self._low_bits) | low

    def sample(self, position: int) -> int:
        """The sample at a position."""
        number_of_pass, value = divmod(position, self.num_samples)
        value = self.permuted(number_of_pass, value)
        while value >= self.num_samples:
            value = self.permuted(number_of_pass, value)
        return int(value)


def _mixed(x: Any) -> Any:
    """A bijection of 32 bits with little structure left (the finalizer "lowbias32")."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
