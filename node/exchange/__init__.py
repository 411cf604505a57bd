"""Chunks on the move between nodes: the exchange of one sync, and catching up from donors. gRPC, no torch."""
