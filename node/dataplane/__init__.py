"""Encode, reduce, apply, chunk store, payload log: pure over arrays and files, no sockets, no torch."""
