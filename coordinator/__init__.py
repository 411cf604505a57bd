"""The service that keeps membership, plans and commits syncs, and touches no tensor, but for one
chunk where sites claim different states (core/evidence.py).

`core` is pure; `store` persists; `service` is the gRPC shell; `web` serves metrics and the status page.
Imports atoll.protocol; never atoll.node, never torch.
"""
