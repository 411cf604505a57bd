"""Chunks on the move between nodes: the exchange of one sync, and state and payloads for those who catch up.

May import atoll.protocol and atoll.node.dataplane; never torch, the node's core or the daemon.
"""
