"""How the ranks of one site share a model: from a line of settings to torch's own parallelism.

`settings.py` is pure, and what the daemon reads of it; all else runs in the workers. It imports `protocol` and torch,
and nothing of the node.
"""
