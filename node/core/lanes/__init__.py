"""Lanes: of each fragment of the run the sync that is in flight, from its Open to its commit."""
