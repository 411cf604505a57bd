"""The coordinator's decisions: a state machine without sockets, threads, files, clocks or randomness.

`machine.Core` is the entry; `events` are what happens and what is to be done about it; the other modules are its
parts (membership, admission, one sync, topology, commit log, the view for people). Imports atoll.protocol only.
"""
