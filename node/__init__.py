"""The daemon of a site and what runs in its workers.

`core` decides (pure); `dataplane` computes (pure, over arrays and a byte store); `exchange` moves chunks between
nodes; `daemon` wires them to sockets, files and processes; `worker` runs inside the training processes and is the
only package here that may import torch.
"""
