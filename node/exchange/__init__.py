"""Chunks on the move between nodes. `hub` has what a node has once, `service` answers peers; below them `sync`, the
exchange of one sync, and `catchup`, state and payloads for those who catch up; below these `peers`.

May import atoll.protocol and atoll.node.dataplane; never torch, the node's core or the daemon.
"""
