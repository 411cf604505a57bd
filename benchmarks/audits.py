"""What audits of reducers cost: before Ready, for an auditor, and in bytes of a sync."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from atoll.node.dataplane.averages import recomputed
from atoll.node.dataplane.kept_contributions import KeptContributions
from atoll.protocol.codecs import kernels
from atoll.protocol.plans import payload_hash
from atoll.protocol.spec import spec_of
from atoll.protocol.sync_settings import KEPT_SYNCS, SyncSettings

ROUNDS = 3


def took_s(work: Callable[[int], object]) -> float:
    """The median of some rounds, after one that does not count."""
    found = []
    for turn in range(ROUNDS + 1):
        began = time.perf_counter()
        work(turn)
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks audits", description=__doc__)
    parser.add_argument("--chunks", type=int, default=32, help="of 1 Mi elements (default 32)")
    parser.add_argument("--sites", type=int, default=16)
    parser.add_argument("--audits", type=int, default=2, help="a sync")
    options = parser.parse_args(argv)
    sync = SyncSettings(audits=options.audits)
    values = np.random.default_rng(0).standard_normal(sync.chunk_elements).astype(np.float32)
    chunks = range(options.chunks)

    def encode(chunk: int) -> bytes:
        return kernels.encode(sync.codec_up, values)

    def encode_and_hash(turn: int) -> None:  # as the exchange does, beside sending
        for chunk in chunks:
            payload_hash(encode(chunk))

    with tempfile.TemporaryDirectory() as folder:
        kept = KeptContributions(Path(folder) / "kept")
        plain_s = took_s(encode_and_hash)
        kept_s = took_s(lambda turn: kept.keep(turn, chunks, encode, None))
        found = kept.of(ROUNDS)
        assert found is not None
        num_proof_bytes = len(found.proof(0))
    way = spec_of(sync, 0, 0).trainable
    one = encode(0)
    audit_s = took_s(lambda turn: recomputed(way, values.size, [(100, one)] * options.sites))
    sync_bytes = 2 * (options.sites - 1) * options.chunks * len(one)  # up and down, of all sites together
    audit_bytes = options.audits * (options.sites - 1) * (len(one) + num_proof_bytes)
    proof_bytes = (options.sites - 1) * options.chunks * num_proof_bytes
    num_files = KEPT_SYNCS + 2  # one under way, and one that is being written
    print(f"{options.chunks} chunks of {sync.chunk_elements} elements in {sync.codec_up}, {options.sites} sites")
    print(f"encoded and hashed {plain_s:.2f} s; and kept before Ready {kept_s:.2f} s: {kept_s / plain_s:.2f} of it")
    print(f"one chunk averaged once more {audit_s * 1e3:.0f} ms, of {options.sites} contributions")
    print(f"{options.audits} audits a sync {audit_bytes} bytes, {100 * audit_bytes / sync_bytes:.2f} % of the sync's")
    print(f"proofs with contributions {100 * proof_bytes / sync_bytes:.4f} %")
    disk_bytes = num_files * options.chunks * len(one)
    print(f"on each disk {disk_bytes} bytes, {disk_bytes / options.chunks / values.size:.1f} a parameter")
    return 0
