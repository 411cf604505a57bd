"""Reducers that are audited: which chunks are averaged once more, by whom, and what follows from that."""
