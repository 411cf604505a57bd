"""Sites that nobody can dial: the relay that joins their outgoing connections, and how a site uses one.

`words`, `pairing` and `quota` are pure; `splice` joins two sockets for all of them. A relay's process is `main` and
`server`; a site has a `client`, which keeps it `attached` and leads gRPC through `forwarders`. Imports protocol, and
nothing else of the node but its home.
"""
