"""The service that keeps membership, plans and commits syncs, and never touches a tensor.

`core` is pure; `store` persists; `service` is the gRPC shell; `web` serves metrics and the status page.
Imports atoll.protocol; never atoll.node, never torch.
"""
