"""The sync that is open."""
