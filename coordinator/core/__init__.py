"""The coordinator's decisions: a state machine without sockets, threads, files, clocks or randomness.

`core.Core` is the entry, `run` is what all parts share, `events` are what happens and what is to be done about it.
The parts: `sites/` (who is here), `sync/` (the sync that is open), `log/` (what was committed), `data/` (samples),
`view/` (for people). Imports atoll.protocol only.
"""
