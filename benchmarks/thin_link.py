"""Five sites, one of them behind a link of 1 Mbit/s among links of 100: the pace of the others with it and without it.

Sites are network namespaces (root), with workers that sleep instead of computing, so that the machine is no bottleneck.
"""
