"""The service that keeps membership, plans and commits syncs. It carries no tensors.

Where sites claim different states of a commit, it computes one chunk (core/evidence.py).

`core` is pure; `store` persists; `service` is the gRPC shell; `web` serves metrics and the status page.
Imports atoll.protocol; never atoll.node, never torch.
"""
