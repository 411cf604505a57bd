"""Sites of several hosts: `leader.py` in the node, which is host 0; `follower.py` and `relay.py` on each of the others;
`link.py` is what both ends have of the stream between them."""
