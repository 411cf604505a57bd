"""Compiles all kernels into the cache beside them, where it has not got them."""

from __future__ import annotations

from atoll.node.dataplane import kernels as outer_kernels
from atoll.protocol.codecs import kernels

if __name__ == "__main__":
    kernels.warm_up()
    outer_kernels.warm_up()
